"""The context that a TTT layer needs of the current forward: its documents, target source and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..documents import document_starts
from ..errors import InPlaceTTTError
from ..families import cache_in
from ..layout import ChunkLayout, Span
from ..ops.compiled import TracedLayout
from .attention_masks import documents_seen, seen_tokens
from .overrides import overriding
from .per_thread import this_thread
from .sequence_parallel import gather_rows


@contextmanager
def reading_text(forwards: float = inf) -> Iterator[None]:
    """Returns a context in which the next forwards read text.

    Outside this context, a single token that is read into a filled cache counts as generated.

    Args:
        forwards: number of forwards that read text.
    """
    with overriding([this_thread()], text_forwards=forwards):
        yield


class ForwardContext:
    """One forward of the base model.

    Args:
        given: the forward's arguments: token ids or embeddings, masks, positions, the cache.
        owner: the hooks that opened this context.
        enabled: True if TTT is on.
        group: the ranks that share these rows, each with a part of the tokens.
        outer: the context of the forward around this one, if there is one.
        past: number of tokens before this forward, if the arguments hold no cache.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        owner: Any,
        enabled: bool = True,
        group: ProcessGroup | None = None,
        outer: Any = None,
        past: int = 0,
    ) -> None:
        self.attention_mask: Any = given.get("attention_mask")
        self.position_ids: Tensor | None = given.get("position_ids")
        ids, embedded = given.get("input_ids"), given.get("inputs_embeds")
        self._rows = embedded.shape[:2] if embedded is not None else None if ids is None else ids.shape[:2]
        self.input_ids: Tensor | None = ids
        self.cu_seqlens: Tensor | None = given.get("cu_seq_lens_q")
        cache = cache_in(given)
        self._past: Any = past if cache is None else _length(cache)
        self.owner, self.enabled, self.group, self.outer = owner, enabled, group, outer
        self.with_gradient = torch.is_grad_enabled()
        thread = this_thread()
        self.is_text = thread.text_forwards > 0
        if self.is_text:
            thread.text_forwards -= 1
        # [B, T, d] by layer, with `target: gradient`
        self.targets, thread.targets = thread.targets, None
        self.embeddings: Tensor | None = None  # [B, T, d], the input of layer 0
        self.called: set[int] = set()  # TTT layers that ran
        self._layouts: dict[int, ChunkLayout] = {}
        self._parts: dict[int, ChunkLayout] = {}
        self._spans: list[Span] | None = None
        self._rows_read: Tensor | None = None

    @property
    def past(self) -> int:
        """Number of tokens in the cache before this forward."""
        return int(self._past)

    def take_embeddings(self, embeddings: Tensor) -> None:
        """Stores the input of the first layer, [B, T, d].

        Raises:
            InPlaceTTTError: if the rows and tokens of `embeddings` differ from those of the forward.
        """
        if self._rows is not None and embeddings.shape[:2] != self._rows:
            raise InPlaceTTTError(
                f"{list(self._rows)} tokens enter the first layer as {list(embeddings.shape)}, but the fast "
                "weight needs hidden states [rows, tokens, width]; this family is not supported."
            )
        self.embeddings = embeddings

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Returns the token ids and the positions of this forward, both [B, T].

        Raises:
            InPlaceTTTError: if the forward received embeddings and no token ids.
        """
        if self.input_ids is None:
            raise InPlaceTTTError(
                "target='gradient' learns to predict token ids, but this forward has embeddings alone; pass "
                "input_ids."
            )
        positions = self._positions()
        if positions is None:
            positions = torch.arange(
                self.past, self.past + self.shape[1], device=self.input_ids.device
            ).expand(self.shape[0], -1)
        return self.input_ids, positions

    @property
    def generated(self) -> bool:
        """True if this forward reads a single generated token, outside `reading_text`."""
        return self.shape[1] == 1 and not self.is_text

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T) of this forward."""
        assert self.embeddings is not None
        return self.embeddings.shape[0], self.embeddings.shape[1]

    def _mask(self) -> Tensor | None:
        """Returns the part of a 2-D mask over this forward's tokens, or None if it hides none of them."""
        if not self._has_2d_mask():
            return None
        # further columns are allowed, as in attention
        mask = self.attention_mask[:, self.past : self.past + self.shape[1]]
        if mask.shape[1] < self.shape[1]:
            raise InPlaceTTTError(
                f"attention_mask has {self.attention_mask.shape[1]} columns for {self.past} tokens in the "
                "cache and "
                f"{self.shape[1]} new ones; pass one column per token."
            )
        return None if bool(mask.all()) else mask

    def _seen(self) -> Tensor | None:
        """Returns the part of a 4-D mask between the new tokens, bool [b, T, T], or None without one."""
        mask = self._one_mask()
        # `plan` runs the model on meta tensors
        if mask is None or self._has_2d_mask() or getattr(mask, "is_meta", False):
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] < self.shape[1]:
            what = f"is {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
            raise InPlaceTTTError(
                f"attention_mask {what}, which does not show the padding to TTT; pass a 2-D mask [B, T], or "
                "none."
            )
        return seen_tokens(mask, self.past, self.shape[1])

    def _one_mask(self) -> Any:
        """Returns the mask. If there is one mask per kind of layer, it returns that of full attention."""
        mask = self.attention_mask
        return (
            mask.get("full_attention", next(iter(mask.values()), None)) if isinstance(mask, Mapping) else mask
        )

    def _documents_seen(self) -> list[list[Span]] | None:
        sees = self._seen()
        if sees is None:
            return None
        documents = documents_seen(sees)
        return documents * self.shape[0] if len(documents) == 1 else documents

    def _positions(self) -> Tensor | None:
        """Returns the positions in the text [B, T], if given.

        Models for images have several kinds of positions. If there are four, the first is the position in the
        text. If there are three, the position in the text is not included.
        """
        positions = self.position_ids
        if positions is not None and positions.dim() == 3:
            positions = positions[0] if len(positions) == 4 else None
        return None if positions is None else positions.expand(self.shape[0], -1)

    def layout(self, chunk_size: int) -> ChunkLayout:
        """Returns the documents of a forward without a cache, and their chunks.

        The documents come from the first of these that is given: `cu_seq_lens`, the padding mask,
        `position_ids`. Without any of them, each row is one document. As in transformers, positions mark
        packed documents only without an attention mask. If ranks share the rows, the layout is that of whole
        rows.

        Args:
            chunk_size: tokens per chunk.

        Raises:
            InPlaceTTTError: if the arguments contradict each other, or do not show the documents.
        """
        if torch.compiler.is_compiling() and self.group is None:
            # a `TracedLayout` has all attributes that tracing uses
            return cast(ChunkLayout, self._traced(chunk_size))
        if chunk_size not in self._layouts:
            self._layouts[chunk_size] = (
                self._layout(chunk_size)
                if self.group is None
                else self._layout_across(self.group, chunk_size)
            )
        return self._layouts[chunk_size]

    def _traced(self, chunk_size: int) -> TracedLayout:
        spans = torch.ops.inplace_ttt.document_spans(
            self._one_mask(), self.position_ids, self.cu_seqlens, *self.shape
        )
        return TracedLayout(spans, *self.shape, chunk_size)

    def part(self, chunk_size: int) -> ChunkLayout:
        """Returns the layout of this rank's tokens, or of whole rows if no ranks share them."""
        layout, group = self.layout(chunk_size), self.group
        if group is None:
            return layout
        if chunk_size not in self._parts:
            self._parts[chunk_size] = layout.part(dist.get_rank(group), dist.get_world_size(group))
        return self._parts[chunk_size]

    def _layout(self, chunk_size: int) -> ChunkLayout:
        batch, length = self.shape
        mask, seen, positions = self._mask(), self._documents_seen(), self._positions()
        if self.cu_seqlens is not None:
            return self._packed_by_cu_seqlens(self.cu_seqlens, positions, chunk_size)
        if mask is not None:
            layout = ChunkLayout.from_attention_mask(mask, chunk_size)
        elif seen is not None:
            layout = ChunkLayout(tuple(tuple(row) for row in seen), length, chunk_size)
        elif positions is not None and not self._has_2d_mask():
            return ChunkLayout.from_position_ids(positions, chunk_size)
        else:
            layout = ChunkLayout.from_lengths([[length]] * batch, chunk_size)
        if self._restarts_inside(layout.documents):
            raise InPlaceTTTError(
                "position_ids restart within a document of attention_mask, so attention sees one document "
                "and TTT several; "
                "drop attention_mask for packed rows."
            )
        return layout

    def _layout_across(self, group: ProcessGroup, chunk_size: int) -> ChunkLayout:
        positions = self._positions()
        if (
            positions is None
            or self.cu_seqlens is not None
            or self._mask() is not None
            or self._seen() is not None
        ):
            raise InPlaceTTTError(
                "rows that ranks share show their documents by position_ids alone; pass position_ids, "
                "without cu_seq_lens and padding masks."
            )
        return ChunkLayout.from_position_ids(gather_rows(positions, group), chunk_size)

    def spans(self) -> list[Span]:
        """Returns for each row the span of this forward's tokens without padding, for a forward with a cache.

        Raises:
            InPlaceTTTError: if a row holds several documents.
        """
        if self._spans is None:
            batch, length = self.shape
            mask, seen = self._mask(), self._documents_seen()
            if mask is not None:
                documents: Sequence[Sequence[Span]] = ChunkLayout.from_attention_mask(
                    mask, chunk_size=1
                ).documents
            elif seen is not None:
                # a padding token that attends to itself looks like a document of one token
                documents = [[span for span in row if span[1] - span[0] > 1] or row[-1:] for row in seen]
            else:
                documents = [[(0, length)]] * batch
            if (
                self.cu_seqlens is not None
                or any(len(row) > 1 for row in documents)
                or self._restarts_inside(documents)
            ):
                raise InPlaceTTTError(
                    "several documents are packed in a row with a cache; pass use_cache=False for packed "
                    "rows."
                )
            self._spans = [row[0] if row else (0, 0) for row in documents]
        return self._spans

    def rows_read(self) -> Tensor:
        """Returns False for each row whose single token is padding, else True, bool [B] on the CPU.

        A graph calls it. It asks the device once per forward.
        """
        if self._rows_read is None:
            past = self._past if isinstance(self._past, Tensor) else torch.full((), self._past)
            self._rows_read = torch.ops.inplace_ttt.rows_read(self._one_mask(), past, self.shape[0])
        return self._rows_read

    def _packed_by_cu_seqlens(
        self, cu_seqlens: Tensor, positions: Tensor | None, chunk_size: int
    ) -> ChunkLayout:
        batch, length = self.shape
        if batch != 1:
            raise InPlaceTTTError(
                f"cu_seq_lens describe one packed row, but the batch has {batch}; flatten it to one row."
            )
        if self._has_2d_mask() or self._seen() is not None:
            raise InPlaceTTTError(
                "cu_seq_lens are given with attention_mask, and attention then sees one document; drop "
                "attention_mask."
            )
        if positions is None:
            raise InPlaceTTTError(
                "cu_seq_lens are given without position_ids, but attention needs these to find the "
                "documents; pass both."
            )
        layout = ChunkLayout.from_cu_seqlens(cu_seqlens, chunk_size, length)
        if ChunkLayout.from_position_ids(positions, chunk_size).documents != layout.documents:
            raise InPlaceTTTError(
                "cu_seq_lens and position_ids disagree on where documents start; derive both from one source."
            )
        return layout

    def _has_2d_mask(self) -> bool:
        return isinstance(self.attention_mask, Tensor) and self.attention_mask.dim() == 2

    def _restarts_inside(self, documents: Sequence[Sequence[Span]]) -> bool:
        """Returns True if positions restart inside a document."""
        positions = self._positions()
        if positions is None or self.shape[1] == 1:
            return False
        starts = document_starts(positions)
        return any(
            bool(starts[row, start + 1 : stop].any())
            for row, spans in enumerate(documents)
            for start, stop in spans
        )


def _length(cache: Any) -> Any:
    """Returns the number of tokens in a cache. In a graph, a cache that counts in a tensor gives a tensor."""
    length = cache.get_seq_length()
    if isinstance(length, Tensor):
        return length.clone() if torch.compiler.is_compiling() else int(length)
    return length
