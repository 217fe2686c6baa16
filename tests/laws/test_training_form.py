"""The laws for TTT-NTP's training form: the next token's source as the target, writes and rows of a fixed
norm."""

from typing import Any

import pytest
import torch
from models import CHUNK, converted, distance, gradients, logits, random_ids
from torch import Tensor

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert, disable_ttt
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.surgery import config_of, fast_weights

NORMS: dict[str, Any] = {
    "conv": "next",
    "target": "hidden_states",
    "write_norm": "spectral",
    "preserve_row_norms": True,
    "eta": 0.2,
}
D = 6
LENGTHS = (4 * CHUNK + 2, 2 * CHUNK + 5, CHUNK, 3)


def next_target(dtype: torch.dtype = torch.float64) -> TargetGenerator:
    ttt = TargetGenerator(D, 5, "next", dtype=dtype)
    ttt.proj.data.copy_(torch.randn(D, D, generator=torch.Generator().manual_seed(0)))
    return ttt


def test_the_target_is_the_next_token_of_the_chunk() -> None:
    """As a convolution with one on tap t + 1; padding may hold anything."""
    ttt, layout = next_target(), ChunkLayout((((2, 13), (13, 19)), ((0, 7),)), 20, 4)
    x = torch.randn(2, 20, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tap = TargetGenerator(D, 3, "lookahead", dtype=torch.float64)
    tap.conv.data[:, 0, 2], tap.proj.data = 1, ttt.proj.data
    expected = tap(x, layout)
    x[0, :2] = x[1, 7:] = float("nan")
    x.requires_grad_()
    found = ttt(x, layout)
    assert torch.equal(found, expected.detach())
    (d_x,) = torch.autograd.grad(found.square().sum(), x)
    assert d_x.isfinite().all() and not d_x[1, 7:].any()


def test_it_has_no_convolution() -> None:
    model = converted("llama", **NORMS)
    assert not any(
        "conv" in name
        for name in [*model.state_dict(), *dict(model.named_parameters()), *dict(model.named_buffers())]
    )
    assert all(list(dict(layer.ttt.named_parameters())) == ["proj"] for layer in fast_weights(model).values())


@pytest.mark.parametrize("start", ["random_diagonal", "shared_diagonal", "identity"])
def test_the_start_of_p(start: str) -> None:
    model = converted("llama", writes=False, conv="next", proj_init=start)
    first, second = (layer.ttt.proj.detach() for layer in fast_weights(model).values())
    assert all(not (p - p.diagonal().diag()).any() and p.any() for p in (first, second))
    assert torch.equal(first, second) == (start != "random_diagonal")
    if start == "shared_diagonal":
        std = model.config.initializer_range
        assert torch.equal(
            first.diagonal(), torch.randn(32, generator=torch.Generator().manual_seed(1234567)) * std
        )
    if start == "identity":
        assert torch.equal(first, torch.eye(32))


def test_a_conversion_writes_at_once_and_reverts() -> None:
    model = converted(
        "llama", writes=False, conv="next", target="hidden_states", proj_init="identity", eta=0.001
    )
    ids = random_ids(2, 5 * CHUNK)
    assert not config_of(model).starts_as_base
    with disable_ttt(model):
        off = logits(model, ids)
    assert distance(logits(model, ids), off) > 1e-3


def test_packed_documents_are_apart() -> None:
    model = converted("llama", **NORMS)
    lengths = [CHUNK, 3 * CHUNK + 2, 1, 2 * CHUNK]
    documents = [random_ids(1, n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    apart = torch.cat([logits(model, d) for d in documents], 1)
    assert distance(logits(model, torch.cat(documents, 1), position_ids=positions), apart) < 5e-5
    with disable_ttt(model):
        assert distance(torch.cat([logits(model, d) for d in documents], 1), apart) > 0.02


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_the_row_alone(side: str, use_cache: bool) -> None:
    model, rows = converted("llama", **NORMS), [random_ids(1, n, seed=n) for n in LENGTHS]
    ids, mask = (
        random_ids(len(rows), LENGTHS[0], seed=99),
        torch.zeros(len(rows), LENGTHS[0], dtype=torch.long),
    )
    for r, row in enumerate(rows):
        start = LENGTHS[0] - row.shape[1] if side == "left" else 0
        ids[r, start : start + row.shape[1]], mask[r, start : start + row.shape[1]] = row[0], 1
    found = logits(
        model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=use_cache
    )
    for r, row in enumerate(rows):
        assert distance(found[r : r + 1, mask[r] == 1], logits(model, row)) < 5e-5, (
            f"row of {row.shape[1]} tokens"
        )


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
def test_no_token_reads_what_comes_later_or_its_own_chunk(use_cache: bool) -> None:
    model, ids = converted("llama", **NORMS), random_ids(2, 4 * CHUNK + 3)
    before = logits(model, ids, use_cache=use_cache)
    for t in (1, CHUNK - 1, CHUNK, 2 * CHUNK + 4, ids.shape[1] - 1):
        other = ids.clone()
        other[:, t] = 3 + (other[:, t] - 2) % 94
        after = logits(model, other, use_cache=use_cache)
        assert torch.equal(after[:, :t], before[:, :t]), f"token {t} changes an earlier one"
    with disable_ttt(model):
        assert torch.equal(logits(model, ids, use_cache=use_cache)[:, :CHUNK], before[:, :CHUNK])


def test_checkpointing_changes_no_gradient() -> None:
    model, ids = converted("llama", **NORMS).train(), random_ids(2, 4 * CHUNK)

    def found() -> dict[str, Tensor]:
        return gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)

    expected = found()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = found()
    assert recomputed.keys() == expected.keys()
    assert all(distance(grad, expected[name]) < 1e-5 for name, grad in recomputed.items())
    assert all(expected[name].any() for name in expected if name.endswith("proj") or "down_proj" in name)


def test_a_chunk_of_one_token_writes_nothing() -> None:
    model, ids = converted("llama", **{**NORMS, "chunk_size": 1}), random_ids(1, 20)
    with disable_ttt(model):
        off = logits(model, ids)
    assert distance(logits(model, ids), off) < 1e-5


def test_a_weight_that_does_not_show_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("llama", **NORMS)
    monkeypatch.setattr(type(fast_weights(model)[0]), "matrix", lambda self: None)
    with pytest.raises(InPlaceTTTError, match="need W0, which FastWeightLinear does not show"):
        logits(model, random_ids(1, 3 * CHUNK))


def test_gpt2_with_a_bias_and_a_transposed_weight() -> None:
    model, ids = converted("gpt2", **NORMS), random_ids(1, 4 * CHUNK)
    for layer in fast_weights(model).values():
        layer.bias.data.normal_(generator=torch.Generator().manual_seed(0))
    on = logits(model, ids)
    pieces = logits(model, ids, use_cache=True)
    assert distance(pieces, on) < 5e-5
    with disable_ttt(model):
        assert distance(logits(model, ids), on) > 0.01


def test_conversion_of_a_model_takes_every_option() -> None:
    model = converted("qwen3", **NORMS)
    again = InPlaceTTTConfig.from_dict(config_of(model).to_dict())
    assert again == config_of(model) and again.extensions["conv"] == "next"
    with pytest.raises(InPlaceTTTError, match="converted already"):
        convert(model)
