"""Faults of the target: its convolution, its projection, its source."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import chunk_conv

from . import conditions as only
from .fault import Kind, owned
from .planting import Target, mixed, with_source, with_target

SIZES = (1.0, 0.3, 0.1)
WRITES = (*only.ANYWHERE, *only.STREAMED)


def transposed(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    return chunk_conv(x, self.conv, layout, self.first_tap) @ self.proj.T


def shifted(by: int) -> Target:
    """Taps stand so many tokens too far ahead."""
    return lambda self, x, layout, right: chunk_conv(x, self.conv, layout, self.first_tap + by) @ self.proj


def reversed_taps(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """A convolution in place of a correlation."""
    return chunk_conv(x, self.conv.flip(-1), layout, self.first_tap) @ self.proj


def over_the_edge(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """Taps end at the document, not at the chunk."""
    whole = ChunkLayout(layout.documents, layout.length, max(layout.length, 1))
    return chunk_conv(x, self.conv, whole, self.first_tap) @ self.proj


def repeated_edges(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """What lies beyond a chunk's edge is the token at the edge."""
    rows = []
    for row, documents in enumerate(layout.documents):
        out, done = [], 0
        for document in documents:
            for begin, end in layout.chunks(document):
                reach = self.conv.shape[-1]
                edges = [
                    x[row, begin : begin + 1].expand(reach, -1),
                    x[row, begin:end],
                    x[row, end - 1 : end].expand(reach, -1),
                ]
                longer = torch.cat(edges)[None]
                alone = ChunkLayout.from_lengths([[longer.shape[1]]], longer.shape[1])
                out += [
                    x.new_zeros(begin - done, x.shape[-1]),
                    chunk_conv(longer, self.conv, alone, self.first_tap)[0, reach:-reach],
                ]
                done = end
        rows.append(torch.cat([*out, x.new_zeros(layout.length - done, x.shape[-1])]))
    return torch.stack(rows) @ self.proj


def short_of_lookahead(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """Tokens whose taps reach over the end of the chunk have no target."""
    ids, ahead = layout.chunk_ids(), self.first_tap + self.conv.shape[-1] - 1
    inside = torch.nn.functional.pad(
        ids[:, ahead:] == ids[:, : ids.shape[1] - ahead], (0, min(ahead, ids.shape[1]))
    )
    return right * inside[:, : ids.shape[1], None]


def squashed(size: float) -> Target:
    """Bounded to a few times their usual size; the smaller the number, the less they feel it."""

    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        bound = right.detach().square().mean().sqrt().clamp(min=1e-12) / size
        return bound * torch.tanh(right / bound)

    return target


def alike_taps(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
    """All channels have the mean of their kernels."""
    return (
        chunk_conv(
            x, self.conv.mean(0, keepdim=True).expand_as(self.conv).contiguous(), layout, self.first_tap
        )
        @ self.proj
    )


def constant(size: float) -> Target:
    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        usual = self.conv.detach().abs().mean() * self.proj.detach().abs().mean() * len(self.proj)
        return right + size * usual * (layout.chunk_ids() >= 0)[..., None]

    return target


def source_kept(size: float) -> Target:
    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        scale = right.detach().norm() / x.detach().norm().clamp(min=1e-12)
        return right + size * scale * x

    return target


def noisy(size: float) -> Callable[[FastWeight, Tensor], Tensor]:
    def source(layer: FastWeight, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        return x + size * x.detach().square().mean().sqrt() * noise

    return source


LOOKAHEAD = "conv-lookahead conv-size streaming-target"
KINDS: tuple[Kind, ...] = (
    Kind("P is transposed", "target", owned("projection-untransposed"), with_target(mixed(transposed)), SIZES, WRITES, 5),
    Kind("P is transposed", "target", owned("projection-untransposed"), with_target(mixed(transposed)), whens=only.COARSE, count=2),
    Kind("the target is a token late", "target", owned(LOOKAHEAD), with_target(mixed(shifted(1))), SIZES, WRITES, 4),
    Kind("the target is a token early", "target", owned(LOOKAHEAD), with_target(mixed(shifted(-1))), SIZES, WRITES, 3),
    Kind(
        "taps are reversed", "target", owned("conv-lookahead conv-depthwise conv-size streaming-target"), with_target(mixed(reversed_taps)),
        SIZES, (only.ALWAYS, *WRITES), 4,
    ),
    Kind("taps reach over a chunk's edge", "target", owned("conv-isolation"), with_target(mixed(over_the_edge)), SIZES,
         tuple(when for when in only.ANYWHERE if when is not only.ODD_LENGTH), 3),
    Kind("a constant is added to targets", "target", owned("conv-bias"), with_target(constant), (0.5, 0.1, 0.05), WRITES, 3),
    Kind("edges are repeated", "target", owned("conv-isolation"), with_target(mixed(repeated_edges)), (1.0, 0.3), WRITES, 3),
    Kind("a chunk's end has no target", "target", owned("conv-isolation loss-sum"), with_target(mixed(short_of_lookahead)), (1.0, 0.3),
         (only.ALWAYS, *WRITES), 3),
    Kind("targets are bounded", "target", owned("no-normalization"), with_target(squashed), (1.0, 0.5), WRITES, 3),
    Kind("channels share their taps", "target", owned("conv-depthwise conv-size"), with_target(mixed(alike_taps)), SIZES,
         (only.ALWAYS, *WRITES), 3),
    Kind("the source is added to the target", "target", owned("projection-untransposed conv-size"), with_target(source_kept), SIZES,
         WRITES, 3),
    Kind("the source is noisy", "target", owned("target-source"), with_source(noisy), SIZES,
         (only.IN_TRAINING, only.WITH_GRADIENT, only.LATER_LAYER_TRAINING, only.IN_A_BATCH), 3),
)  # fmt: skip
