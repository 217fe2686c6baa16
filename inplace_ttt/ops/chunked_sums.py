"""The sum of a rank's writes, which ranks exchange.

Nothing is read, so one product computes the sum. Chunks are added one by one if each write has its own
factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import ChunkLayout, Span
from ..rules import PAPER_RULE, SumRule
from .chunked import Walk
from .precision import without_autocast
from .products import multiplies_directly


def sum_of_writes(
    z: Tensor,
    v: Tensor,
    spans: Sequence[Span | None],
    *,
    layout: ChunkLayout,
    clip: float | Tensor | None = None,
    rule: SumRule = PAPER_RULE,
) -> Tensor:
    """Returns Σ c_j V_jᵀZ_j over the complete chunks of one span per row.

    Differentiable once in z and v.

    Args:
        z: Keys [B, T, h].
        v: Targets [B, T, d].
        spans: For each row a span that starts at a chunk's first token, or None.
        layout: Provides the chunk size.
        clip: Largest Frobenius norm of one chunk's delta.
        rule: Provides the write norm.

    Returns:
        The sums [B, d, h] in the state's dtype; zero for a row without a span.
    """
    return _SumOfWrites.apply(z, v, spans, layout, clip, rule)


class _SumOfWrites(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, v: Tensor, spans: Sequence[Span | None], layout: ChunkLayout,
        clip: float | Tensor | None, rule: SumRule,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(z, v)
        ctx.spans, ctx.settings = spans, (1.0, clip, layout, False, rule)
        walk = Walk(z, v, None, None, *ctx.settings)
        state = z.new_zeros(z.shape[0], v.shape[-1], z.shape[-1], dtype=walk.dtype)
        # a product that first copies its tokens in float32 takes one chunk at a time
        whole = not walk.has_factors and (z.dtype == walk.dtype or multiplies_directly(z))
        with without_autocast(z.device):
            for row, tokens in _complete(spans, layout, whole):
                walk.add_delta(state[row], row, tokens)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_state: Tensor) -> tuple[Tensor | None, ...]:
        z, v = ctx.saved_tensors
        dz, dv = torch.zeros_like(z), torch.zeros_like(v)
        walk = Walk(z, v, None, None, *ctx.settings)
        with without_autocast(z.device):
            for row, tokens in _complete(ctx.spans, walk.layout, not walk.has_factors):
                walk.through_write(row, tokens, d_state[row], dz, dv)
        return dz, dv, None, None, None, None


def _complete(spans: Sequence[Span | None], layout: ChunkLayout, whole: bool) -> Iterator[tuple[int, Span]]:
    """Yields the row and tokens of the complete chunks of each span: one by one, or all as one if `whole`."""
    for row, span in enumerate(spans):
        start, stop = span or (0, 0)
        stop -= (stop - start) % layout.chunk_size
        if whole and start < stop:
            yield row, (start, stop)
        elif start < stop:
            yield from ((row, chunk) for chunk in layout.chunks((start, stop)))
