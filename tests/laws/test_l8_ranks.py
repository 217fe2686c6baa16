"""L8: a sequence across P ranks gives what one rank gives, in outputs and every gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight
from inplace_ttt.ops.scan import fast_weight_across_ranks
from inplace_ttt.rules import RidgeRule, Rule, SumRule

CHUNK, WIDTH, D, H = 4, 24, 7, 5  # d does not divide by the ranks
LAYOUTS = {
    "one document": lambda n: [[n], [n]],
    "ends on borders": lambda n: [[WIDTH] * (n // WIDTH), [n]],
    "straddling": lambda n: [[20, n - 20], [n - 12, 5]],
    "short ones": lambda n: [[4, 8, 12] * (n // 24), [4] * (n // 4 - 1)],
    "padded at the end": lambda n: [[n - 9], [n // 2 - 3]],
    "a row of padding": lambda n: [[n], []],
}


def inputs(
    layout: ChunkLayout, dtype: torch.dtype, with_state: bool, ridge: float | None, gated: bool
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (
            (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        )

    given = {
        "z": draw(layout.batch, layout.length, H),
        "v": draw(layout.batch, layout.length, D, scale=0.3),
        "weight": draw(D, H),
    }
    if with_state:
        state = draw(layout.batch, D, H)
        if ridge is not None:
            keys = draw(layout.batch, 3, H)
            state = torch.cat([state, keys.mT @ keys], dim=1)
        given["initial_state"] = state.detach().requires_grad_()
    if gated:
        given["gate"] = draw(layout.batch, layout.length).detach().abs().requires_grad_()
    return given


def whole(
    layout: ChunkLayout, given: dict[str, Tensor], weights: tuple[Tensor, Tensor], **options: Any
) -> list[Tensor]:
    out, state = fast_weight(**given, layout=layout, backend="reference", return_state=True, **options)
    ((out * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return [out.detach(), state.detach(), *(x.grad for x in given.values())]


def compare(
    group: dist.ProcessGroup, name: str, dtype: torch.dtype, clip: float | None, with_state: bool, fused: bool, ridge: float | None,
    norms: bool = False, gated: bool = False,
) -> None:  # fmt: skip
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    length = WIDTH * ranks
    layout = ChunkLayout.from_lengths(LAYOUTS[name](length), CHUNK, length)
    rule: Rule = SumRule() if ridge is None else RidgeRule(ridge)
    options: dict[str, Any] = {"eta": 0.2, "clip": clip, "rule": rule}
    if norms:
        rows = torch.randn(D, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
        options |= {"rule": SumRule("spectral", preserve_row_norms=True), "keep_norms_of": rows}
    state_shape = layout.batch, rule.state_rows(D, H), H
    weights = torch.randn(layout.batch, length, D, dtype=dtype), torch.randn(state_shape, dtype=dtype)
    for seed, tensor in enumerate(weights):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))
    if not fused:
        weights = weights[0], torch.zeros_like(weights[1])
    expected = whole(layout, inputs(layout, dtype, with_state, ridge, gated), weights, **options)
    mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
    given = inputs(layout, dtype, with_state, ridge, gated)
    cut = {"z", "v", "gate"} & given.keys()
    local = {**given, **{key: given[key].detach()[:, mine].requires_grad_() for key in cut}}
    found = fast_weight_across_ranks(**local, layout=layout, group=group, return_state=fused, **options)
    out, state = found if fused else (found, None)
    loss = (out * weights[0][:, mine]).sum()
    if state is not None:
        loss = loss + (state * weights[1]).sum() / ranks  # each rank holds the same final state
        torch.testing.assert_close(state, expected[1], msg=f"final state: {name}")
    loss.backward()
    for tensor in (given["weight"], given.get("initial_state")):
        if tensor is not None:
            dist.all_reduce(tensor.grad, group=group)
    wanted = dict(zip(("out", "state", *given), expected, strict=True))
    for what, got in {"out": out.detach(), **{key: x.grad for key, x in local.items()}}.items():
        want = wanted[what][:, mine] if what == "out" or what in cut else wanted[what]
        close = {"rtol": 1e-5, "atol": 1e-5 * float(want.abs().max())} if dtype == torch.float32 else {}
        torch.testing.assert_close(
            got, want, **close, msg=lambda m, what=what: f"{what}, {name}, clip {clip}, ridge {ridge}: {m}"
        )


def every_case(group: dist.ProcessGroup) -> None:
    for name in LAYOUTS:
        for dtype in (torch.float64, torch.float32):
            for clip, with_state, with_final in (
                (None, False, False),
                (2.0, False, True),
                (None, True, True),
                (2.0, True, False),
            ):
                compare(group, name, dtype, clip, with_state, with_final, None)
                compare(group, name, dtype, clip, with_state, with_final, 0.5)
                compare(group, name, dtype, clip, with_state, with_final, 0.5, gated=True)
                if clip is None:
                    compare(group, name, dtype, clip, with_state, with_final, None, norms=True)


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_ranks_agree_with_one(ranks: int) -> None:
    on_ranks(ranks, every_case)


def test_a_border_inside_a_chunk_is_refused() -> None:
    layout = ChunkLayout.from_lengths([[48]], 5)
    for rank in (0, 1):  # both, or the other would wait for ever
        with pytest.raises(
            InPlaceTTTError, match="rank 1 begins at token 24 of row 0, 4 tokens into a chunk of 5"
        ):
            layout.part(rank, 2)
    with pytest.raises(InPlaceTTTError, match="rows of 48 tokens cannot be split evenly over 5 ranks"):
        layout.part(0, 5)
