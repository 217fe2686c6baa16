"""Sliding-window attention with sink tokens, for models whose attention can be replaced.

A model trained with full attention puts much of its attention on a document's first tokens (the sinks). A
plain window hides the sinks, and the model gets worse. In a measurement, any repair of this damage would look
like a gain from reading. So each token attends to the last `size` tokens, including itself, and to its
document's first `sinks` tokens.

A layer with its own window uses the smaller one of that window and `size`. It attends to no sinks, since it
was trained without them. Position ids are those of the whole text. Without a cache, the work per token grows
with the window and not with the length. With `window_cache`, so does the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .documents import document_starts
from .errors import InPlaceTTTError
from .families import attention_kinds
from .layer.sequence_parallel import ulysses_group

SINKS = 4


@contextmanager
def attention_window(model: PreTrainedModel, size: int | None, sinks: int = SINKS) -> Iterator[None]:
    """Sets an attention window on the model inside the `with` block.

    Args:
        model: any causal LM of transformers, also a converted one.
        size: tokens in the window, including the current one; None leaves the attention unchanged.
        sinks: the number of first tokens that every token attends to.

    Raises:
        InPlaceTTTError: if `size` or `sinks` are out of range, or the model's attention cannot be replaced.
    """
    if size is None:
        yield
        return
    with attention_by(model, model.config._attn_implementation):
        set_attention_window(model, size, sinks)
        yield


@contextmanager
def attention_by(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Sets the attention's implementation inside the `with` block, and afterwards the one before.

    Args:
        model: any model of transformers.
        implementation: name of the attention, for example `sdpa`. The model's config then decides what each
            token sees, and no window of `set_attention_window` applies.
    """
    before = model.config._attn_implementation
    if before != implementation:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def set_attention_window(model: PreTrainedModel, size: int, sinks: int = SINKS) -> None:
    """Sets an attention window on the model permanently.

    Gradients flow through the window's attention. In packed rows, `position_ids` separate the documents.

    Args:
        model: any causal LM of transformers, also a converted one.
        size: tokens in the window, including the current one.
        sinks: the number of first tokens that every token attends to.

    Raises:
        InPlaceTTTError: if `size` or `sinks` are out of range, or the model's attention cannot be replaced.
    """
    if size < 1 or sinks < 0 or sinks >= size:
        raise InPlaceTTTError(
            f"an attention window of {size} with {sinks} sink tokens does not exist; use a window of at "
            "least 1, and fewer sinks than that."
        )
    if unknown := set(attention_kinds(model.config.get_text_config())) - {
        "full_attention",
        "sliding_attention",
    }:
        raise InPlaceTTTError(
            f"{type(model).__name__} has layers of {min(unknown)}, which take no attention window; leave "
            "the window out."
        )
    name = f"window_{size}_{sinks}"
    AttentionInterface.register(name, _Window(size, sinks))
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise InPlaceTTTError(
            f"the attention of {type(model).__name__} cannot be replaced, so it takes no window."
        )


def window_cache(model: PreTrainedModel, size: int, sinks: int = SINKS) -> Cache:
    """Returns a cache for a model with an attention window of `size` and `sinks`.

    A layer keeps the first `sinks` and the last `size` - 1 tokens. A layer with its own window keeps no
    sinks.
    """
    text = model.config.get_text_config()
    own = getattr(text, "sliding_window", None)
    reach = {"full_attention": (size, sinks), "sliding_attention": (min(size, own or size), 0)}
    return Cache(layers=[WindowLayer(*reach[kind]) for kind in attention_kinds(text)])


def attention_reach(text: PreTrainedConfig, size: int | None) -> float:
    """Returns the widest attention window among the layers, in tokens, without sinks.

    It is infinite if a layer has full attention and `size` is None.

    Args:
        text: the config of the text decoder.
        size: the attention window set on the model, or None.
    """
    slides = getattr(text, "sliding_window", None) or math.inf
    own = max(slides if kind == "sliding_attention" else math.inf for kind in attention_kinds(text))
    return own if size is None else min(own, size)


