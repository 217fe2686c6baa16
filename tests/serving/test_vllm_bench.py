"""`vllm bench serve`, vLLM's own client for measurements, runs against `inplace-ttt serve` as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from serving.checkpoints import save, save_tokenizer
from serving.servers import VLLM, Server, running

CLIENT = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
"""What `vllm bench serve` runs. The build for CPUs lacks the metadata that the command itself reads first."""
REQUESTS, READ, NEW = 6, 60, 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bench")
    save(folder / "ttt", "llama", "ridge")
    save_tokenizer(folder / "ttt")
    with running(folder, "inplace_ttt.cli", "serve", str(folder / "ttt"), behind=("--vllm", *VLLM)) as served:
        yield served


def measured(server: Server, *more: str) -> dict[str, Any]:
    """Returns the client's result."""
    folder = server.log.parent
    words = {
        "--backend": "openai",
        "--base-url": server.address,
        "--model": folder / "ttt",
        "--dataset-name": "random",
        "--random-input-len": READ,
        "--random-output-len": NEW,
        "--num-prompts": REQUESTS,
        "--max-concurrency": 3,
        "--result-dir": folder,
        "--result-filename": "result.json",
    }
    arguments = [str(word) for pair in words.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *arguments, "--ignore-eos", "--save-result", *more],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / "result.json").read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("fields", [{}, {"memory": "notes"}, {"memory": "notes", "freeze": True}])
def test_every_request_is_answered(fields: dict[str, Any], server: Server) -> None:
    found = measured(server, *(["--extra-body", json.dumps(fields)] if fields else []))
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * NEW
    assert found["mean_ttft_ms"] > 0 and found["mean_tpot_ms"] > 0 and found["output_throughput"] > 0
    if fields:  # the last token of an answer is not read
        with urllib.request.urlopen(f"{server.address}/v1/memories/notes", timeout=60) as answer:
            assert json.load(answer)["tokens"] == REQUESTS * (READ + NEW - 1)
