"""Readings with sizes drawn from the audit's seed.

Their batches, texts, chunks and packed rows are larger than those of `readings`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ..session.session import Session
from .probed import Probed, Reading
from .readings import packed, padded, streamed
from .recording import recording
from .ways import as_one_text


def drawn_sizes(probed: Probed) -> Iterator[Reading]:
    """Reads many rows, many chunks, many documents, large chunks and a long session.

    The session's text is longer than the piece that a session reads in one forward.
    """
    draw, chunk = random.Random(probed.seed), probed.chunk
    rows = draw.randint(6, 9)
    record = probed.read(probed.ids(rows, 3 * chunk + draw.randrange(chunk)))
    yield f"{rows} rows", record, record.whole()
    lengths = [draw.randint(2 * chunk, 4 * chunk) for _ in range(rows)]
    yield f"{rows} padded rows", *padded(probed, lengths, left=True)
    known = draw.randint(chunk, 2 * chunk)
    parts = [probed.ids(rows, 4 * chunk).split([known, 1, 1, 4 * chunk - known - 2], 1)]
    yield f"{rows} rows in pieces", *streamed(probed, parts)

    chunks = draw.randint(66, 75)
    record = probed.read(probed.ids(1, chunks * chunk + draw.randrange(chunk)))
    yield f"{chunks} chunks", record, record.whole()
    parts = [
        probed.ids(1, chunks * chunk).split([40 * chunk + 5, 3, 20 * chunk, (chunks - 60) * chunk - 8], 1)
    ]
    yield f"{chunks} chunks in pieces", *streamed(probed, parts)

    lengths = [draw.randint(chunk - 2, 3 * chunk) for _ in range(draw.randint(17, 22))]
    yield f"{len(lengths)} documents", *packed(probed, [lengths])
    rows = draw.randint(5, 7)
    yield f"{rows} rows of documents", *packed(probed, [_cut(draw, 8 * chunk, chunk) for _ in range(rows)])

    with probed.with_chunks_of(draw.randint(130, 190)) as larger:
        tokens = 3 * larger.chunk + draw.randrange(larger.chunk)
        record = larger.read(larger.ids(1, tokens))
        yield f"chunks of {larger.chunk} tokens", record, record.whole()
        parts = [larger.ids(1, tokens).split([larger.chunk + 70, 1, 40, tokens - larger.chunk - 111], 1)]
        yield f"chunks of {larger.chunk} tokens, in pieces", *streamed(larger, parts)
        state, tokens = Session(larger.lm), draw.randint(2100, 2300)
        with recording(larger.lm, larger.config) as record:
            state.read(larger.ids(1, tokens))
            state.read(larger.ids(1, larger.chunk, 1))
        yield f"a session of {tokens} tokens", record, as_one_text(record, 1)


def _cut(draw: random.Random, tokens: int, chunk: int) -> list[int]:
    """Returns lengths of documents that fill a row."""
    found: list[int] = []
    while (rest := tokens - sum(found)) > 2 * chunk:
        found.append(draw.randint(chunk - 3, min(3 * chunk, rest - 1)))
    return [*found, rest]
