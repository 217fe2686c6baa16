"""vLLM's server on a converted folder, without a flag of ours, asked by its users' client."""

from __future__ import annotations

from pathlib import Path

import inplace_ttt
from serving.checkpoints import save, save_tokenizer
from serving.servers import VLLM, running, said
from serving.test_tokens import generated, prompts


def test_openai_s_client_gets_what_generate_says(tmp_path: Path) -> None:
    folder = tmp_path / "ttt"
    save(folder, "llama", "ridge")
    save_tokenizer(folder)
    model = inplace_ttt.load(folder)
    with running(
        tmp_path, "vllm.entrypoints.openai.api_server", "--model", str(folder), behind=VLLM
    ) as server:
        for prompt in prompts(5, 100, 300):
            for _ in range(2):  # the second time, the prefix is there
                assert said(server.client(), folder, prompt) == generated(model, prompt)
