"""What a TTT layer must know about the current forward: its documents, its target source, its cache.

An MLP sees only its input. Hooks bring the rest: one on the base model opens a `ForwardContext`, one on the first
decoder layer adds the embeddings, one on each attention takes the context (and the cache) out of the keyword arguments
and hands it to the down-projection. The context travels with the arguments, so that the recomputation of gradient
checkpointing meets the context of its own forward, however many forwards came in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ..errors import InPlaceTTTError
from ..layout import ChunkLayout, Span
from .sequence_parallel import gather_rows, ulysses_group

_KEY = "inplace_ttt_context"


@dataclass
class LayerCall:
    """What a TTT layer is handed for its one call in a forward: the cache, and the MLP's input if the target wants it."""

    cache: Any
    mlp_input: Tensor | None = None


@dataclass
class ForwardContext:
    """One forward of the base model. Tensors are the forward's own arguments: [B, T] masks and positions."""

    chunk_size: int
    enabled: bool = True
    attention_mask: Any = None
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    past: int = 0  # tokens in the cache before this forward
    group: ProcessGroup | None = None  # the ranks that share these rows, each with a part of them
    with_gradient: bool = field(default_factory=torch.is_grad_enabled)
    embeddings: Tensor | None = None  # [B, T, d], what enters layer 0
    calls: dict[int, LayerCall] = field(default_factory=dict)  # TTT layers whose call is still to come
    called: set[int] = field(default_factory=set)  # TTT layers that ran
    _layout: ChunkLayout | None = None
    _part: ChunkLayout | None = None
    _spans: list[Span] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T) of this forward."""
        assert self.embeddings is not None
        return self.embeddings.shape[0], self.embeddings.shape[1]

    def _mask(self) -> Tensor | None:
        """The part of a 2-D mask that covers this forward's tokens, or None when it hides none of them."""
        mask = self.attention_mask
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        mask = mask[:, self.past : self.past + self.shape[1]]  # as attention takes it, which allows a mask that goes on
        if mask.shape[1] < self.shape[1]:
            raise InPlaceTTTError(
                f"attention_mask has {self.attention_mask.shape[1]} columns for {self.past} tokens in the cache and "
                f"{self.shape[1]} new ones; give it a column for each."
            )
        return None if bool(mask.all()) else mask

    def _attends(self) -> list[bool] | None:
        """For a 4-D mask: whether each row's last token attends to anything; padding at the left does not."""
        masks = self.attention_mask.values() if isinstance(self.attention_mask, dict) else [self.attention_mask]
        for mask in masks:
            if isinstance(mask, Tensor) and mask.dim() == 4:
                seen = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
                return seen.any(-1).expand(self.shape[0]).tolist()
        return None

    def _positions(self) -> Tensor | None:
        return None if self.position_ids is None else self.position_ids.expand(self.shape[0], -1)

    def layout(self) -> ChunkLayout:
        """Documents of a forward without a cache: cu_seq_lens, else the padding mask, else position_ids, else whole rows.

        As in transformers, positions mark packed documents only where no attention mask is given.
        """
        if self._layout is None and self.group is not None:
            self._layout = self._layout_across(self.group)
        if self._layout is None:
            batch, length = self.shape
            mask, positions = self._mask(), self._positions()
            if self.cu_seqlens is not None:
                self._layout = self._packed_by_cu_seqlens(self.cu_seqlens, positions)
            elif mask is not None:
                self._layout = ChunkLayout.from_attention_mask(mask, self.chunk_size)
            elif positions is not None and not self._has_2d_mask():
                self._layout = ChunkLayout.from_position_ids(positions, self.chunk_size)
            else:
                self._layout = ChunkLayout.from_lengths([[length]] * batch, self.chunk_size)
            if self._has_2d_mask() and self._restarts_inside([row[0] if row else (0, 0) for row in self._layout.documents]):
                raise InPlaceTTTError(
                    "position_ids restart within a row while attention_mask is given, so attention sees one document and "
                    "TTT several; drop attention_mask for packed rows."
                )
        return self._layout

    def part(self) -> ChunkLayout:
        """The layout of this rank's tokens: all of it, unless ranks share the rows."""
        if self._part is None:
            layout, group = self.layout(), self.group
            self._part = layout if group is None else layout.part(dist.get_rank(group), dist.get_world_size(group))
        return self._part

    def _layout_across(self, group: ProcessGroup) -> ChunkLayout:
        positions = self._positions()
        if positions is None or self.cu_seqlens is not None or self._mask() is not None:
            raise InPlaceTTTError(
                "rows that ranks share show their documents by position_ids alone; pass these, without cu_seq_lens and padding masks."
            )
        return ChunkLayout.from_position_ids(gather_rows(positions, group), self.chunk_size)

    def spans(self) -> list[Span]:
        """For a forward with a cache: in each row, which of this forward's tokens are real (the rest is padding)."""
        if self._spans is None:
            batch, length = self.shape
            mask, attends = self._mask(), self._attends()
            if mask is not None:
                rows = ChunkLayout.from_attention_mask(mask, self.chunk_size).documents
                spans = [row[0] if row else (0, 0) for row in rows]
            elif attends is not None:
                # A compiled cache makes the mask 4-D; what is padding then shows in the positions that generation gives it.
                spans = [(self._first_real(row), length) if real else (0, 0) for row, real in enumerate(attends)]
            else:
                spans = [(0, length)] * batch
            if self.cu_seqlens is not None or self._restarts_inside(spans):
                raise InPlaceTTTError("several documents are packed in a row with a cache; pass use_cache=False for packed rows.")
            self._spans = spans
        return self._spans

    def _packed_by_cu_seqlens(self, cu_seqlens: Tensor, positions: Tensor | None) -> ChunkLayout:
        batch, length = self.shape
        if batch != 1:
            raise InPlaceTTTError(f"cu_seq_lens describe one packed row, the batch has {batch}; flatten it to one row.")
        if self._has_2d_mask():
            raise InPlaceTTTError(
                "cu_seq_lens are given with attention_mask, under which attention sees one document; drop attention_mask."
            )
        if positions is None:
            raise InPlaceTTTError("cu_seq_lens are given without position_ids, which attention needs to see the documents; pass both.")
        layout = ChunkLayout.from_cu_seqlens(cu_seqlens, self.chunk_size, length)
        if ChunkLayout.from_position_ids(positions, self.chunk_size).documents != layout.documents:
            raise InPlaceTTTError("cu_seq_lens and position_ids disagree on where documents start; derive both from one source.")
        return layout

    def _has_2d_mask(self) -> bool:
        return isinstance(self.attention_mask, Tensor) and self.attention_mask.dim() == 2

    def _restarts_inside(self, spans: list[Span]) -> bool:
        """Whether positions break off within a row's span, as they do where packed documents meet."""
        positions = self._positions()
        if positions is None or self.shape[1] == 1:
            return False
        breaks = positions.diff(dim=-1) != 1
        return any(bool(breaks[row, start : stop - 1].any()) for row, (start, stop) in enumerate(spans) if stop - start > 1)

    def _first_real(self, row: int) -> int:
        """The first token of a left-padded row, whose padding stands at one position."""
        positions = self._positions()
        if positions is None or self.shape[1] == 1:
            return 0
        breaks = (positions[row].diff() != 1).nonzero()
        return int(breaks[-1]) + 1 if len(breaks) else 0


