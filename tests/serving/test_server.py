"""vLLM's server on a converted folder, without a flag of ours, asked by its users' client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

import inplace_ttt
from serving.checkpoints import save
from serving.test_tokens import generated, prompts

SECONDS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "ttt"
    save(path, "llama", "compact")
    return path


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Of a server that runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    settings = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--skip-tokenizer-init"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = (folder.parent / "log").open("w")
    server = subprocess.Popen([*command, *settings], stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + SECONDS
        while not _answers(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < end, (folder.parent / "log").read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def test_openai_s_client_gets_what_generate_says(folder: Path, address: str) -> None:
    model, client = inplace_ttt.load(folder), OpenAI(base_url=f"{address}/v1", api_key="-")
    for prompt in prompts(5, 100, 300):
        for _ in range(2):  # the second time, the prefix is there
            answer = client.completions.create(
                model=str(folder), prompt=prompt, max_tokens=24, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True, "detokenize": False},
            )  # fmt: skip
            assert answer.choices[0].token_ids == generated(model, prompt)
