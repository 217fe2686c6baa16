"""Runs of the op on layouts of documents: outputs, states and gradients."""

import itertools
from typing import Any

import torch
from torch import Tensor

from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import (
    fast_weight,
    state_dtype,
)

H, D, ETA = 6, 5, 0.3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# name -> documents of each row, and the row length with its padding
DOCUMENTS: dict[str, tuple[list[list[tuple[int, int]]], int]] = {
    "one": ([[(0, 23)]], 23),
    "packed": ([[(0, 5), (5, 14), (14, 21)]], 21),
    "whole chunks": ([[(0, 8), (8, 24)]], 24),
    "single tokens": ([[(0, 1), (1, 2), (2, 3), (3, 11)]], 11),
    "unequal rows": ([[(0, 23)], [(0, 4), (4, 5), (5, 17)], [], [(0, 1)]], 25),
    "padding all around": ([[(3, 20)], [(2, 9), (11, 20)]], 22),
    "only padding": ([[]], 4),
}
CHUNK_SIZES = (1, 3, 8, 50)
CLIPS = {"free": None, "loose": 1e6, "biting": 0.4, "tensor": torch.tensor(1.5)}
CASES = [
    (clip, start, keep, w0)
    for clip in CLIPS
    for start, keep, w0 in itertools.product((False, True), repeat=3)
]


def layout_of(name: str, chunk_size: int) -> ChunkLayout:
    rows, length = DOCUMENTS[name]
    return ChunkLayout(tuple(tuple(row) for row in rows), length, chunk_size)


def inputs(
    layout: ChunkLayout,
    dtype: torch.dtype,
    start: bool,
    w0: bool,
    ridge: float | None = None,
    gated: bool = False,
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    shape = (layout.batch, layout.length)
    made = {
        "z": torch.randn(*shape, H, generator=g, dtype=torch.float64),
        "v": torch.randn(*shape, D, generator=g, dtype=torch.float64),
    }
    if w0:
        made["weight"] = torch.randn(D, H, generator=g, dtype=torch.float64)
    made = {name: x.to(dtype) for name, x in made.items()}
    if start:
        state = torch.randn(layout.batch, D, H, generator=g, dtype=torch.float64)
        if ridge is not None:
            keys = torch.randn(layout.batch, 2 * H, H, generator=g, dtype=torch.float64)
            state = torch.cat([state, keys.mT @ keys], dim=1)
        made["initial_state"] = state.to(state_dtype(dtype))
    if gated:
        made["gate"] = (2 * torch.rand(*shape, generator=g, dtype=torch.float64)).to(state_dtype(dtype))
    return {name: x.requires_grad_() for name, x in made.items()}


def run(
    backend: str,
    layout: ChunkLayout,
    given: dict[str, Tensor],
    clip: float | Tensor | None,
    keep: bool,
    eta: float = ETA,
    **rule: Any,
) -> dict[str, Tensor]:
    """Everything the op gives: outputs, state, and the gradient of each input under a random cotangent."""
    settings = {"weight": None, **given, **rule}
    result = fast_weight(**settings, eta=eta, layout=layout, clip=clip, backend=backend, return_state=keep)
    results = dict(zip(("out", "state"), result, strict=True)) if keep else {"out": result}
    g = torch.Generator().manual_seed(4)
    loss = sum((x * torch.randn(x.shape, generator=g).to(x.dtype)).sum() for x in results.values())
    grads = (
        torch.autograd.grad(loss, list(given.values()), allow_unused=True)
        if loss.requires_grad
        else [None] * len(given)
    )
    for name, x, grad in zip(given, given.values(), grads, strict=True):
        results[f"d_{name}"] = torch.zeros_like(x) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}