class WindowLayer(DynamicSlidingWindowLayer):
    """A cache layer that drops the tokens between the sinks and the window."""

    keys: Tensor
    values: Tensor
    cumulative_length: int

    def __init__(self, size: int, sinks: int) -> None:
        super().__init__(sliding_window=size)
        self.sinks = sinks

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values, and returns the kept and the new ones [B, H, kept + new, D].

        Afterwards the layer keeps the tokens that the next forward may attend to. With `record_past` it keeps
        all tokens.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys, values = (
            torch.cat([self.keys, key_states], dim=-2),
            torch.cat([self.values, value_states], dim=-2),
        )
        self.keys, self.values = (
            (keys, values) if self.record_past else (self._kept(keys), self._kept(values))
        )
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last -`tokens_to_remove` tokens, and earlier tokens that the next forward cannot see.

        Raises:
            InPlaceTTTError: if the window would then need earlier tokens that are already dropped.
        """
        if not self.is_initialized:
            return
        left, back = max(self.cumulative_length + tokens_to_remove, 0), -tokens_to_remove
        if self.keys.shape[-2] - back < min(left, self._room):
            raise InPlaceTTTError(
                f"the last {back} tokens cannot be taken back: the cache has dropped the tokens of the "
                "attention window before them; call cache.activate_past_recording() before reading "
                "tokens that you may take back."
            )
        DynamicLayer.crop(self, tokens_to_remove)
        self.keys, self.values, self.cumulative_length = self._kept(self.keys), self._kept(self.values), left

    @property
    def _room(self) -> int:
        return self.sinks + self.sliding_window - 1

    def _kept(self, x: Tensor) -> Tensor:
        if x.shape[-2] <= self._room:
            return x
        recent = self.sliding_window - 1
        return torch.cat([x[:, :, : self.sinks], x[:, :, x.shape[-2] - recent :]], dim=-2)


def _no_mask(
    *args: Any,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """A mask function for transformers that makes no mask, since `_Window` builds its own.

    Raises InPlaceTTTError for padding, and for keys beyond the last query (a static cache).
    """
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise InPlaceTTTError(
            f"the attention window does not go with a static cache, which passes all its {kv_length} slots, "
            "also those not yet filled; use "
            "window_cache(model, size), or a DynamicCache."
        )
    if attention_mask is not None and not attention_mask.all():
        raise InPlaceTTTError(
            "the attention window does not go with padding; read rows of one length, or pack them."
        )


class _Window:
    """An attention function for transformers, with a window.

    It maps query [B, H, T, D], key and value [B, H_kv, S, D] to [B, T, H, D].
    """

    def __init__(self, size: int, sinks: int) -> None:
        self.size, self.sinks = size, sinks
        self._narrower: dict[int, _Window] = {}
        """The attention functions of layers with their own window, by the size of that window."""
        # the last argument of `_is_packed`, its version, and the result
        self._asked: tuple[Tensor, int, bool] | None = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or ulysses_group() is not None:
            what = "a mask of its own" if attention_mask is not None else "ranks that share rows"
            raise InPlaceTTTError(f"the attention window does not go with {what}; leave one of them out.")
        if (own := kwargs.pop("sliding_window", None)) is not None:
            narrower = self._narrower.setdefault(own, _Window(min(self.size, own), 0))
            return narrower(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        if unknown := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]:
            raise InPlaceTTTError(
                f"the attention window does not support {unknown[0]}, which {type(module).__name__} uses; "
                "leave the window out."
            )
        length, positions = query.shape[2], kwargs.get("position_ids")
        settings: dict[str, Any] = {"dropout_p": dropout if module.training else 0.0, "scale": scaling}
        packed = positions is not None and length > 1 and self._is_packed(positions)
        if length == key.shape[2] and not packed and length > 2 * self.size:
            return self._in_blocks(query, key, value, settings).transpose(1, 2).contiguous(), None
        mask = (
            self._packed_mask(positions)
            if packed and positions is not None
            else self._cached_mask(length, key.shape[2], query.device)
        )
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, **settings)
        return out.transpose(1, 2).contiguous(), None

    def _is_packed(self, positions: Tensor) -> bool:
        """Returns True if rows hold several documents.

        The result needs a synchronization with the device, so the layers of a forward share it.
        """
        # the result is reused for the same version of the tensor; inference tensors lack one
        version = -1 if positions.is_inference() else positions._version
        asked = self._asked  # read once, since another thread may replace it in between
        if asked is None or asked[0] is not positions or asked[1] != version or version < 0:
            asked = self._asked = positions, version, bool(document_starts(positions)[:, 1:].any())
        return asked[2]

    def _sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns True where the token at index `query` of a document attends to the token at index `key`."""
        return (key <= query) & ((query - key < self.size) | (key < self.sinks))

    def _cached_mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Returns the mask [queries, keys]. The keys are the kept first tokens, then the tokens up to the
        last
        query."""
        index = torch.arange(keys, device=device)
        distance = index[keys - queries :, None] - index
        return (distance >= 0) & ((distance < self.size) | (index < self.sinks))

    def _packed_mask(self, positions: Tensor) -> Tensor:
        """Returns the mask [B, 1, T, T] of packed rows, whose documents `document_starts` finds."""
        starts = document_starts(positions)
        index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        begin = torch.where(starts, index, 0).cummax(dim=-1).values
        within = index - begin
        same = begin[:, :, None] == begin[:, None, :]
        return (same & self._sees(within[:, :, None], within[:, None, :]))[:, None]

    def _in_blocks(self, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        """Computes attention in blocks of `size` queries.

        Each block attends to itself, the block before it, and the sinks. All groups of heads share one mask.
        """
        (batch, heads, length, dim), groups, size = query.shape, key.shape[1], self.size
        blocks = -(-length // size)
        query, key, value = (pad(x, (0, 0, 0, blocks * size - length)) for x in (query, key, value))
        start = torch.arange(blocks, device=query.device)[:, None] * size
        asking = start + torch.arange(size, device=query.device)
        near = start + torch.arange(-size, size, device=query.device)
        first = torch.arange(self.sinks, device=query.device).expand(blocks, -1)
        seen = (near >= self.sinks)[:, None, :] & self._sees(asking[:, :, None], near[:, None, :])
        # the sinks are the first keys, and `near` leaves them out
        mask = torch.cat([first[:, None, :] <= asking[:, :, None], seen], dim=-1)
        together = heads // groups
        asks = (
            query.view(batch, groups, together, blocks, size, dim)
            .transpose(2, 3)
            .reshape(batch * groups, blocks, -1, dim)
        )
        keys, values = (self._context(x.flatten(0, 1), blocks) for x in (key, value))
        out = scaled_dot_product_attention(
            asks, keys, values, attn_mask=mask.repeat(1, together, 1)[None], **settings
        )
        out = (
            out.view(batch, groups, blocks, together, size, dim)
            .transpose(2, 3)
            .reshape(batch, heads, blocks * size, dim)
        )
        return out[:, :, :length]

    def _context(self, x: Tensor, blocks: int) -> Tensor:
        """Returns the keys or values that each block attends to, [B, blocks, sinks + 2 size, D].

        Args:
            x: all keys or values [B, T, D].
        """
        own = x.unflatten(1, (blocks, self.size))
        before = pad(own, (0, 0, 0, 0, 1, 0))[:, :-1]
        sinks = x[:, None, : self.sinks].expand(-1, blocks, -1, -1)
        return torch.cat([sinks, before, own], dim=2)
