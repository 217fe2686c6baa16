"""How far writes move a layer's weight, measured on the keys and targets of a forward as it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layer.fast_linear import FastWeight
from ..layer.forward_context import ForwardContext
from ..layer.overrides import overriding
from ..layout import ChunkLayout, Span
from ..ops import state_dtype, write_factor, written
from ..rules import RidgeRule
from ..surgery import fast_weights
from ..tasks import IGNORED
from .keys import participation
from .precision import UpdateLost, rounding_of_output, running_sums

Observer = Callable[[FastWeight, Tensor, Tensor, Tensor | None, ForwardContext], None]


@dataclass(frozen=True)
class WriteHealth:
    """One layer's writes over the longest document of a forward; where it has labels, the longest with one,
    which padding is not.

    chunks: complete ones. state_ratio: η‖S‖/‖W0‖ after all of them. write_ratio: the largest
        η‖c_jV_jᵀZ_j‖/‖W0‖. With least
    squares, and where row norms are kept, M stands in S's place, and what a chunk changes of it in a write's;
    with whitened keys both are what they change of W0.
    clipped: fraction of chunks whose delta was clipped. gate_mean, gate_spread: of how much tokens count, 1
        and 0 without a gate of writes.
    """

    chunks: int
    state_ratio: float
    write_ratio: float
    clipped: float
    gate_mean: float = 1.0
    gate_spread: float = 0.0


@dataclass(frozen=True)
class ChunkWrite:
    """One chunk's write: sizes as in WriteHealth, after this chunk; alignment: cosine with the chunk
    before's, if both are not zero."""

    write_ratio: float
    state_ratio: float
    clipped: bool
    alignment: float | None


@dataclass(frozen=True)
class Writes:
    """One layer's writes over the longest document of a forward, chunk by chunk.

    effective_rank: participation ratio of SSᵀ. growth: slope of log ‖S‖ over log chunks: 0.5 where writes are
        unrelated, 1 where
    they repeat each other; None below three chunks. lost: how much of the update rounding takes. gate_mean,
    gate_spread: as in WriteHealth.
    """

    by_chunk: tuple[ChunkWrite, ...]
    effective_rank: float
    growth: float | None
    lost: UpdateLost
    gate_mean: float
    gate_spread: float

    @property
    def state_ratio(self) -> float:
        return self.by_chunk[-1].state_ratio if self.by_chunk else 0.0

    @property
    def clipped(self) -> float:
        return sum(chunk.clipped for chunk in self.by_chunk) / max(1, len(self.by_chunk))

    @property
    def alignment(self) -> float | None:
        """Mean over the chunks that have one."""
        known = [chunk.alignment for chunk in self.by_chunk if chunk.alignment is not None]
        return sum(known) / len(known) if known else None


