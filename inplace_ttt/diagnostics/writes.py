"""Measures the size of a layer's writes, relative to W0, from the keys and targets of a forward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layer.fast_linear import FastWeight
from ..layer.forward_context import ForwardContext
from ..layout import ChunkLayout, Span
from ..ops import state_dtype, write_factor, written
from ..rules import RidgeRule
from ..tasks import IGNORED
from .keys import participation
from .precision import UpdateLost, rounding_of_output, running_sums


@dataclass(frozen=True)
class WriteHealth:
    """One layer's writes over the longest document of a forward pass.

    If the forward pass has labels, the longest document with a label is used. Padding has no label. The ridge
    rule and preserved row norms do not read S but another map. The norm of that map then replaces ‖S‖, and
    its change by a chunk replaces a write. With whitened keys, both are measured as changes of W0.

    Attributes:
        chunks: number of complete chunks.
        state_ratio: η‖S‖/‖W0‖ after all chunks.
        write_ratio: largest η‖c_jV_jᵀZ_j‖/‖W0‖ of a chunk.
        clipped: fraction of chunks whose delta was clipped.
        gate_mean: mean of the write gate over tokens; 1 without a gate.
        gate_spread: standard deviation of the write gate over tokens; 0 without a gate.
    """

    chunks: int
    state_ratio: float
    write_ratio: float
    clipped: float
    gate_mean: float = 1.0
    gate_spread: float = 0.0


@dataclass(frozen=True)
class ChunkWrite:
    """One chunk's write.

    Attributes:
        write_ratio: size of the write, as in `WriteHealth`.
        state_ratio: size of the state after this chunk, as in `WriteHealth`.
        clipped: True if the delta was clipped.
        alignment: cosine with the previous chunk's write; None if one of them is zero.
    """

    write_ratio: float
    state_ratio: float
    clipped: bool
    alignment: float | None


@dataclass(frozen=True)
class Writes:
    """One layer's writes over the longest document of a forward pass, chunk by chunk.

    Attributes:
        by_chunk: the complete chunks, in order.
        effective_rank: participation ratio of SSᵀ.
        growth: slope of log ‖S‖ over the log of the number of chunks. It is 0.5 for unrelated writes, 1 for
            writes that repeat each other, and None below three chunks.
        lost: fraction of the update that rounding removes.
        gate_mean: as in `WriteHealth`.
        gate_spread: as in `WriteHealth`.
    """

    by_chunk: tuple[ChunkWrite, ...]
    effective_rank: float
    growth: float | None
    lost: UpdateLost
    gate_mean: float
    gate_spread: float

    @property
    def state_ratio(self) -> float:
        """η‖S‖/‖W0‖ after the document; 0 without a complete chunk."""
        return self.by_chunk[-1].state_ratio if self.by_chunk else 0.0

    @property
    def clipped(self) -> float:
        """Fraction of chunks whose delta was clipped."""
        return sum(chunk.clipped for chunk in self.by_chunk) / max(1, len(self.by_chunk))

    @property
    def alignment(self) -> float | None:
        """Mean alignment of the chunks whose alignment is known."""
        known = [chunk.alignment for chunk in self.by_chunk if chunk.alignment is not None]
        return sum(known) / len(known) if known else None


@torch.no_grad()
def state_ratio(
    layer: FastWeight,
    z: Tensor,
    v: Tensor,
    gate: Tensor | None,
    context: ForwardContext,
    labels: Tensor | None = None,
) -> Tensor:
    """Returns η‖S‖/‖W0‖ after the longest document, as a scalar tensor on the layer's device.

    If no chunk is clipped or normalized, S is one product, which costs little compared with the layer itself.
    It is computed in the model's own dtype, but for float16 chunk by chunk. The ridge rule needs float32 at
    least. With a small ridge, KᵀK rounded to bfloat16 may not be positive definite.

    Args:
        layer: the TTT layer.
        z: keys [B, T, h].
        v: targets [B, T, d].
        gate: write gate [B, T], or None.
        context: layout of the forward pass.
        labels: int64 [B, T]; only documents with a label are considered.

    Returns:
        float32 scalar: infinite if S is not finite, 0 if W0 cannot be read.
    """
    layout, w0, rule = (
        labeled(context.part(layer.chunk_size), labels),
        layer.matrix(),
        layer.fast.config.rule,
    )
    accurate = state_dtype(z.dtype)
    if layer.tau() is None and layer.fast.config.write_norm is None and z.dtype != torch.float16:
        row, (start, stop) = longest_document(layout)
        complete = slice(start, stop - (stop - start) % layout.chunk_size)
        keys, values = z[row, complete], v[row, complete]
        if isinstance(rule, RidgeRule):
            keys, values = keys.to(accurate), torch.cat([values, keys], dim=1).to(accurate)
        read = layer.readout((values.T @ _counted(keys, gate, row, complete)).to(accurate))
    else:
        read = z.new_zeros(v.shape[-1], z.shape[-1], dtype=accurate)
        for write in _chunk_by_chunk(layer, z, v, gate, layout):
            read = write.read
    size = _size(layer, read)
    scale = 0.0 if w0 is None else layer.eta / torch.linalg.vector_norm(w0, dtype=accurate)
    return torch.where(size.isfinite(), scale * size, math.inf).float()


@torch.no_grad()
def write_health(
    layer: FastWeight,
    z: Tensor,
    v: Tensor,
    gate: Tensor | None,
    context: ForwardContext,
    labels: Tensor | None = None,
) -> WriteHealth:
    """Measures a layer's writes over the longest document, inside the forward pass.

    Args:
        layer: the TTT layer.
        z: keys [B, T, h].
        v: targets [B, T, d].
        gate: write gate [B, T] of the ridge rule, or None.
        context: layout of the forward pass.
        labels: int64 [B, T]; only documents with a label are considered.
    """
    layout, accurate = labeled(context.part(layer.chunk_size), labels), state_dtype(z.dtype)
    largest, last, clipped, chunks = z.new_zeros((), dtype=accurate), z.new_zeros((), dtype=accurate), 0, 0
    for write in _chunk_by_chunk(layer, z, v, gate, layout):
        largest, last = torch.maximum(largest, _size(layer, write.delta)), _size(layer, write.read)
        clipped, chunks = clipped + int(write.factor < 1), chunks + 1
    scale, size = _scale(layer, accurate), float(last)
    ratio = scale * size if math.isfinite(size) else math.inf
    return WriteHealth(
        chunks, ratio, scale * float(largest), clipped / max(1, chunks), *gate_health(gate, layout)
    )


@torch.no_grad()
def writes_by_chunk(
    layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
) -> Writes:
    """Measures every chunk's write, the sum of the writes, and the part of the sum that rounding would
    remove.

    The arguments are those of `write_health`.
    """
    layout, w0 = context.part(layer.chunk_size), layer.matrix()
    accurate = state_dtype(z.dtype)
    read = z.new_zeros(v.shape[-1], z.shape[-1], dtype=accurate)
    scale, before, norm_before = _scale(layer, accurate), torch.zeros_like(read), 0.0
    sums = running_sums(read, w0 if layer.ttt.keys is None else None, layer.eta, z.dtype)
    found: list[ChunkWrite] = []
    for write in _chunk_by_chunk(layer, z, v, gate, layout):
        delta, read = write.delta, write.read
        norm = float(torch.linalg.vector_norm(delta))
        alignment = float((delta * before).sum()) / (norm * norm_before) if norm * norm_before > 0 else None
        sums.add(delta)
        found.append(
            ChunkWrite(
                scale * float(_size(layer, delta)),
                scale * float(_size(layer, read)),
                bool(write.factor < 1),
                alignment,
            )
        )
        before, norm_before = delta, norm
    row, (start, stop) = longest_document(layout)
    tail = z[row, max(start, stop - layout.chunk_size) : stop]
    # with whitened keys, W0's part of the output cannot be computed from z
    read_with_z = None if layer.fast.config.whitening is not None else w0
    lost = sums.lost(read, rounding_of_output(tail, read_with_z, layer.eta, read))
    if not layer.fast.config.rule.reads_state:
        lost = dataclasses.replace(lost, state=None)
    growth = _growth([chunk.state_ratio for chunk in found])
    return Writes(tuple(found), participation(read @ read.T), growth, lost, *gate_health(gate, layout))


def gate_health(gate: Tensor | None, layout: ChunkLayout) -> tuple[float, float]:
    """Returns mean and standard deviation of a write gate [B, T] over the longest document."""
    row, (start, stop) = longest_document(layout)
    if gate is None or start == stop:
        return 1.0, 0.0
    own = gate[row, start:stop]
    return float(own.mean()), float(own.std(correction=0))


def labeled(layout: ChunkLayout, labels: Tensor | None) -> ChunkLayout:
    """Returns the layout of only the documents that have a label, or of all documents if `labels` is None.

    The tokens that fill up a packed row form a document without labels.

    Args:
        layout: the documents.
        labels: int64 [B, T], or None.
    """
    if labels is None:
        return layout
    learned = labels.ne(IGNORED)
    rows = (
        tuple(span for span in spans if bool(learned[row, slice(*span)].any()))
        for row, spans in enumerate(layout.documents)
    )
    return ChunkLayout(tuple(rows), layout.length, layout.chunk_size)


def longest_document(layout: ChunkLayout) -> tuple[int, Span]:
    """Returns row and span of the longest document; an empty span if all tokens are padding."""
    documents = [(row, span) for row, spans in enumerate(layout.documents) for span in spans]
    return max(documents, key=lambda at: at[1][1] - at[1][0], default=(0, (0, 0)))


@dataclass(frozen=True)
class _Write:
    """One chunk's write.

    Attributes:
        delta: change of `read` by this chunk [d, r].
        read: map [d, r] that keys are read with after this chunk.
        factor: clip factor, a scalar.
    """

    delta: Tensor
    read: Tensor
    factor: Tensor


def _chunk_by_chunk(
    layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, layout: ChunkLayout
) -> Iterator[_Write]:
    """Yields the write of each complete chunk of the longest document."""
    accurate, tau, config, rule = state_dtype(z.dtype), layer.tau(), layer.fast.config, layer.fast.config.rule
    row, span = longest_document(layout)
    state: Tensor | float = 0.0
    read = z.new_zeros(v.shape[-1], z.shape[-1], dtype=accurate)
    for chunk in filter(layout.is_complete, layout.chunks(span)):
        here = slice(*chunk)
        keys, values = z[row, here].to(accurate), v[row, here].to(accurate)
        counted = _counted(keys, gate, row, here)
        factor = write_factor(values.T @ counted, tau, rule)
        delta = written(values, keys, counted, tau, rule)
        state = state + delta
        after = layer.readout(state)
        clipped = factor if config.write_norm is None else torch.ones_like(factor)
        yield _Write(delta if rule.reads_state else after - read, after, clipped)
        read = after


def _counted(keys: Tensor, gate: Tensor | None, row: int, part: slice) -> Tensor:
    """Returns the keys [n, r] of a part of a row, times the write gate [B, T]."""
    return keys if gate is None else gate[row, part, None].to(keys.dtype) * keys


def _size(layer: FastWeight, read: Tensor) -> Tensor:
    """Returns the norm of the change of W0 that `read` [d, r] makes, without η."""
    keys = layer.ttt.keys
    return torch.linalg.vector_norm(read if keys is None else read @ keys.directions.to(read.dtype))


def _scale(layer: FastWeight, accurate: torch.dtype) -> float:
    """Returns η/‖W0‖; NaN if the weight cannot be read."""
    w0 = layer.matrix()
    return float("nan") if w0 is None else layer.eta / float(torch.linalg.vector_norm(w0, dtype=accurate))


def _growth(ratios: list[float]) -> float | None:
    if len(ratios) < 3 or not all(0 < ratio < math.inf for ratio in ratios):
        return None
    x = [math.log(n + 1) for n in range(len(ratios))]
    y = [math.log(ratio) for ratio in ratios]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
