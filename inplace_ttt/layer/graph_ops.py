"""Operators that torch.compile treats as opaque.

They find the documents in masks, and read a decoded token into its stream. A graph can do neither, since the
number of documents and the state of a stream are known only when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from ..layout import Span
from .forward_context import ForwardContext
from .rows import StreamedLayer
from .stream import FastWeightStream

_OUTSIDE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
"""Inductor leaves operators with this tag out of CUDA graphs."""


@torch.library.custom_op("inplace_ttt::document_spans", mutates_args=(), tags=_OUTSIDE)
def document_spans(
    mask: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int
) -> Tensor:
    """Returns the documents of a forward without a cache.

    Args:
        mask: attention mask, 2-D or 4-D.
        positions: position ids.
        cu_seqlens: cumulative lengths of the documents of one packed row.
        batch: B.
        length: T.

    Returns:
        Row, start and stop of each document, int64 [n, 3] on the CPU.
    """
    given = {"attention_mask": mask, "position_ids": positions, "cu_seq_lens_q": cu_seqlens}
    return _context(given, batch, length).layout(length).spans.clone()


@document_spans.register_fake
def _(
    mask: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int
) -> Tensor:
    whole_rows = mask is None and positions is None and cu_seqlens is None
    documents = batch if whole_rows else torch.library.get_ctx().new_dynamic_size()
    return torch.empty(documents, 3, dtype=torch.int64, device="cpu")


def _context(given: dict[str, Tensor | None], batch: int, length: int, past: int = 0) -> ForwardContext:
    context = ForwardContext(given, owner=None, past=past)
    context.take_embeddings(torch.empty(batch, length, 0))
    return context


@torch.library.custom_op("inplace_ttt::rows_read", mutates_args=(), tags=_OUTSIDE)
def rows_read(mask: Tensor | None, past: Tensor, batch: int) -> Tensor:
    """Returns False for each row whose single token is padding, else True, bool [B] on the CPU.

    Args:
        mask: attention mask, 2-D or 4-D.
        past: number of tokens in the cache before the forward, [].
        batch: B.
    """
    if mask is None:
        return torch.ones(batch, dtype=torch.bool)
    spans = _context({"attention_mask": mask}, batch, 1, int(past)).spans()
    return torch.tensor([stop > start for start, stop in spans])


@rows_read.register_fake
def _(mask: Tensor | None, past: Tensor, batch: int) -> Tensor:
    return torch.empty(batch, dtype=torch.bool, device="cpu")


class Decoder:
    """A stream and its layer, under a number by which a graph names them.

    The number is a tensor, so a graph is valid for the streams of other caches too.

    Attributes:
        number: the number, int64 [] on the CPU.
    """

    _known: ClassVar[WeakValueDictionary[int, Decoder]] = WeakValueDictionary()
    _count: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, stream: FastWeightStream, layer: StreamedLayer) -> None:
        number = next(self._count)
        self.number, self._stream, self._layer = torch.tensor(number), ref(stream), ref(layer)
        self._known[number] = self

    def __deepcopy__(self, memo: object) -> None:
        """Returns None: the copy of a stream gets a number at its first forward outside of graphs."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def advance(self, out: Tensor, z: Tensor, x: Tensor, spans: list[Span], generated: bool) -> None:
        """Calls `FastWeightStream.advance`, with keys of the layer's input z [B, T, h]."""
        stream, layer = self._stream(), self._layer()
        assert stream is not None and layer is not None  # the forward that calls this holds both
        stream.advance(out, layer.keys(z), x, spans, layer, generated=generated)


@torch.library.custom_op("inplace_ttt::decode", mutates_args=("out",), tags=_OUTSIDE)
def decode(out: Tensor, z: Tensor, x: Tensor, rows: Tensor, number: Tensor, generated: bool) -> None:
    """Reads single tokens into a stream, and adds their reads to `out` [B, 1, d] in place.

    Args:
        out: outputs without fast weights.
        z: the layer's input [B, 1, h].
        x: target source [B, 1, d].
        rows: True for each row that reads its token, bool [B] on the CPU.
        number: the number of a `Decoder`.
        generated: True if the model generated the tokens.
    """
    spans = [(0, int(reads)) for reads in rows.tolist()]
    Decoder._known[int(number)].advance(out, z, x, spans, generated)


@decode.register_fake
def _(out: Tensor, z: Tensor, x: Tensor, rows: Tensor, number: Tensor, generated: bool) -> None:
    return None
