"""Ways of reading in which a converted model must compute the declared rule.

They are batches, pieces, packed documents, many chunks, other chunk sizes and training. The model runs as a
user runs it, with short chunks and writes of visible size. Each scene yields the recording of the TTT layers
and the documents that they read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..families import CACHE
from ..layer.cache import streams
from ..session.session import Session
from .probed import Documents, Probed, Reading
from .recording import Document, Piece, Recording, recording


def plain(probed: Probed) -> Iterator[Reading]:
    """Reads one row in one call, in evaluation mode."""
    record = probed.read(probed.ids(1, 3 * probed.chunk + 5))
    yield "one row in one call", record, record.whole()


def batches(probed: Probed) -> Iterator[Reading]:
    """Reads rows of documents, padded rows of unequal lengths, and rows reordered, chosen or repeated.

    Padding is on either side in one call, and on the left in pieces.
    """
    chunk = probed.chunk
    if probed.takes_documents:
        yield (
            "rows of documents",
            *packed(probed, [[2 * chunk + 5, 3 * chunk - 2], [chunk - 1, 2 * chunk, 2 * chunk + 4]]),
        )
    if probed.takes_padding:
        yield from _padded_batches(probed)
    order = torch.tensor([2, 0, 0])
    first = probed.ids(3, 2 * chunk + 3).split([chunk + 1, chunk + 2], 1)
    rest = probed.ids(3, 3 * chunk + 3, 1)
    second = _cut(rest, _over_an_edge(2 * chunk + 3, chunk))
    record, documents = streamed(
        probed, [first, second], lambda cache, part: cache.reorder_cache(order.to(first[0].device))
    )
    yield (
        "rows reordered",
        record,
        [[*documents[int(s)][: len(first)], *documents[row][len(first) :]] for row, s in enumerate(order)],
    )
    chosen = torch.tensor([2, 1], device=first[0].device)
    second = rest[:2].split([chunk, 2 * chunk + 3], 1)
    record, documents = streamed(
        probed, [first, second], lambda cache, part: cache.batch_select_indices(chosen)
    )
    yield (
        "rows chosen",
        record,
        [[*documents[int(s)][: len(first)], *documents[row][len(first) :]] for row, s in enumerate(chosen)],
    )
    first, second = tuple(ids[:2] for ids in first), tuple(ids.repeat(2, 1) for ids in second)
    record, documents = streamed(
        probed, [first, second], lambda cache, part: cache.batch_repeat_interleave(2)
    )
    yield (
        "rows repeated",
        record,
        [[*documents[row // 2][: len(first)], *documents[row][-len(second) :]] for row in range(4)],
    )


def _padded_batches(probed: Probed) -> Iterator[Reading]:
    chunk = probed.chunk
    lengths = [4 * chunk + 1, 2 * chunk + 3, chunk + 5]
    for left in (False, True):
        yield f"padded on the {'left' if left else 'right'}", *padded(probed, lengths, left)
    longest = max(lengths)
    ids, mask, spans = _padding(probed, lengths, left=True)
    # `generate` passes position_ids too, since Qwen's vision-language models need them with a longer mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pieces = [2 * chunk + 4, 1, chunk, longest - 3 * chunk - 5]
    documents: list[list[Piece]] = [[] for _ in lengths]
    cache, begin = probed.cache(), 0
    with recording(probed.lm, probed.config) as record:
        for number, size in enumerate(pieces):
            part = slice(begin, begin + size)
            given = {"position_ids": positions[:, part]} if probed.takes_documents else {}
            probed.forward(
                ids[:, part], attention_mask=mask[:, : part.stop], **given, **{CACHE: cache}, use_cache=True
            )
            for row, (start, _) in enumerate(spans):
                if part.stop > start:
                    documents[row].append(
                        Piece(number, row, max(start - begin, 0), size, _writes(probed, size, begin))
                    )
            begin += size
    yield "padded on the left, in pieces", record, documents


def pieces(probed: Probed) -> Iterator[Reading]:
    """Reads a row through a cache in pieces of any size, then another row after a reset.

    The tokens around a chunk's edge are read one by one.
    """
    chunk = probed.chunk
    first = _cut(probed.ids(1, 5 * chunk), [chunk // 2, 3 * chunk + 2, *_over_an_edge(chunk // 2 + 2, chunk)])
    yield "in pieces", *streamed(probed, [first])
    second = _cut(probed.ids(1, 5 * chunk, 1), [chunk + 3, chunk, *_over_an_edge(3, chunk)])
    record, (document,) = streamed(
        probed, [first[:2], second], lambda cache, part: cache.reset(), restarts=True
    )
    yield "in pieces after a reset", record, [document[:2], document[2:]]


def taken_back(probed: Probed) -> Iterator[Reading]:
    """Reads on after tokens were cropped from a cache, and in a session and its branch."""
    chunk = probed.chunk
    yield from _branched(probed)
    if (
        any(getattr(layer, "is_sliding", False) for layer in probed.cache().layers)
        or not probed.config.update_on_decode
    ):
        # tokens that left a sliding window cannot be restored, and a cache with unwritten tokens refuses to
        # crop
        return
    first = probed.ids(1, 2 * chunk + 2).split([chunk + 2, chunk], 1)
    second = _cut(probed.ids(1, 3 * chunk, 1), _over_an_edge(2, chunk))
    record, (document,) = streamed(probed, [first, second], lambda cache, part: cache.crop(-chunk))
    yield "a chunk taken back", record, [[document[0], *document[2:]]]
    first = probed.ids(1, 2 * chunk + 7).split([2 * chunk + 3, 1, 3], 1)
    second = _cut(probed.ids(1, 2 * chunk, 1), [1, *_over_an_edge(5, chunk)])
    record, (document,) = streamed(probed, [first, second], lambda cache, part: cache.crop(-3))
    yield "tokens of an open chunk taken back", record, [[*document[:2], *document[3:]]]


def _branched(probed: Probed) -> Iterator[Reading]:
    """Reads a text in a session, forks it, and reads different texts in both sessions in turn."""
    chunk = probed.chunk
    known = probed.ids(1, 2 * chunk + 3)
    later = [probed.ids(1, 2 * chunk, part).split([chunk, chunk], 1) for part in (1, 2)]
    state = Session(probed.lm)
    with recording(probed.lm, probed.config) as record:
        state.read(known)
        both = (state, state.fork())
        for turn in range(2):
            for one, ids in zip(both, later, strict=True):
                one.read(ids[turn])
    size = Piece(0, 0, 0, known.shape[1])
    yield (
        "a session and its branch",
        record,
        [[size, Piece(1 + n, 0, 0, chunk), Piece(3 + n, 0, 0, chunk)] for n in range(2)],
    )


def documents(probed: Probed) -> Iterator[Reading]:
    """Reads five documents packed in a row."""
    chunk = probed.chunk
    if probed.takes_documents:
        yield (
            "five documents",
            *packed(probed, [[2 * chunk + 1, chunk - 1, 3 * chunk, 2 * chunk + 2, 4 * chunk + 5]]),
        )


def many_chunks(probed: Probed) -> Iterator[Reading]:
    """Reads sixteen chunks of one document in one call and in pieces, then a few larger chunks."""
    chunk = probed.chunk
    record = probed.read(probed.ids(1, 16 * chunk + 3))
    yield "sixteen chunks", record, record.whole()
    parts = _cut(probed.ids(1, 16 * chunk + 3), [9 * chunk + 4, *_over_an_edge(4, chunk)])
    yield "sixteen chunks in pieces", *streamed(probed, [parts])
    with probed.with_larger_chunks() as larger:
        record = larger.read(larger.ids(1, 3 * larger.chunk + 4))
        yield f"chunks of {larger.chunk} tokens", record, record.whole()


def many_writes(probed: Probed, chunks: int) -> tuple[Reading, dict[int, float]]:
    """Reads this number of chunks in three pieces.

    Returns:
        The reading, and by layer the relative error of the state against the declared writes.
    """
    chunk, cache = probed.chunk, probed.cache()
    with recording(probed.lm, probed.config) as record:
        for ids in _cut(probed.ids(1, chunks * chunk), [chunks // 2 * chunk + 5, 3]):
            probed.forward(ids, **{CACHE: cache}, use_cache=True)
    document = [Piece(n, 0, 0, record.tokens(n)) for n in range(len(record.forwards))]
    found = {}
    for index, held in streams(cache).items():
        z, source, _, _ = record.of(index, document)
        wanted = probed.rule(index).state(z, source)
        state = torch.zeros_like(wanted) if held.state is None else held.state[0].double().cpu()
        total = len(probed.rule(index).tensors["proj"])
        parts = [(state[:total], wanted[:total]), (state[total:], wanted[total:])]
        found[index] = max(
            float((got - right).norm() / right.norm()) for got, right in parts if right.numel()
        )
    return (f"{chunks} chunks in pieces", record, [document]), found


@contextmanager
def recomputing(lm: Any) -> Iterator[bool]:
    """Turns gradient checkpointing on inside the context and restores it on exit.

    Yields:
        True if the model supports it.
    """
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    modules = [module for module in lm.modules() if hasattr(module, names[0])]
    before = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    try:
        for module in modules:
            vars(module).update(
                zip(names, (True, functools.partial(checkpoint, use_reentrant=False)), strict=True)
            )
        yield bool(modules) and lm.supports_gradient_checkpointing
    finally:
        for module, own in zip(modules, before, strict=True):
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(own)


def training_rows(probed: Probed) -> Reading:
    """Reads a packed row with a document of nine chunks and one shorter document.

    A model that does not accept packed documents reads a row of ten chunks.
    """
    chunk = probed.chunk
    if not probed.takes_documents:
        record = probed.read(probed.ids(1, 10 * chunk + 7))
        return "a row of ten chunks", record, record.whole()
    return "a row of documents", *packed(probed, [[9 * chunk + 3, chunk + 4]])


def padded_training_rows(probed: Probed) -> Reading:
    """Reads two rows of unequal lengths, or of one length if the model accepts no padding."""
    chunk = probed.chunk
    if not probed.takes_padding:
        record = probed.read(probed.ids(2, 3 * chunk + 4))
        return f"rows, chunks of {chunk} tokens", record, record.whole()
    return f"padded rows, chunks of {chunk} tokens", *padded(
        probed, [3 * chunk + 4, 2 * chunk + 1], left=True
    )


def _over_an_edge(at: int, chunk: int) -> list[int]:
    """Returns sizes of pieces that cross the next chunk edge one token at a time.

    The first piece ends two tokens before the edge. Four single tokens follow.
    """
    ahead = (chunk - 2 - at) % chunk
    return [*([ahead] if ahead else []), 1, 1, 1, 1]


def _cut(ids: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Splits ids into pieces [B, n] of these sizes, and one of the remaining tokens."""
    return ids.split([*sizes, ids.shape[1] - sum(sizes)], 1)


