"""Scenes of readings in which a converted model must compute the declared rule.

They are batches, pieces, packed documents, many chunks, other chunk sizes and sizes drawn from the seed. Each
scene yields a name, the record of a reading, and the documents that were read.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ..layer.cache import streams
from ..session.session import Session
from .prepared import Prepared, Reading
from .probed import Probed
from .readings import RESET, Crop, Rows, Step, over_an_edge, packed, padded, streamed, whole
from .recording import Piece


def plain(probed: Prepared) -> Iterator[Reading]:
    """Reads one row in one call, in evaluation mode."""
    yield whole(probed, "one row in one call", 1, 3 * probed.chunk + 5)


def batches(probed: Prepared) -> Iterator[Reading]:
    """Reads rows of documents, padded rows of unequal lengths, and rows reordered, chosen or repeated.

    Padding is on either side in one call, and on the left in pieces.
    """
    chunk = probed.chunk
    if probed.takes_documents:
        rows = [[2 * chunk + 5, 3 * chunk - 2], [chunk - 1, 2 * chunk, 2 * chunk + 4]]
        yield "rows of documents", *packed(probed, rows)
    if probed.takes_padding:
        lengths = [4 * chunk + 1, 2 * chunk + 3, chunk + 5]
        yield "padded on the left", *padded(probed, lengths, left=True)
        yield "padded on the right", *padded(probed, lengths, left=False)
        sizes = [2 * chunk + 4, 1, chunk, chunk - 4]
        yield "padded on the left, in pieces", *padded(probed, lengths, left=True, sizes=sizes)
    known, later = [chunk + 1, chunk + 2], [chunk, 2 * chunk + 3]
    edge = over_an_edge(2 * chunk + 3, chunk, 3 * chunk + 3)
    yield "rows reordered", *streamed(probed, 3, [*known, Rows((2, 0, 0)), *edge])
    chosen = Rows((2, 1), "batch_select_indices")
    yield "rows chosen", *streamed(probed, 3, [*known, chosen, *later])
    repeated = Rows((0, 0, 1, 1), "batch_repeat_interleave")
    yield "rows repeated", *streamed(probed, 2, [*known, repeated, *later])


def pieces(probed: Prepared) -> Iterator[Reading]:
    """Reads a row through a cache in pieces of any size, then another row after a reset.

    The tokens around a chunk's edge are read one by one.
    """
    chunk = probed.chunk
    half, edge = chunk // 2, over_an_edge(chunk // 2 + 2, chunk, 2 * chunk - chunk // 2 - 2)
    yield "in pieces", *streamed(probed, 1, [half, 3 * chunk + 2, *edge])
    first, edge = [chunk + 3, chunk], over_an_edge(3, chunk, 3 * chunk - 3)
    yield "in pieces after a reset", *streamed(probed, 1, [*first, RESET, *first, *edge])


def taken_back(probed: Prepared) -> Iterator[Reading]:
    """Reads on after tokens were cropped from a cache, and in a session and its branch."""
    chunk, state = probed.chunk, Session(probed.lm)
    with probed.recording() as record:
        state.read(probed.ids(1, 2 * chunk + 3))
        both = (state, state.fork())
        for turn in range(2):
            for number, one in enumerate(both):
                probed.read_on(one, probed.ids(1, chunk, 1 + 2 * turn + number))
    known = Piece(0, 0, 0, 2 * chunk + 3)
    branches = [[known, Piece(1 + n, 0, 0, chunk), Piece(3 + n, 0, 0, chunk)] for n in range(2)]
    yield "a session and its branch", record, branches
    windows = any(getattr(layer, "is_sliding", False) for layer in probed.cache().layers)
    if windows or not probed.config.update_on_decode:
        # tokens that left a sliding window cannot be restored, and a cache with unwritten tokens refuses to
        # crop
        return
    steps: list[Step] = [chunk + 2, chunk, Crop(chunk), *over_an_edge(2, chunk, 3 * chunk)]
    yield "a chunk taken back", *streamed(probed, 1, steps)
    steps = [2 * chunk + 3, 1, 3, Crop(3), 1, *over_an_edge(5, chunk, 2 * chunk - 1)]
    yield "tokens of an open chunk taken back", *streamed(probed, 1, steps)


def documents(probed: Prepared) -> Iterator[Reading]:
    """Reads five documents packed in a row."""
    chunk = probed.chunk
    if probed.takes_documents:
        lengths = [2 * chunk + 1, chunk - 1, 3 * chunk, 2 * chunk + 2, 4 * chunk + 5]
        yield "five documents", *packed(probed, [lengths])


def many_chunks(probed: Prepared) -> Iterator[Reading]:
    """Reads sixteen chunks of one document in one call and in pieces, then a few larger chunks."""
    chunk = probed.chunk
    yield whole(probed, "sixteen chunks", 1, 16 * chunk + 3)
    steps = [9 * chunk + 4, *over_an_edge(4, chunk, 7 * chunk - 1)]
    yield "sixteen chunks in pieces", *streamed(probed, 1, steps)
    with probed.with_chunks_of(2 * chunk + 5) as larger:
        yield whole(larger, f"chunks of {larger.chunk} tokens", 1, 3 * larger.chunk + 4)


def saved_session(probed: Prepared, saves: bool = True) -> Iterator[Reading]:
    """Saves a session of two rows in the middle of a chunk, loads it, and reads on.

    Without `saves`, the session itself reads on.
    """
    chunk, state = probed.chunk, Session(probed.lm)
    with tempfile.TemporaryDirectory() as folder, probed.recording() as record:
        state.read(probed.ids(2, 2 * chunk + 5))
        read = len(record.shapes)
        if saves:
            state.save(Path(folder) / "session")
            state = Session.load(Path(folder) / "session", probed.lm)
        checks = range(read, len(record.shapes))
        probed.read_on(state, probed.ids(2, 3 * chunk - 5, 1))
    name = "a session that was saved and loaded" if saves else "a session"
    yield name, record, record.as_one_text(2, skipped=checks)


def drawn_sizes(probed: Prepared) -> Iterator[Reading]:
    """Reads many rows, many chunks, many documents, large chunks and a long session.

    The sizes are drawn from the seed. Gradient steps take more time, so half as many are read. The session's
    text is longer than the piece that a session reads in one forward.
    """
    draw, chunk, part = random.Random(probed.seed), probed.chunk, 1 if probed.by_layers else 2
    rows, chunks = draw.randint(6, 9) // part, draw.randint(66, 75) // part
    yield whole(probed, f"{rows} rows", rows, 3 * chunk + draw.randrange(chunk))
    lengths = [draw.randint(2 * chunk, 4 * chunk) for _ in range(rows)]
    yield f"{rows} padded rows", *padded(probed, lengths, left=True)
    known = draw.randint(chunk, 2 * chunk)
    yield f"{rows} rows in pieces", *streamed(probed, rows, [known, 1, 1, 4 * chunk - known - 2])
    yield whole(probed, f"{chunks} chunks", 1, chunks * chunk + draw.randrange(chunk))
    half = chunks // 2 * chunk + 5
    steps = [half, 3, 20 // part * chunk, (chunks - 20 // part) * chunk - half - 3]
    yield f"{chunks} chunks in pieces", *streamed(probed, 1, steps)
    if probed.takes_documents:
        lengths = [draw.randint(chunk - 2, 3 * chunk) for _ in range(draw.randint(17, 22) // part)]
        yield f"{len(lengths)} documents", *packed(probed, [lengths])
        row_lengths = [_cut(draw, 8 * chunk, chunk) for _ in range(draw.randint(5, 7) // part)]
        yield f"{len(row_lengths)} rows of documents", *packed(probed, row_lengths)
    with probed.with_chunks_of(draw.randint(130, 190)) as larger:
        tokens, name = 3 * larger.chunk + draw.randrange(larger.chunk), f"chunks of {larger.chunk} tokens"
        yield whole(larger, name, 1, tokens)
        steps = [larger.chunk + 70, 1, 40, tokens - larger.chunk - 111]
        yield f"{name}, in pieces", *streamed(larger, 1, steps)
        state, tokens = Session(larger.lm), draw.randint(2100, 2300)
        with larger.recording() as record:
            state.read(larger.ids(1, tokens))
            larger.read_on(state, larger.ids(1, larger.chunk, 1))
        yield f"a session of {tokens} tokens", record, record.as_one_text(1)


def _cut(draw: random.Random, tokens: int, chunk: int) -> list[int]:
    """Returns lengths of documents that fill a row."""
    found: list[int] = []
    while (rest := tokens - sum(found)) > 2 * chunk:
        found.append(draw.randint(chunk - 3, min(3 * chunk, rest - 1)))
    return [*found, rest]


def many_writes(probed: Probed, chunks: int) -> tuple[Reading, dict[int, float]]:
    """Reads this number of chunks in three pieces.

    Returns:
        The reading, and by layer the relative error of the state against the declared writes.
    """
    half, cache = chunks // 2 * probed.chunk + 5, probed.cache()
    record, texts = streamed(probed, 1, [half, 3, chunks * probed.chunk - half - 3], cache)
    found = {}
    for index, held in streams(cache).items():
        z, source, _, _ = record.of(index, texts[0])
        wanted = probed.rule(index).state(z, source)
        state = torch.zeros_like(wanted) if held.state is None else held.state[0].double().cpu()
        total = len(probed.rule(index).tensors["proj"])
        parts = [(state[:total], wanted[:total]), (state[total:], wanted[total:])]
        found[index] = max(
            float((got - right).norm() / right.norm()) for got, right in parts if right.numel()
        )
    return (f"{chunks} chunks in pieces", record, texts), found
