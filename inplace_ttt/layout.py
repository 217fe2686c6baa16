"""The documents and chunks of a batch's tokens, independent of any model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .device_copies import on_device
from .documents import spans_of_attention_mask, spans_of_cu_seqlens, spans_of_lengths, spans_of_position_ids
from .errors import InPlaceTTTError

Span = tuple[int, int]
"""Half-open range of token positions in a row."""


@dataclass(frozen=True)
class ChunkLayout:
    """Describes the documents of a batch [B, T] and their grid of chunks (paper §3.1, §3.4).

    A document is cut into chunks of `chunk_size` tokens from its own first token; its last chunk may be
    short. Tokens outside every document are padding and belong to no chunk.

    Args:
        documents: for each row, the spans of its documents, in order.
        length: T, tokens per row, including padding.
        chunk_size: tokens per chunk.

    Attributes:
        spans: the same documents as int64 [n, 3] on the CPU: row, start and stop.

    Raises:
        InPlaceTTTError: if a document is empty, overlaps another, or exceeds the row. Also if `chunk_size` is
            below 1.

    Examples:
        >>> from inplace_ttt.layout import ChunkLayout
        >>> layout = ChunkLayout(documents=(((0, 5), (5, 8)),), length=9, chunk_size=2)
        >>> layout.chunk_ids().tolist()
        [[0, 0, 1, 1, 2, 3, 3, 4, -1]]
    """

    documents: tuple[tuple[Span, ...], ...]
    length: int
    chunk_size: int
    spans: Tensor = field(init=False, repr=False, compare=False)
    _chunk_ids: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise InPlaceTTTError(f"chunk_size must be at least 1, got {self.chunk_size}.")
        for row, spans in enumerate(self.documents):
            end = 0
            for start, stop in spans:
                if not end <= start < stop <= self.length:
                    raise InPlaceTTTError(
                        f"row {row} has document {start}:{stop}, which is empty, overlaps, or leaves "
                        f"0:{self.length}."
                    )
                end = stop
        rows = [(row, start, stop) for row, spans in enumerate(self.documents) for start, stop in spans]
        object.__setattr__(self, "spans", torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3))

    @classmethod
    @functools.lru_cache(maxsize=16)
    def shared(cls, documents: tuple[tuple[Span, ...], ...], length: int, chunk_size: int) -> ChunkLayout:
        """Makes one layout per set of arguments, and returns the same object for equal arguments.

        All layers then share the layout, and its tensors are copied to a device only once. The 16 layouts
        used last are kept.

        Args:
            documents: for each row, the spans of its documents, in order.
            length: T, tokens per row, including padding.
            chunk_size: tokens per chunk.

        Returns:
            The layout.

        Raises:
            InPlaceTTTError: if a document is empty, overlaps another, or exceeds the row. Also if
                `chunk_size` is below 1.

        Examples:
            >>> ChunkLayout.shared((((0, 5),),), 5, 2) is ChunkLayout.shared((((0, 5),),), 5, 2)
            True
        """
        with torch.inference_mode(False):
            return cls(documents, length, chunk_size)

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return len(self.documents)

    def chunks(self, document: Span) -> Iterator[Span]:
        """Cuts a document into its chunks.

        Args:
            document: the document's start and stop in its row.

        Yields:
            Start and stop of each chunk, in order.

        Examples:
            >>> list(layout.chunks((0, 5)))
            [(0, 2), (2, 4), (4, 5)]
        """
        start, stop = document
        for first in range(start, stop, self.chunk_size):
            yield first, min(first + self.chunk_size, stop)

    def is_complete(self, chunk: Span) -> bool:
        """Checks if a chunk has `chunk_size` tokens. Only such chunks are written.

        Args:
            chunk: the chunk's start and stop in its row.

        Returns:
            True if the chunk has exactly `chunk_size` tokens.

        Examples:
            >>> layout.is_complete((4, 5))
            False
        """
        return chunk[1] - chunk[0] == self.chunk_size

    def writes(self) -> int:
        """Counts the chunks whose write a later token of the same document reads.

        Returns:
            The number of such chunks. If it is 0, the batch cannot train the target generator.

        Examples:
            >>> ChunkLayout.from_lengths([[3000, 500], [800]], chunk_size=512).writes()  # 5 + 0 + 1
            6
        """
        return sum((stop - start - 1) // self.chunk_size for row in self.documents for start, stop in row)

    def chunk_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Numbers the chunks of each row.

        Args:
            device: device of the result. The layout caches one result per device.

        Returns:
            The index of each token's chunk in its row, int32 [B, T]; -1 for padding.

        Examples:
            >>> ChunkLayout.from_lengths([[3]], chunk_size=2, length=4).chunk_ids()
            tensor([[ 0,  0,  1, -1]], dtype=torch.int32)
        """
        device = torch.device(device)
        if device not in self._chunk_ids:
            ids = torch.full((self.batch, self.length), -1, dtype=torch.int32)
            for row, spans in enumerate(self.documents):
                count = 0
                for start, stop in spans:
                    ids[row, start:stop] = (
                        count + torch.arange(stop - start, dtype=torch.int32) // self.chunk_size
                    )
                    count += -(-(stop - start) // self.chunk_size)
            self._chunk_ids[device] = on_device(ids, device)
        return self._chunk_ids[device]

    @functools.lru_cache(maxsize=64)  # noqa: B019 (layouts are small, and few are held)
    def part(self, rank: int, ranks: int) -> ChunkLayout:
        """Cuts out one rank's part of the rows, T / `ranks` tokens each.

        The part's first and last documents may continue on other ranks.

        Args:
            rank: number of the rank, from 0.
            ranks: number of ranks that share the rows.

        Returns:
            The layout of the part.

        Raises:
            InPlaceTTTError: on all ranks, if T is not a multiple of `ranks`, or if a border between ranks
                would cut a chunk in two.

        Examples:
            >>> ChunkLayout.from_lengths([[6, 2]], chunk_size=2).part(rank=1, ranks=2).documents
            (((0, 2), (2, 4)),)
        """
        if self.length % ranks:
            raise InPlaceTTTError(
                f"rows of {self.length} tokens cannot be split evenly over {ranks} ranks; pad them to a "
                f"multiple of {ranks}."
            )
        width = self.length // ranks
        for border, (row, spans) in itertools.product(
            range(width, self.length, width), enumerate(self.documents)
        ):
            for start, stop in spans:
                if start < border < stop and (border - start) % self.chunk_size:
                    raise InPlaceTTTError(
                        f"rank {border // width} begins at token {border} of row {row}, "
                        f"{(border - start) % self.chunk_size} tokens into a "
                        f"chunk of {self.chunk_size}; make documents start at multiples of the chunk size, "
                        f"and make T / ranks = {width} a multiple of the chunk size."
                    )
        first, last = rank * width, (rank + 1) * width
        rows = (
            tuple(
                (max(start, first) - first, min(stop, last) - first)
                for start, stop in spans
                if start < last and stop > first
            )
            for spans in self.documents
        )
        return ChunkLayout(tuple(rows), width, self.chunk_size)

    def links(self, ranks: int) -> Tensor:
        """Selects the terms of each rank's starting state, for the scan over ranks (paper §3.4, Algorithm 1).

        Args:
            ranks: number of ranks that share the rows.

        Returns:
            Zeros and ones, float64 [B, ranks + 1, ranks + 1]. Row r is rank r's state at the first token of
            its first document. The last row is the state after the last document. Column 0 is the initial
            state. Column r + 1 is the sum of rank r's writes in its last document.

        Examples:
            >>> ChunkLayout.from_lengths([[4]], chunk_size=2).links(ranks=2)[0, 1].tolist()
            [1.0, 1.0, 0.0]
        """
        width = self.length // ranks
        links = torch.zeros(self.batch, ranks + 1, ranks + 1, dtype=torch.float64)
        for row, spans in enumerate(self.documents):
            if not spans:
                links[row, :, 0] = 1  # in a row of padding alone, every rank starts from the initial state
            for number, (start, stop) in enumerate(spans):
                writers = range(start // width, -(-stop // width))
                # ranks on which the document continues, and the rank where it starts from a given state
                readers = [r for r in writers if start < r * width or number == 0]
                if number == len(spans) - 1:
                    readers.append(ranks)
                for reader in readers:
                    links[row, reader, 0] = number == 0
                    for writer in writers:
                        links[row, reader, writer + 1] = writer < reader
        return links

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], chunk_size: int, length: int | None = None
    ) -> ChunkLayout:
        """Lays out rows of adjacent documents.

        Args:
            lengths: for each row, the tokens of its documents, in order.
            chunk_size: tokens per chunk.
            length: T; padding fills the rows up to it. None stands for the length of the longest row.

        Returns:
            The layout.

        Raises:
            InPlaceTTTError: if a document is empty, the documents of a row exceed `length`, or `chunk_size`
                is below 1.

        Examples:
            >>> ChunkLayout.from_lengths([[3000, 500], [800]], chunk_size=512).documents
            (((0, 3000), (3000, 3500)), ((0, 800),))
        """
        rows = spans_of_lengths(lengths)
        longest = max((row[-1][1] for row in rows if row), default=0)
        return cls(rows, longest if length is None else length, chunk_size)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, chunk_size: int) -> ChunkLayout:
        """Lays out packed rows, whose documents start wherever a position is not the previous one plus 1.

        Args:
            position_ids: position ids [B, T], integers.
            chunk_size: tokens per chunk.

        Returns:
            The layout, without padding.

        Raises:
            InPlaceTTTError: if `chunk_size` is below 1.

        Examples:
            >>> import torch
            >>> ChunkLayout.from_position_ids(torch.tensor([[0, 1, 2, 0, 1]]), chunk_size=2).documents
            (((0, 3), (3, 5)),)
        """
        return cls(spans_of_position_ids(position_ids), position_ids.shape[1], chunk_size)

    @classmethod
    def from_attention_mask(cls, mask: Tensor, chunk_size: int) -> ChunkLayout:
        """Lays out rows with one document each.

        Args:
            mask: a mask [B, T] that is 0 for padding, at the left or the right.
            chunk_size: tokens per chunk.

        Returns:
            The layout.

        Raises:
            InPlaceTTTError: if a row has padding inside its document, or `chunk_size` is below 1.

        Examples:
            >>> import torch
            >>> ChunkLayout.from_attention_mask(torch.tensor([[0, 0, 1, 1]]), chunk_size=2).documents
            (((2, 4),),)
        """
        return cls(spans_of_attention_mask(mask), mask.shape[1], chunk_size)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, chunk_size: int, length: int | None = None) -> ChunkLayout:
        """Lays out one packed row.

        Args:
            cu_seqlens: cumulative lengths of the documents, from 0, integers [documents + 1].
            chunk_size: tokens per chunk.
            length: T; padding fills the row up to it. None stands for the last of `cu_seqlens`.

        Returns:
            The layout.

        Raises:
            InPlaceTTTError: if the lengths do not start at 0, decrease, or exceed `length`. Also if
                `chunk_size` is below 1.

        Examples:
            >>> import torch
            >>> ChunkLayout.from_cu_seqlens(torch.tensor([0, 3, 5]), chunk_size=2).documents
            (((0, 3), (3, 5)),)
        """
        spans = spans_of_cu_seqlens(cu_seqlens)
        return cls((spans,), int(cu_seqlens[-1]) if length is None else length, chunk_size)
