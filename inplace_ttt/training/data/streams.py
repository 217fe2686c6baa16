"""Rows made while training: documents read, tokenised and packed as they are needed, from any row on at
once."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import IterableDataset

from ...errors import InPlaceTTTError
from ...texts.json_lines import TOKENS
from ...texts.sources import Source, open_source, read_error
from ..recipe.data_section import Data
from .mixture import furthest_behind
from .packing import pack_pieces
from .tokenising import token_features, tokenise

if TYPE_CHECKING:
    import datasets

    Opened: TypeAlias = tuple[Source, Callable[[int], datasets.IterableDataset]]

BLOCK = 64
"""Documents of a source that change places with each other where it is shuffled; so do its files, or the
parts it is stored in."""
_BATCH = 8
"""Documents of a source that are tokenised at a time."""

Row: TypeAlias = dict[str, list[int]]
Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """How far a source is read: times to its end, documents since, tokens in all, and the state of its stream
    (as `datasets` has it)."""

    passes: int = 0
    documents: int = 0
    tokens: int = 0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Position:
    """Where a row begins: the number of rows before it, how far the sources were read, and tokens of the next
    document in rows before."""

    rows: int = 0
    places: tuple[Place, ...] = ()
    used: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        return cls(values["rows"], tuple(Place(**place) for place in values["places"]), values["used"])


def open_stream(source: Source, data: Data, tokenizer: Any, shuffle: bool) -> Opened:
    """The source, and a call that gives its documents as input_ids, length, lead and digest, in another order
    for each pass if shuffled."""
    records, column = open_source(source, data.reading, streaming=True)
    to_tokens = functools.partial(tokenise, column=column, tokenizer=tokenizer, source=source.name)

    def documents(passes: int) -> datasets.IterableDataset:
        import numpy as np

        found: Any = records
        if shuffle:  # a buffer of one: what a larger one holds is not part of a stream's state
            found = found.shuffle(generator=np.random.default_rng([data.seed, passes]), buffer_size=1)
            settings = {"seed": data.seed, "passes": passes}
            found = found.map(
                _change_places, batched=True, batch_size=BLOCK, with_indices=True, fn_kwargs=settings
            )
        return found.map(
            to_tokens, batched=True, batch_size=_BATCH, remove_columns=[column], features=token_features()
        )

    return source, documents


def _change_places(
    block: Mapping[str, list[Any]], indices: list[int], seed: int, passes: int
) -> dict[str, list[Any]]:
    """A block of records in an order of its own."""
    import numpy as np

    order = np.random.default_rng([seed, passes, indices[0]]).permutation(len(indices))
    return {name: [values[number] for number in order] for name, values in block.items()}


class _Reader:
    """One source, read on from a place."""

    def __init__(self, opened: Opened, data: Data, wanted: Callable[[Document], bool], place: Place) -> None:
        self.source, self.open = opened
        self.data, self.wanted, self.place = data, wanted, place
        self._stream: datasets.IterableDataset | None = None
        self._documents: Iterator[Document] = iter(())

    def next(self) -> Document | None:
        """Its next document that is wanted and not empty; None at its end, after which it starts again."""
        try:
            if self._stream is None:
                self._stream = self.open(self.place.passes)
                with _silent("datasets.iterable_dataset"):  # which warns of a buffer of one
                    if self.place.state is not None:
                        self._stream.load_state_dict(self.place.state)
                    self._documents = iter(self._stream)
                    document = next(self._documents, None)
            else:
                document = next(self._documents, None)
            while document is not None and not (document["length"] and self.wanted(document)):
                document = next(self._documents, None)
        except InPlaceTTTError:
            raise
        except Exception as error:
            raise read_error([self.source], self.data.reading, error) from None
        place = self.place
        if document is None:
            self.place, self._stream = Place(place.passes + 1, 0, place.tokens), None
        else:
            self.place = Place(
                place.passes,
                place.documents + 1,
                place.tokens + document["length"],
                self._stream.state_dict(),
            )
        return document


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Within it that logger passes on nothing below an error."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Documents:
    """The documents of several sources: by their weights, else in turns where they are shuffled, else one
    source after another.

    wanted: which documents are read.
    """

    sources: tuple[Opened, ...]
    data: Data
    weights: Sequence[float] = ()
    turns: bool = False
    wanted: Callable[[Document], bool] = lambda document: True

    def read(
        self, places: Sequence[Place] = (), endless: bool = False
    ) -> Iterator[tuple[tuple[Place, ...], int, Document]]:
        """From `places` on: how far the sources were read before each document, which of them it is of, and
        the document.

        Ends when every source was read once; `endless` ones start again.
        """
        start = places or [Place()] * len(self.sources)
        readers = [
            _Reader(opened, self.data, self.wanted, place)
            for opened, place in zip(self.sources, start, strict=True)
        ]
        while endless or not all(reader.place.passes for reader in readers):
            before = tuple(reader.place for reader in readers)
            number = self._next(before)
            document = readers[number].next()
            if document is not None:
                yield before, number, document
            elif self.weights and not before[number].documents:
                raise InPlaceTTTError(
                    f"{readers[number].source.name} has no document to train on, though data.weights gives "
                    "it a share; remove both."
                )

    def _next(self, places: Sequence[Place]) -> int:
        if self.weights:
            return furthest_behind([place.tokens for place in places], self.weights)
        passes = min(place.passes for place in places)
        unread = [number for number, place in enumerate(places) if place.passes == passes]
        return min(unread, key=lambda number: places[number].documents) if self.turns else unread[0]


@dataclass(eq=False)
class RowStream(IterableDataset):
    """Packed rows of documents. begins: as `pack` has them. endless: start again at the end. transform:
    applied to each row as it comes.

    start: the position of the first row; or the number of rows before it, which are then made and dropped.
    reach: how many of the last rows it knows the position of.
    """

    documents: Documents
    length: int
    pad_token: int
    align: int
    begins: Sequence[int] = ()
    endless: bool = False
    start: Position | int = 0
    transform: Callable[[Row], Row] | None = None
    reach: int = 64
    _known: deque[Position] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = deque(maxlen=self.reach + 1)

    def from_row(self, start: Position | int, reach: int = 64) -> RowStream:
        """The same rows without an end, from there on."""
        return dataclasses.replace(self, endless=True, start=start, reach=reach)

    def position(self, rows: int) -> Position:
        """Where the row after so many rows begins. Raises LookupError where that is not among the last
        `reach` that were read."""
        found = next((position for position in reversed(self._known) if position.rows == rows), None)
        if found is None:
            raise LookupError(f"the row after {rows} is not among the last {self.reach} that were read")
        return found

    def __iter__(self) -> Iterator[Row]:
        start, dropped = (Position(), self.start) if isinstance(self.start, int) else (self.start, 0)
        before: dict[int, tuple[Place, ...]] = {}  # documents that may go on in a later row

        def tokens() -> Iterator[Sequence[int]]:
            for number, (places, _, document) in enumerate(self.documents.read(start.places, self.endless)):
                before[number] = places
                yield document[TOKENS]

        self._known.clear()
        self._known.append(start)
        for pieces, row in pack_pieces(
            tokens(), self.length, self.pad_token, self.align, self.begins, start.used
        ):
            last = pieces[-1]
            rows = self._known[-1].rows + 1
            self._known.append(Position(rows, before[last.document], last.stop))
            for number in [number for number in before if number < last.document]:
                del before[number]
            if rows > dropped:
                values: Row = {name: column.tolist() for name, column in row.items()}
                yield self.transform(values) if self.transform else values
