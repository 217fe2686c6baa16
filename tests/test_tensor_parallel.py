"""Tensor parallelism (`tp_plan="auto"`): each rank holds a part of the down-projection's input, and of the
state."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import converted, distance, logits, random_ids, streamed
from ranks import on_ranks
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from inplace_ttt import InPlaceTTTError, KeyWhitening, PromptWrite, UpdateClip

IDS = random_ids(2, 40)
EXACT: dict[str, dict[str, Any]] = {
    "paper": {},
    "hidden states, causal": {"target": "hidden_states", "conv": "causal", "eta": (0.5, 2.0)},
}
REFUSED: dict[str, dict[str, Any]] = {
    "clip": {"clip": UpdateClip(0.05, mode="always")},
    "ridge": {"update_rule": "ridge", "ridge": 0.5},
    "whitening": {"whitening": KeyWhitening(), "normalize_targets": True},
    "prompt_write": {"conv": "next", "prompt_write": PromptWrite()},
}


def _read(group: dist.ProcessGroup, folder: str) -> None:
    split = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size(group))
    for name, settings in EXACT.items():
        model, whole = (
            AutoModelForCausalLM.from_pretrained(Path(folder) / name, distributed_config=split),
            converted("llama", **settings),
        )
        expected = logits(whole, IDS)
        assert distance(logits(model, IDS), expected) < 1e-5
        assert distance(streamed(model, IDS, [9, 1, 1, 29]), expected) < 1e-5
        rows = {
            "max_new_tokens": 20,
            "do_sample": False,
            "eos_token_id": -1,
            "attention_mask": torch.ones_like(IDS),
        }
        assert torch.equal(model.generate(IDS, **rows), whole.generate(IDS, **rows))
    for name in REFUSED:
        with pytest.raises(InPlaceTTTError, match=f"tensor parallelism splits.*{name}.*leave that out"):
            AutoModelForCausalLM.from_pretrained(Path(folder) / name, distributed_config=split)


def test_ranks_that_split_the_model_are_one(tmp_path: Path) -> None:
    for name, settings in (EXACT | REFUSED).items():
        converted("llama", **settings).save_pretrained(tmp_path / name)
    on_ranks(2, _read, str(tmp_path))
