"""What is under way in a converted model: the call of a TTT layer, and the places in it, by which a fault
decides whether it acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inplace_ttt.layer.cache import streams
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.hooks import LayerCall
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layout import ChunkLayout, Span

Patch = pytest.MonkeyPatch


@dataclass(eq=False)
class Call:
    """A TTT layer's call. row: the one row of the stream that is being read or written, or None.

    past: what happened to the stream before this call ("read", "reset", "crop", "select", "restore").
    """

    layer: FastWeight
    position: int
    layers: int
    batch: int
    tokens: int
    width: int
    dtype: torch.dtype
    spans: list[list[Span]]
    cache: Any
    past: frozenset[str]
    training: bool
    with_gradient: bool
    row: int | None = None

    def __deepcopy__(self, memo: Any) -> Call:
        return self

    @property
    def chunk_size(self) -> int:
        return self.layer.chunk_size

    @property
    def cached(self) -> bool:
        return self.cache is not None

    @property
    def stream(self) -> FastWeightStream | None:
        """What the call goes on from; None without a cache, and before the first call has made it."""
        return None if self.cache is None else streams(self.cache).get(self.layer.fast.layer)

    def before(self, row: int) -> tuple[int, int]:
        """Chunks that the stream has written of a row, and tokens in its open chunk."""
        stream = self.stream
        return (0, 0) if stream is None else (stream.rows[row].written, stream.rows[row].filled)


class Place(NamedTuple):
    """One chunk of one document of one row, numbered from 0; no call where a part of a layer is run by
    itself."""

    call: Call | None
    row: int = 0
    document: int = 0
    chunk: int = 0


class Piece(NamedTuple):
    """The tokens start:stop of row `index` of a layout, which are those of a place; `whole` where they make a
    chunk."""

    index: int
    start: int
    stop: int
    place: Place
    whole: bool


@dataclass
class _UnderWay:
    calls: list[Call] = field(default_factory=list)


_now = _UnderWay()


def now() -> Call | None:
    """The call that is under way."""
    return _now.calls[-1] if _now.calls else None


def pieces(layout: ChunkLayout) -> Iterator[Piece]:
    """Every chunk of a layout with its place; in a stream, numbered on from what it has written."""
    call = now()
    for index, documents in enumerate(layout.documents):
        row = index if call is None or call.row is None else call.row
        done = 0 if call is None else call.before(row)[0]
        for document, span in enumerate(documents):
            for number, chunk in enumerate(layout.chunks(span)):
                place = Place(call, row, document, number + (done if document == 0 else 0))
                yield Piece(index, *chunk, place, layout.is_complete(chunk))


def places_of_call(call: Call) -> Iterator[Piece]:
    """Every token of a call's rows by its place, also where a stream's open chunk goes on."""
    for row, documents in enumerate(call.spans):
        for document, (start, stop) in enumerate(documents):
            written, filled = call.before(row) if document == 0 else (0, 0)
            for token in range(start, stop):
                yield Piece(
                    row,
                    token,
                    token + 1,
                    Place(call, row, document, written + (filled + token - start) // call.chunk_size),
                    False,
                )


def note(patch: Patch) -> None:
    """Keep account of what is under way, for faults that a patch plants."""
    if getattr(FastWeight._read, "notes", False):
        return

    def read(self: FastWeight, z: Tensor, x: Tensor, call: LayerCall) -> Tensor:
        _now.calls.append(_call_of(self, z, call))
        try:
            return real_read(self, z, x, call)
        finally:
            done = _now.calls.pop()
            if call.cache is not None and (stream := streams(call.cache).get(self.fast.layer)) is not None:
                mark(stream, "read")
                stream.__dict__["last_call"] = dataclasses.replace(done, row=None)

    def take(self: FastWeightStream, index: int, *args: Any, **kwargs: Any) -> None:
        with_row(index, lambda: real_take(self, index, *args, **kwargs))

    def stepped(name: str) -> None:
        real = getattr(FastWeightStream, name)

        def step(self: FastWeightStream, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            mark(self, name)
            if name == "reset":
                self.__dict__.pop("memory", None)

        patch.setattr(FastWeightStream, name, step)

    def restore(cls: type[FastWeightStream], *args: Any, **kwargs: Any) -> FastWeightStream:
        stream = real_restore(cls, *args, **kwargs)
        mark(stream, "restore")
        return stream

    real_read, real_take, real_restore = (
        FastWeight._read,
        FastWeightStream._take,
        FastWeightStream.restore.__func__,
    )  # type: ignore[attr-defined]
    read.notes = True  # type: ignore[attr-defined]
    patch.setattr(FastWeight, "_read", read)
    patch.setattr(FastWeightStream, "_take", take)
    patch.setattr(FastWeightStream, "restore", classmethod(restore))
    for name in ("reset", "crop", "select"):
        stepped(name)


def with_row(row: int, act: Any) -> Any:
    """Run something that is about one row of the stream under way."""
    call = now()
    if call is None:
        return act()
    before, call.row = call.row, row
    try:
        return act()
    finally:
        call.row = before


def mark(stream: FastWeightStream, what: str) -> None:
    stream.__dict__["past"] = stream.__dict__.get("past", frozenset()) | {what}


def place_in(stream: FastWeightStream, row: int = 0) -> Place:
    """A row of a stream between calls: that of its last call, without one a place of no call."""
    return Place(
        stream.__dict__.get("last_call"), row, 0, stream.rows[row].written if row < len(stream.rows) else 0
    )


def _call_of(layer: FastWeight, z: Tensor, call: LayerCall) -> Call:
    order = sorted(layer.hooks.model.layers)
    stream = None if call.cache is None else streams(call.cache).get(layer.fast.layer)
    context = call.context
    spans = (
        [list(row) for row in context.layout(layer.chunk_size).documents]
        if call.cache is None
        else [[s] for s in context.spans()]
    )
    return Call(
        layer, order.index(layer.fast.layer), len(order), *z.shape, z.dtype, spans, call.cache,
        frozenset() if stream is None else stream.__dict__.get("past", frozenset()), layer.training, torch.is_grad_enabled(),
    )  # fmt: skip
