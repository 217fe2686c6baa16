"""Where faults are planted beside the rule: targets, their source, the documents of a call, the op's
inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.forward_context import ForwardContext
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout, Span
from inplace_ttt.ops import fast_weight as right_op

from .conditions import When
from .under_way import Patch, Place, now, pieces, place_in

Plant = Callable[[float, When], Callable[[Patch], None]]

Target = Callable[[TargetGenerator, Tensor, ChunkLayout, Tensor], Tensor]
"""Generator, normalize_targets source X [B, T, d], layout, the right targets -> wrong ones [B, T, d]."""


def with_target(make: Callable[[float], Target]) -> Plant:
    """Plants other targets where a condition holds."""

    def of(size: float, when: When) -> Callable[[Patch], None]:
        wrong = make(size)

        def plant(patch: Patch) -> None:
            def forward(self: TargetGenerator, x: Tensor, layout: ChunkLayout) -> Tensor:
                right = real(self, x, layout)
                at = when.tokens(layout)
                if not at.any():
                    return right
                return torch.where(
                    at[..., None],
                    wrong(self, self.normalize_source(x.to(self.proj.dtype)), layout, right),
                    right,
                )

            real = TargetGenerator.forward
            patch.setattr(TargetGenerator, "forward", forward)

        return plant

    return of


def mixed(wrong: Target) -> Callable[[float], Target]:
    """The right targets with a share of the wrong ones in their place."""

    def make(size: float) -> Target:
        return lambda self, x, layout, right: right + size * (wrong(self, x, layout, right) - right)

    return make


def with_source(make: Callable[[float], Callable[[FastWeight, Tensor], Tensor]]) -> Plant:
    """Plants another target source where a condition holds; make: size -> of layer and right source [B, T,
    d], the wrong one."""

    def of(size: float, when: When) -> Callable[[Patch], None]:
        wrong = make(size)

        def source(layer: FastWeight, x: Tensor) -> Tensor:
            call = now()
            assert call is not None
            at = when.tokens_of(call)
            return torch.where(at[..., None], wrong(layer, x), x) if at.any() else x

        def plant(patch: Patch) -> None:
            def read_whole(self: FastWeight, z: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
                return real_whole(self, z, source(self, x), context)

            def advance(
                self: FastWeightStream, out: Tensor, z: Tensor, x: Tensor, spans: Any, layer: Any, **rest: Any
            ) -> Tensor:
                return real_advance(self, out, z, source(layer, x), spans, layer, **rest)

            real_whole, real_advance = FastWeight._read_whole, FastWeightStream.advance
            patch.setattr(FastWeight, "_read_whole", read_whole)
            patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))

        return plant

    return of


def with_inputs(
    change: Callable[[float], Callable[[Tensor, Tensor, Tensor | None], tuple[Any, Any, Any]]],
) -> Plant:
    """Plants other inputs of the op: keys [B, T, h], targets [B, T, d] and W0, all of a call in which the
    condition holds anywhere."""

    def of(size: float, when: When) -> Callable[[Patch], None]:
        changed = change(size)

        def op(z: Tensor, v: Tensor, weight: Tensor | None, *, layout: ChunkLayout, **rest: Any) -> Any:
            at = when.tokens(layout)
            if not at.any():
                return right_op(z, v, weight, layout=layout, **rest)
            keys, values, w0 = changed(z, v, weight)
            mask = at[..., None]
            return right_op(
                torch.where(mask, keys, z), torch.where(mask, values, v), w0, layout=layout, **rest
            )

        return lambda patch: patch.setattr("inplace_ttt.layer.fast_linear.fast_weight", op)

    return of


def with_documents(
    change: Callable[[float], Callable[[tuple[Span, ...], int, int], tuple[Span, ...]]],
) -> Plant:
    """Plants other documents of rows without a cache; change: size -> of a row's documents, its length and
    chunk, the wrong ones.

    A condition holds for a row where it holds at one of its chunks.
    """

    def of(size: float, when: When) -> Callable[[Patch], None]:
        changed = change(size)

        def plant(patch: Patch) -> None:
            def layout(self: ForwardContext, chunk_size: int) -> ChunkLayout:
                right = real(self, chunk_size)
                call = now()
                if call is None or call.cached:
                    return right
                acts = {piece.index for piece in pieces(right) if when.holds(piece.place)}
                if not acts:
                    return right
                rows = [
                    changed(row, right.length, chunk_size) if i in acts else row
                    for i, row in enumerate(right.documents)
                ]
                return ChunkLayout(tuple(rows), right.length, chunk_size)

            real = ForwardContext.layout
            patch.setattr(ForwardContext, "layout", layout)

        return plant

    return of


def acts_in(when: When, stream: FastWeightStream, row: int) -> bool:
    """Whether a condition holds for a row of a stream, in a call or between two."""
    call = now()
    return when.holds(
        place_in(stream, row) if call is None else Place(call, row, 0, stream.rows[row].written)
    )