def _padding(
    probed: Probed, lengths: Sequence[int], left: bool
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Returns ids [B, T], their mask [B, T], and the start and stop of each row's tokens."""
    longest = max(lengths)
    spans = [(longest - n, longest) if left else (0, n) for n in lengths]
    ids = probed.ids(len(lengths), longest)
    mask = torch.zeros_like(ids)
    for row, (start, stop) in enumerate(spans):
        mask[row, start:stop] = 1
    return ids, mask, spans


def padded(probed: Probed, lengths: Sequence[int], left: bool) -> tuple[Recording, Documents]:
    """Reads padded rows of these lengths in one call."""
    ids, mask, spans = _padding(probed, lengths, left)
    return probed.read(ids, attention_mask=mask), [[Piece(0, row, *span)] for row, span in enumerate(spans)]


def packed(
    probed: Probed, rows: Sequence[Sequence[int]], first_positions: Sequence[int] = (), **kwargs: Any
) -> tuple[Recording, Documents]:
    """Reads rows of packed documents in one call.

    Args:
        probed: the prepared model.
        rows: lengths of the documents in each row.
        first_positions: the position id at which each document of a row begins; 0 by default.
        kwargs: further arguments of the model's forward.
    """
    firsts = first_positions or [0] * max(len(lengths) for lengths in rows)
    positions = torch.stack(
        [torch.cat([first + torch.arange(n) for first, n in zip(firsts, row, strict=False)]) for row in rows]
    )
    ids = probed.ids(*positions.shape)
    record = probed.read(ids, position_ids=positions.to(ids.device), **kwargs)
    found: list[Document] = []
    for row, lengths in enumerate(rows):
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        found += [[Piece(0, row, start, stop)] for start, stop in itertools.pairwise(starts)]
    return record, found


def streamed(
    probed: Probed,
    parts: Sequence[Sequence[Tensor]],
    between: Callable[[Any, int], None] | None = None,
    restarts: bool = False,
) -> tuple[Recording, list[list[Piece]]]:
    """Reads pieces of ids [B, n] through one cache.

    Args:
        probed: the prepared model.
        parts: the pieces, in parts.
        between: called with the cache and the number of the part, after each part except the last.
        restarts: True if each part is a separate text.
    """
    cache, number, known = probed.cache(), 0, 0
    found: list[list[Piece]] = [[] for _ in range(max(len(part[0]) for part in parts))]
    with recording(probed.lm, probed.config) as record:
        for part, pieces in enumerate(parts):
            known = 0 if restarts else known
            for ids in pieces:
                probed.forward(ids, **{CACHE: cache}, use_cache=True)
                for row, document in enumerate(found[: len(ids)]):
                    document.append(Piece(number, row, 0, ids.shape[1], _writes(probed, ids.shape[1], known)))
                number, known = number + 1, known + ids.shape[1]
            if between is not None and part + 1 < len(parts):
                between(cache, part)
    return record, found


def _writes(probed: Probed, tokens: int, known: int) -> bool:
    """Returns True if a piece of this number of tokens fills chunks.

    A single token that is read into a filled cache counts as generated.
    """
    return probed.config.update_on_decode or tokens > 1 or known == 0
