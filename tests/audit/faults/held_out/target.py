"""Faults of the target and of documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt import surgery
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout, Span
from inplace_ttt.ops import chunk_conv

from .. import conditions as only
from ..conditions import When
from ..fault import Kind, owned
from ..planting import Target, mixed, with_documents, with_source, with_target
from ..under_way import Patch

SIZES = (1.0, 0.3, 0.1)
WRITES = (*only.ANYWHERE, *only.STREAMED)
SEVERAL = tuple(when for when in WRITES if when is not only.DECODING)
"""Conditions of calls with several tokens: the norm of a single token is its own mean."""


def without_p(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """A multiple of 1 of P's size in its place."""
    return (
        chunk_conv(x, self.conv, layout, self.first_tap) * self.proj.detach().norm() / len(self.proj) ** 0.5
    )


def diagonal(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    return chunk_conv(x, self.conv, layout, self.first_tap) * self.proj.diagonal()


def without_tap(tap: int) -> Callable[[float], Target]:
    """The target without one of its taps."""

    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        kept = torch.ones(self.conv.shape[-1], dtype=x.dtype)
        kept[tap] = 0
        return chunk_conv(x, self.conv * kept, layout, self.first_tap) @ self.proj

    return mixed(target)


def mixed_channels(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """Each channel is convolved with the next one's source."""
    return chunk_conv(x.roll(1, -1), self.conv, layout, self.first_tap) @ self.proj


def normalized(size: float) -> Callable[[FastWeight, Tensor], Tensor]:
    def source(layer: FastWeight, x: Tensor) -> Tensor:
        norms = x.norm(dim=-1, keepdim=True).clamp(min=1e-9)
        return x * (norms.detach().mean() / norms) ** size

    return source


def from_the_mlp(size: float, when: When) -> Callable[[Patch], None]:
    """A share of the source is the MLP's input, at the source's size."""

    def source(layer: FastWeight, x: Tensor) -> Tensor:
        other = layer.__dict__.get("mlp_input")
        if other is None or other.shape != x.shape:
            return x
        return x + size * (other.to(x) * x.detach().norm() / other.detach().norm().clamp(min=1e-9) - x)

    def plant(patch: Patch) -> None:
        def install(parts: Any, *args: Any, **kwargs: Any) -> None:
            real(parts, *args, **kwargs)
            parts.mlp.register_forward_pre_hook(
                lambda module, given: parts.down_proj.__dict__.__setitem__(
                    "mlp_input", given[0] if given else None
                )
            )

        real = surgery.install
        patch.setattr(surgery, "install", install)
        with_source(lambda _: source)(size, when)(patch)

    return plant


def joined(longest: float) -> Callable[[tuple[Span, ...], int, int], tuple[Span, ...]]:
    """Documents shorter than so many chunks go into the next one."""

    def change(row: tuple[Span, ...], length: int, chunk: int) -> tuple[Span, ...]:
        spans: list[Span] = []
        start: int | None = None
        for (first, stop), following in itertools.pairwise([*row, (length, length)]):
            start = first if start is None else start
            if stop - first < longest * chunk and following[0] == stop and following[1] > stop:
                continue
            spans.append((start, stop))
            start = None
        return tuple(spans)

    return change


def one_grid(_: float) -> Callable[[tuple[Span, ...], int, int], tuple[Span, ...]]:
    """The grid is the row's: what a document has before the first line of it is cut off."""

    def change(row: tuple[Span, ...], length: int, chunk: int) -> tuple[Span, ...]:
        spans: list[Span] = []
        for start, stop in row:
            line = start + -start % chunk
            spans += [(start, min(line, stop))] if start < line else []
            spans += [(line, stop)] if line < stop else []
        return tuple(spans)

    return change


PACKED = (
    only.ALWAYS,
    only.IN_TRAINING,
    only.PACKED_IN_A_BATCH,
    only.LATE_DOCUMENTS,
    only.LATER_LAYER,
    only.LATER_ROWS,
)
PACKED_SCENES = ("packed", "packed training")
KINDS: tuple[Kind, ...] = (
    Kind("P is missing", "target", owned("projection-untransposed"), with_target(mixed(without_p)), SIZES, WRITES, 3),
    Kind("the first tap is missing", "target", owned("conv-size"), with_target(without_tap(0)), (1.0, 0.3), (only.ALWAYS, *WRITES), 3),
    Kind("the last tap is missing", "target", owned("conv-size conv-lookahead streaming-target"), with_target(without_tap(-1)), (1.0, 0.3),
         WRITES, 3),
    Kind("some of the MLP's input is in the source", "target", owned("target-source"), from_the_mlp, SIZES, WRITES, 4),
    Kind("some of the MLP's input is in the source", "target", owned("target-source"), from_the_mlp, whens=only.COARSE, count=2),
    Kind("the source is normalized", "target", owned("target-source no-normalization"), with_source(normalized), (1.0, 0.5), SEVERAL, 3),
    Kind("channels take their neighbors' source", "target", owned("conv-depthwise"), with_target(mixed(mixed_channels)), SIZES, WRITES, 3),
    Kind("only P's diagonal counts", "target", owned("projection-untransposed"), with_target(mixed(diagonal)), (1.0, 0.3), WRITES, 3),
    Kind("short documents go into the next", "layout", owned("document-reset document-grid"), with_documents(joined), (1.0, 2.4), PACKED, 4,
         PACKED_SCENES),
    Kind("the grid is the row's", "layout", owned("document-grid document-reset"), with_documents(one_grid), whens=PACKED, count=3,
         scenes=PACKED_SCENES),
)  # fmt: skip
