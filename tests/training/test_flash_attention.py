"""Flash attention's way through a run, with a stand-in for its kernels: documents stay apart, at any batch
size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import converted
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

from inplace_ttt import InPlaceTTTError
from inplace_ttt.training.loop.batches import collate, needs_document_lengths, with_document_lengths
from inplace_ttt.training.ulysses import check_sharing

from .recipes import tiny_recipe
from .test_held_out import rows

FAMILIES = ["llama", "mistral", "qwen3", "gemma3", "phi3", "olmo2", "granite", "starcoder2"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Any = (-1, -1),
    **_: Any,
):
    """[B, T, heads, channels], as flash_attn_func."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) * softmax_scale + mask
    return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), v)


def attend_apart(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **settings: Any) -> Tensor:
    """[T, heads, channels] of documents one after another, as flash_attn_varlen_func."""
    spans = list(zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), strict=False))
    return torch.cat([attend(*(x[None, a:b] for x in (q, k, v)), **settings)[0] for a, b in spans])


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stand-in; gives how often transformers looked for documents in positions, which waits for the
    device each time."""
    looks: list[int] = []

    def settings(
        key_length: int, softmax_scale: float, sliding_window: int | None = None, **_: Any
    ) -> dict[str, Any]:
        window = -1 if sliding_window is None or key_length <= sliding_window else sliding_window - 1
        return {"softmax_scale": softmax_scale, "window_size": (window, window)}

    def is_packed(position_ids: Any, batch_size: int, known: Any = flash._is_packed_sequence) -> Any:
        looks.append(batch_size)
        return known(position_ids, batch_size)

    monkeypatch.setattr(
        flash,
        "lazy_import_flash_attention",
        lambda name: ((attend, attend_apart, None, None, None), (settings, None)),
    )
    monkeypatch.setattr(flash, "_is_packed_sequence", is_packed)
    return looks


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_in_a_batch_stay_apart(name: str, looked_for: list[int]) -> None:
    """Three rows of one to three documents: as under sdpa, which takes a mask. Left alone, transformers lets
    them see each other."""
    model, batch = converted(name).eval(), collate(rows())
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        model.config._attn_implementation = "flash_attention_2"
        plain = model(**inputs, use_cache=False).logits
        looked_for.clear()
        found = model(**with_document_lengths(inputs), use_cache=False).logits.view_as(expected)
    assert (plain - expected).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not looked_for


def test_where_lengths_are_needed(tmp_path: Path) -> None:
    shared = ("parallel.nproc_per_node=2", "parallel.sequence_parallel_size=2")
    for settings, needed in (
        ((), False),
        (("model.attn_implementation=flash_attention_2",), True),
        (("model.attn_implementation=flash_attention_2", *shared), False),
    ):
        assert needs_document_lengths(tiny_recipe(tmp_path, *settings)) == needed


def test_several_shared_rows_at_a_time_are_refused(tmp_path: Path) -> None:
    settings = ["parallel.nproc_per_node=2", "parallel.sequence_parallel_size=2", "training.batch_size=2"]
    check_sharing(tiny_recipe(tmp_path, *settings), 16)
    with pytest.raises(
        InPlaceTTTError, match=r"flash attention would not see the documents; set training\.batch_size to 1"
    ):
        check_sharing(tiny_recipe(tmp_path, *settings, "model.attn_implementation=flash_attention_2"), 16)
