"""Servers in processes of their own, and what is asked of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

from serving.test_tokens import NEW

SECONDS = 240
VLLM = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager")


@dataclass(frozen=True)
class Server:
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, key: str = "-") -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0)


@contextmanager
def running(folder: Path, module: str, *arguments: str, behind: Sequence[str] = ()) -> Iterator[Server]:
    """`python -m MODULE ARGUMENTS --port N BEHIND`, until it answers; it works in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / f"log-{port}"
    with log.open("w") as out:
        command = [sys.executable, "-m", module, *arguments, "--port", str(port), *behind]
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, cwd=folder, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        end = time.monotonic() + SECONDS
        while not _answers(f"{server.address}/health"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def said(client: OpenAI, model: Path, prompt: list[int], new: int = NEW, **ours: Any) -> list[int]:
    """The tokens of a completion."""
    answer = client.completions.create(
        model=str(model), prompt=prompt, max_tokens=new, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, "detokenize": False, **ours},
    )  # fmt: skip
    tokens = answer.choices[0].token_ids  # type: ignore[attr-defined]
    assert isinstance(tokens, list)
    return tokens


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
