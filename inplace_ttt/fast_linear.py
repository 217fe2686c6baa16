"""The down-projection as a fast weight.

`FastWeight` is mixed into the class of an existing down-projection (`nn.Linear`, GPT-2's `Conv1D`, a LoRA or 4-bit
linear), whose weight stays W0 under its own name. All it adds is the submodule `ttt` with the new parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from .config import InPlaceTTTConfig
from .context import ForwardContext, ForwardTracker
from .errors import InPlaceTTTError
from .families import DecoderLayer, features
from .layout import ChunkLayout
from .ops import fast_weight, state_dtype
from .state import skip, stream_of
from .target import TargetGenerator


@dataclass
class _Call:
    """What the hooks brought for one call of the layer."""

    context: ForwardContext
    cache: Any


class FastWeightSlot:
    """A TTT layer's settings, and the hooks that arm it for its one call in each forward."""

    def __init__(self, layer: int, position: int, config: InPlaceTTTConfig, tracker: ForwardTracker) -> None:
        self.layer, self.config, self.tracker = layer, config, tracker
        self.eta = config.eta_of(position)
        self._call: _Call | None = None
        self._mlp_input: Tensor | None = None
        self.handles: list[RemovableHandle] = []

    def on_attention(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Attention, before its forward: the context and the cache of this forward."""
        context = self.tracker.context_for(attention, kwargs)
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        self._call = None if context is None else _Call(context, cache)
        if context is None:
            skip(cache, self.layer)
        return args, kwargs

    def on_mlp(self, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """MLP, before its forward: the source of the `hidden_states` target."""
        self._mlp_input = args[0] if args else kwargs["hidden_states"]

    def claim(self, z: Tensor) -> _Call:
        """The armed call, once; raises when this call is not the one call of a forward over all its rows."""
        call, self._call = self._call, None
        if call is None:
            raise InPlaceTTTError(
                f"layer {self.layer}'s down-projection was called outside a forward of the model, or twice in one (a tiled or "
                "replaced MLP?); undo that, or call it under ttt_disabled(model)."
            )
        if tuple(z.shape[:-1]) != call.context.shape:
            raise InPlaceTTTError(
                f"layer {self.layer}'s down-projection got rows {list(z.shape[:-1])} of a sequence of {list(call.context.shape)}: "
                "the MLP is tiled or flattened, or the sequence is split across devices; TTT needs whole sequences."
            )
        call.context.called.add(self.layer)
        return call

    def source(self, call: _Call) -> Tensor:
        """X of the target [B, T, d]."""
        x, self._mlp_input = self._mlp_input, None
        if self.config.target == "embeddings":
            x = call.context.embeddings
        assert x is not None
        return x.detach() if self.config.detach_target else x


class FastWeight(nn.Module):
    """Mixin over a linear map's own class: its forward, plus the fast weight."""

    ttt: TargetGenerator
    fast: FastWeightSlot

    def forward(self, z: Tensor) -> Tensor:
        """[B, T, h] -> [B, T, d]."""
        if not self.fast.tracker.enabled:
            return super().forward(z)
        call = self.fast.claim(z)
        x = self.fast.source(call)
        stream = None
        if call.cache is not None:
            stream = stream_of(call.cache, self.fast.layer, z.shape[0], self.chunk_size)
        if stream is None or self._needs_gradient(z, x):
            if stream is not None:
                stream.abandon()
            return self._read_whole(z, x, call.context.layout())
        return stream.advance(super().forward(z), z, x, call.context.spans(), self)

    def _read_whole(self, z: Tensor, x: Tensor, layout: ChunkLayout) -> Tensor:
        if not (self.training or layout.writes()):
            return super().forward(z)
        v, w0 = self.ttt(x, layout), self.matrix()
        if w0 is not None and w0.dtype == z.dtype == v.dtype == state_dtype(z.dtype):
            out = fast_weight(z, v, w0, eta=self.eta, layout=layout, clip=self.tau())
            bias = getattr(self, "bias", None)
            return out if bias is None else out + bias
        base = super().forward(z)
        return base + fast_weight(z, v.to(z.dtype), None, eta=self.eta, layout=layout, clip=self.tau()).to(base.dtype)

    def _needs_gradient(self, z: Tensor, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (z.requires_grad or x.requires_grad or any(p.requires_grad for p in self.parameters()))

    def matrix(self) -> Tensor | None:
        """W0 as [d, h] where this is a plain linear map; None for a quantised or wrapped one."""
        return None

    @property
    def chunk_size(self) -> int:
        return self.fast.config.chunk_size

    @property
    def eta(self) -> float:
        return self.fast.eta

    @property
    def decode_updates(self) -> bool:
        return self.fast.config.decode_updates

    def tau(self) -> float | Tensor | None:
        """The bound on a chunk's delta that holds in this mode, or None."""
        clip = self.fast.config.clip
        if clip is None or (self.training and clip.when == "inference"):
            return None
        if not clip.relative:
            return clip.tau
        w0 = self.matrix()
        if w0 is None:
            raise InPlaceTTTError(f"a relative clip needs ‖W0‖, which {type(self).__name__} does not show; use an absolute tau.")
        return clip.tau * torch.linalg.vector_norm(w0.detach(), dtype=state_dtype(w0.dtype))

    def delta(self, z: Tensor, x: Tensor) -> Tensor:
        """c VᵀZ [d, h] of one complete chunk: keys [C, h] and target source [C, d]."""
        layout = ChunkLayout.from_lengths([[len(z)]], len(z))
        v = self.ttt(x[None], layout).to(z.dtype)
        _, state = fast_weight(z[None], v, None, eta=self.eta, layout=layout, clip=self.tau(), return_state=True)
        return state[0]


class FastWeightLinear(FastWeight, nn.Linear):
    """A fast-weight `nn.Linear`."""

    def matrix(self) -> Tensor | None:
        return self.weight


class FastWeightConv1D(FastWeight, Conv1D):
    """A fast-weight `Conv1D`, which keeps its weight as [h, d]."""

    weight: nn.Parameter

    def matrix(self) -> Tensor | None:
        return self.weight.T


_PLAIN: dict[type, type[FastWeight]] = {nn.Linear: FastWeightLinear, Conv1D: FastWeightConv1D}


def install(parts: DecoderLayer, slot: FastWeightSlot, *, dtype: torch.dtype, std: float, seed: int) -> None:
    """Make a decoder layer's down-projection a fast weight, in place, and hook its attention and MLP to it."""
    down = parts.down_proj
    if isinstance(down, FastWeight):
        raise InPlaceTTTError(f"{parts.down_proj_path} is a fast weight already; revert(model) first.")
    d = features(down)[1]
    weight = next(down.parameters())
    config = slot.config
    target = TargetGenerator(d, config.kernel_size, config.conv, device=weight.device, dtype=dtype)
    if weight.device.type != "meta":
        target.reset_parameters(std, seed)
    plain = type(down)
    down.__class__ = _PLAIN.get(plain) or type(f"FastWeight{plain.__name__}", (FastWeight, plain), {})
    down.ttt, down.fast = target, slot  # type: ignore[assignment]
    handles = [parts.attention.register_forward_pre_hook(slot.on_attention, with_kwargs=True)]
    if config.target == "hidden_states":
        handles.append(parts.mlp.register_forward_pre_hook(slot.on_mlp, with_kwargs=True))
    slot.handles = handles


def remove(down: FastWeight) -> None:
    """Undo `install`: the plain module again, its weight untouched."""
    for handle in down.fast.handles:
        handle.remove()
    del down.ttt, down.fast
    down.__class__ = type(down).__mro__[2]