@contextmanager
def observing(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Within it every fast-weight read of a forward shows its layer, keys, targets, gate and context to
    `observer`."""
    with overriding([layer.fast for layer in fast_weights(model).values()], observer=observer):
        yield


@contextmanager
def observed(model: nn.Module, found: dict[int, WriteHealth]) -> Iterator[None]:
    """Within it every forward of a converted model leaves its writes' health in `found`, layer by layer."""
    with _labels_noted(model) as labels:

        def observe(
            layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
        ) -> None:
            found[layer.fast.layer] = write_health(layer, z, v, gate, context, labels(v))

        with observing(model, observe):
            yield


@contextmanager
def watched(model: nn.Module, found: dict[int, Tensor]) -> Iterator[None]:
    """Within it the first forward leaves the `state_ratio` of every layer in `found`; only its labels are
    waited for."""
    with _labels_noted(model) as labels:

        def observe(
            layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
        ) -> None:
            if layer.fast.layer not in found:
                found[layer.fast.layer] = state_ratio(layer, z, v, gate, context, labels(v))

        with observing(model, observe):
            yield


@contextmanager
def _labels_noted(model: nn.Module) -> Iterator[Callable[[Tensor], Tensor | None]]:
    """Within it a call that, of an activation [B, T, …] of a forward, gives that forward's labels [B, T] on
    the CPU, or None."""
    last: dict[str, Any] = {}

    def note(_: nn.Module, args: Any, given: dict[str, Any]) -> None:
        last.clear()
        last.update({name: given.get(name) for name in ("labels", "logits_to_keep")})

    def labels(of: Tensor) -> Tensor | None:
        given, kept = last.get("labels"), last.pop("logits_to_keep", None)
        if isinstance(given, Tensor) and isinstance(kept, Tensor):  # they stand where logits are kept alone
            given = given.new_full(of.shape[:2], IGNORED).index_copy(1, kept, given)
        last["labels"] = given = (
            given.cpu() if isinstance(given, Tensor) and given.shape == of.shape[:2] else None
        )
        return given

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield labels
    finally:
        handle.remove()


@torch.no_grad()
def state_ratio(
    layer: FastWeight,
    z: Tensor,
    v: Tensor,
    gate: Tensor | None,
    context: ForwardContext,
    labels: Tensor | None = None,
) -> Tensor:
    """η‖S‖/‖W0‖ after the longest document (with a label): infinite where S is not finite, 0 where W0 does
    not show.

    Where every chunk writes all of its delta, S is one product, a small part of what the layer computes: in
    the model's own dtype, and accurate with least squares, since KᵀK rounded to bf16 is no sum of squares and
    has no factor where the ridge is small.
    """
    layout, w0, rule = (
        labelled(context.part(layer.chunk_size), labels),
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
    """Health of a layer's writes with keys [B, T, h], targets [B, T, d] and, with least squares, a gate [B,
    T], while its weight is at hand; over the longest document, of those with a label where labels [B, T] are
    given."""
    layout, accurate = labelled(context.part(layer.chunk_size), labels), state_dtype(z.dtype)
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
    """The same in full: every chunk's write, what they add up to, and what rounding would take of it."""
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
    # of whitened keys, W0's part of the output does not show here
    read_with_z = None if layer.fast.config.whitening is not None else w0
    lost = sums.lost(read, rounding_of_output(tail, read_with_z, layer.eta, read))
    if not layer.fast.config.rule.reads_state:
        lost = dataclasses.replace(lost, state=None)
    growth = _growth([chunk.state_ratio for chunk in found])
    return Writes(tuple(found), participation(read @ read.T), growth, lost, *gate_health(gate, layout))


def gate_health(gate: Tensor | None, layout: ChunkLayout) -> tuple[float, float]:
    """Mean and standard deviation of a gate [B, T] over the longest document."""
    row, (start, stop) = longest_document(layout)
    if gate is None or start == stop:
        return 1.0, 0.0
    own = gate[row, start:stop]
    return float(own.mean()), float(own.std(correction=0))


def labelled(layout: ChunkLayout, labels: Tensor | None) -> ChunkLayout:
    """Only its documents that have a label [B, T]: what fills a packed row up is a document without. All of
    them without labels."""
    if labels is None:
        return layout
    learnt = labels.ne(IGNORED)
    rows = (
        tuple(span for span in spans if bool(learnt[row, slice(*span)].any()))
        for row, spans in enumerate(layout.documents)
    )
    return ChunkLayout(tuple(rows), layout.length, layout.chunk_size)


def longest_document(layout: ChunkLayout) -> tuple[int, Span]:
    """Its row and span; an empty one where everything is padding."""
    documents = [(row, span) for row, spans in enumerate(layout.documents) for span in spans]
    return max(documents, key=lambda at: at[1][1] - at[1][0], default=(0, (0, 0)))


@dataclass(frozen=True)
class _Write:
    """A chunk's write: read, what a key is read with after it [d, r]; delta, what it changed of that; its
    clip factor."""

    delta: Tensor
    read: Tensor
    factor: Tensor


def _chunk_by_chunk(
    layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, layout: ChunkLayout
) -> Iterator[_Write]:
    """What each complete chunk of the longest document writes."""
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
    """Keys [n, r] of a part of a row, each as often as its write counts by the gate [B, T]."""
    return keys if gate is None else gate[row, part, None].to(keys.dtype) * keys


def _size(layer: FastWeight, read: Tensor) -> Tensor:
    """Norm of the change of W0 that `read` [d, r] stands for, without η."""
    keys = layer.ttt.keys
    return torch.linalg.vector_norm(read if keys is None else read @ keys.directions.to(read.dtype))


def _scale(layer: FastWeight, accurate: torch.dtype) -> float:
    """η/‖W0‖; not a number where the weight does not show."""
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
