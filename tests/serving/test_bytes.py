"""What a request takes beside vLLM's KV cache, counted and measured; and vLLM's blocks are as big as they are
for the base."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
from vllm.v1.engine.llm_engine import LLMEngine

from inplace_ttt import InPlaceTTTConfig
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.serving import blocks, model
from inplace_ttt.serving.fast_linear import FastRowParallelLinear
from inplace_ttt.serving.slots import Slots
from serving.checkpoints import LIVE, base, save
from serving.test_tokens import engine, free_slots, generated, prompts, served

D, H, CHUNK, SLOTS = 576, 1536, 128, 17
"""SmolLM2-135M's."""
FLOAT = 4


@pytest.mark.parametrize(
    ("preset", "dtype"), [("paper", torch.float32), ("ridge", torch.float32), ("ridge", torch.bfloat16)]
)
def test_a_slot_takes_what_is_counted(preset: str, dtype: torch.dtype) -> None:
    config = InPlaceTTTConfig.preset(preset, chunk_size=CHUNK)
    rows, width = config.state_shape(D, H)
    # in float32 the paper's sum is what is read
    reads = 0 if preset == "paper" else D * width * dtype.itemsize
    counted = rows * width * FLOAT + reads + CHUNK * (width + D) * dtype.itemsize
    # in this process memory that was given back may be taken again
    with get_context("spawn").Pool(1) as fresh:
        size, taken = fresh.apply(_taken, (config, dtype))
    assert size == counted
    assert taken == pytest.approx(SLOTS * counted, rel=0.03)


def _taken(config: InPlaceTTTConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a slot, and by how much the process grows by all of them."""
    torch.zeros(100).fill_(1)
    before = psutil.Process().memory_info().rss
    slots = Slots(SLOTS, config, D, H, dtype, torch.device("cpu"))
    for tensor in (slots._state.value, slots._state._read, *slots._open.held):
        assert tensor is not None
        tensor.fill_(1)  # or the system gives no memory
    return slots.nbytes, psutil.Process().memory_info().rss - before


def test_as_many_slots_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds none free waits; and where not even one request fits, the engine does not start."""
    said = list[str]()
    monkeypatch.setattr(blocks._LOG, "warning", lambda text, *given: said.append(text % given))
    trained = save(tmp_path / "ttt", "llama", "ridge")
    asked = prompts(40, 70, 100)
    expected = {number: generated(trained, prompt) for number, prompt in enumerate(asked)}
    with engine(tmp_path / "ttt", enable_prefix_caching=False) as made:
        layers = made.vllm_config.compilation_config.static_forward_context.values()
        size = sum(layer.slots.nbytes for layer in layers if isinstance(layer, FastRowParallelLinear))
        assert free_slots(made)[1] == 8
    monkeypatch.setattr(model, "room_for_slots", lambda device, share: 3 * size)  # slot 0 takes one
    with engine(tmp_path / "ttt", enable_prefix_caching=False) as made:
        assert free_slots(made)[1] == 2
        assert served(made, asked) == expected
    assert "hold the fast weights of 2 requests at once, not of 8; others wait" in said[0]
    monkeypatch.setattr(model, "room_for_slots", lambda device, share: 2 * size)
    with (
        pytest.raises(InPlaceTTTError, match=r"a request's fast weights need .* GB, but .* GB are free"),
        engine(tmp_path / "ttt", enable_prefix_caching=True),
    ):
        pass


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preset", LIVE)
def test_blocks_keep_their_size(preset: str, caching: bool, tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "base")
    save(tmp_path / "ttt", "llama", preset)
    sizes = []
    for name in ("base", "ttt"):
        with engine(tmp_path / name, enable_prefix_caching=caching) as made:
            sizes.append((made.vllm_config.cache_config.block_size, page_bytes(made)))
    assert sizes[0] == sizes[1]


def page_bytes(made: LLMEngine) -> int:
    """Of a block of the KV cache of attention."""
    groups = made.engine_core.engine_core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    return next(
        group.kv_cache_spec.real_page_size_bytes
        for group in groups
        if "Attention" in type(group.kv_cache_spec).__name__
    )