class ForwardTracker:
    """The hooks of one converted model, as methods of one object so that a deep copy of the model keeps its own."""

    def __init__(self, base: nn.Module, chunk_size: int, layers: list[int]) -> None:
        self.chunk_size, self.layers = chunk_size, frozenset(layers)
        self.enabled = True
        self.group: ProcessGroup | None = None
        self.current: ForwardContext | None = None
        self.handles: list[RemovableHandle] = []
        parameters = inspect.signature(type(base).forward).parameters
        self.names = [name for name in parameters if name != "self"]
        self.travels = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def attach(self, base: nn.Module, first_block: nn.Module, other_attentions: Iterable[nn.Module]) -> None:
        """Register the hooks of the base model, its first decoder layer, and the attentions of layers without TTT."""
        self.handles = [
            base.register_forward_pre_hook(self.open, with_kwargs=True),
            base.register_forward_hook(self.close, always_call=True),
            first_block.register_forward_pre_hook(self.take_embeddings, with_kwargs=True),
            *(attention.register_forward_pre_hook(self.discard, with_kwargs=True) for attention in other_attentions),
        ]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def open(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Base model, before its forward."""
        if self.enabled and kwargs.get("cache") is not None:
            raise InPlaceTTTError(
                f"a {type(kwargs['cache']).__name__} (continuous batching, generate_batch) has no place for the fast weight; "
                "use generate, or ttt_disabled(model)."
            )
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        self.current = ForwardContext(
            self.chunk_size,
            self.enabled,
            given.get("attention_mask"),
            given.get("position_ids"),
            given.get("cu_seq_lens_q"),
            past=0 if cache is None else int(cache.get_seq_length()),
            group=self.group or (ulysses_group() if base.training else None),
        )
        return (args, {**kwargs, _KEY: self.current}) if self.travels else None

    def take_embeddings(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """First decoder layer, before its forward (a recomputation finds the embeddings there already)."""
        if self.current is not None:
            self.current.embeddings = args[0] if args else kwargs["hidden_states"]

    def context_for(self, attention: nn.Module, kwargs: dict[str, Any]) -> ForwardContext | None:
        """The context that travelled to this attention, removed from its arguments; else the open one."""
        context = kwargs.pop(_KEY, None) or self.current
        if context is None and torch.is_grad_enabled() and attention.training:
            raise InPlaceTTTError(
                f"{type(attention).__name__} is recomputed without the arguments of its forward, since this model family "
                "does not pass keyword arguments on; turn gradient checkpointing off for it."
            )
        return context

    def discard(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Attention of a layer without TTT: it must not meet an argument that is not its own."""
        kwargs.pop(_KEY, None)
        return args, kwargs

    def close(self, base: nn.Module, args: Any, output: Any) -> None:
        """Base model, after its forward: every TTT layer must have run. After one that broke off, nothing is left armed."""
        context, self.current = self.current, None
        if context is None or not context.enabled:
            return
        if output is None:
            context.calls.clear()
            context.embeddings = None
        elif missed := sorted(self.layers - context.called):
            raise InPlaceTTTError(
                f"the TTT down-projections of layers {missed} did not run in this forward: something replaced their MLP's "
                "forward; undo that, or exclude these layers."
            )
