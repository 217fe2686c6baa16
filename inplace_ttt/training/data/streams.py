"""Reads, tokenizes and packs documents while training.

A stream can start from the stored position of a row, without the rows before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import IterableDataset

from ...errors import InPlaceTTTError, errors_only
from ...texts.json_lines import TOKENS
from ...texts.records import open_source, read_error
from ...texts.sources import Source
from ..recipe.data_section import Data
from .mixture import furthest_behind
from .packing import pack_pieces
from .tokenizing import token_features, tokenize

if TYPE_CHECKING:
    import datasets

    Opened: TypeAlias = tuple[Source, Callable[[int], datasets.IterableDataset]]

BLOCK = 64
"""Number of consecutive documents that are shuffled among each other.

A source's files, or its shards, are shuffled too.
"""
_BATCH = 8
"""Documents per call of the tokenizer."""

Row: TypeAlias = dict[str, list[int]]
Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A position in a source.

    Attributes:
        passes: number of times that the source was read to its end.
        documents: documents read in the current pass.
        tokens: tokens read in all passes.
        state: state of the stream in `datasets`.
    """

    passes: int = 0
    documents: int = 0
    tokens: int = 0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Position:
    """The position at which a row begins.

    Attributes:
        rows: number of rows before it.
        places: position in each source.
        used: number of the next document's tokens that are in earlier rows.
    """

    rows: int = 0
    places: tuple[Place, ...] = ()
    used: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        return cls(values["rows"], tuple(Place(**place) for place in values["places"]), values["used"])


def open_stream(source: Source, data: Data, tokenizer: Any, shuffle: bool) -> Opened:
    """Returns the source, and a function from a pass number to its documents.

    Args:
        source: where to read.
        data: the recipe's data section.
        tokenizer: the model's tokenizer.
        shuffle: give the documents in another order in each pass.

    Returns:
        The documents have the columns input_ids, length, lead and digest.
    """
    records, column = open_source(source, data.reading, streaming=True)
    to_tokens = functools.partial(tokenize, column=column, tokenizer=tokenizer, source=source.name)

    def documents(passes: int) -> datasets.IterableDataset:
        import numpy as np

        found: Any = records
        if shuffle:  # a buffer of one, because a stream's state lacks the contents of a larger one
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
    """Shuffles one block of records."""
    import numpy as np

    order = np.random.default_rng([seed, passes, indices[0]]).permutation(len(indices))
    return {name: [values[number] for number in order] for name, values in block.items()}


class _Reader:
    """Reads one source, starting at a place."""

    def __init__(self, opened: Opened, data: Data, wanted: Callable[[Document], bool], place: Place) -> None:
        self.source, self.open = opened
        self.data, self.wanted, self.place = data, wanted, place
        self._stream: datasets.IterableDataset | None = None
        self._documents: Iterator[Document] = iter(())

    def next(self) -> Document | None:
        """Returns the next wanted document that is not empty; None at the end, where a new pass begins."""
        try:
            if self._stream is None:
                self._stream = self.open(self.place.passes)
                with errors_only("datasets.iterable_dataset"):  # it would warn of a buffer of one
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


@dataclass(frozen=True)
class Documents:
    """The documents of several sources.

    Attributes:
        sources: opened sources.
        data: the recipe's data section.
        weights: share of tokens that each source gets. Without weights, see `turns`.
        turns: take one document of each source in turn. Otherwise one source follows another.
        wanted: returns True for documents to read.
    """

    sources: tuple[Opened, ...]
    data: Data
    weights: Sequence[float] = ()
    turns: bool = False
    wanted: Callable[[Document], bool] = lambda document: True

    def read(
        self, places: Sequence[Place] = (), endless: bool = False
    ) -> Iterator[tuple[tuple[Place, ...], int, Document]]:
        """Yields the documents that follow `places`.

        Args:
            places: position in each source; the default is the start.
            endless: start again at the end. Otherwise it ends when every source was read once.

        Yields:
            The positions in the sources before the document, the number of its source, and the document.

        Raises:
            InPlaceTTTError: if a source cannot be read, or has a weight and lacks documents.
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
                    f"{readers[number].source.name} lacks a document to train on, though data.weights gives "
                    "it a share; remove the source and its weight."
                )

    def _next(self, places: Sequence[Place]) -> int:
        if self.weights:
            return furthest_behind([place.tokens for place in places], self.weights)
        passes = min(place.passes for place in places)
        unread = [number for number, place in enumerate(places) if place.passes == passes]
        return min(unread, key=lambda number: places[number].documents) if self.turns else unread[0]


@dataclass(eq=False)
class RowStream(IterableDataset):
    """Packed rows of documents.

    Attributes:
        documents: the documents to pack.
        length: tokens per row.
        pad_token: id that fills up a row.
        align: documents start on multiples of this many tokens.
        begins: special tokens that begin every text, as for `pack`.
        endless: start again at the end.
        start: position of the first row, or the number of rows before it. With a number, these rows are
            made and dropped.
        transform: applied to each row.
        reach: number of the last rows whose positions are kept.
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
        """Returns an endless stream of the same rows that begins at `start`."""
        return dataclasses.replace(self, endless=True, start=start, reach=reach)

    def position(self, rows: int) -> Position:
        """Returns the position of the row after `rows` rows.

        Raises:
            LookupError: if it is not among the last `reach` rows that were read.
        """
        found = next((position for position in reversed(self._known) if position.rows == rows), None)
        if found is None:
            raise LookupError(f"the row after {rows} is not among the last {self.reach} that were read")
        return found

    def __iter__(self) -> Iterator[Row]:
        start, dropped = (Position(), self.start) if isinstance(self.start, int) else (self.start, 0)
        before: dict[int, tuple[Place, ...]] = {}  # documents that may continue in a later row

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
