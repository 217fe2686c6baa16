"""The down-projection as a fast weight.

`FastWeight` is mixed into the class of an existing down-projection (`nn.Linear`, GPT-2's `Conv1D`, a LoRA or 4-bit
linear), whose weight stays W0 under its own name. All it adds is the submodule `ttt` with the new parameters.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..families import DecoderLayer, features
from ..layout import ChunkLayout
from ..ops import fast_weight, state_dtype, takes_weight
from ..ops.scan import fast_weight_across_ranks
from .cache import skip, stream_of
from .forward_context import ForwardContext, ForwardTracker, LayerCall
from .target import TargetGenerator
from .whitened_keys import WhitenedKeys
from .zero3 import gathered


class FastWeightSlot:
    """A TTT layer's settings, and the hooks that arm it for its one call in each forward."""

    def __init__(self, layer: int, position: int, config: InPlaceTTTConfig, tracker: ForwardTracker) -> None:
        self.layer, self.config, self.tracker = layer, config, tracker
        self.eta = config.eta_of(position)
        self.observer: Callable[[FastWeight, Tensor, Tensor, ForwardContext], None] | None = None  # sees keys and targets of each read
        self.handles: list[RemovableHandle] = []
        self._context: ForwardContext | None = None

    def on_attention(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Attention, before its forward: the context and the cache of this forward."""
        self._context = context = self.tracker.context_for(attention, kwargs)
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        if context is not None and context.enabled:
            context.calls[self.layer] = LayerCall(cache)
        else:
            skip(cache, self.layer)
        return args, kwargs

    def on_mlp(self, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """MLP, before its forward: the source of the `hidden_states` target."""
        if self._context is not None and self.layer in self._context.calls:
            self._context.calls[self.layer].mlp_input = args[0] if args else kwargs["hidden_states"]

    def claim(self, z: Tensor) -> tuple[ForwardContext, LayerCall] | None:
        """The armed call, once, or None when TTT is off; raises when this is not the one call of a forward over all its rows."""
        context, self._context = self._context, None
        if not (self.tracker.enabled if context is None else context.enabled):
            return None
        call = None if context is None else context.calls.pop(self.layer, None)
        if context is None or call is None:
            raise InPlaceTTTError(
                f"layer {self.layer}'s down-projection was called outside a forward of the model, or twice in one (a tiled or "
                "replaced MLP?); undo that, or call it under ttt_disabled(model)."
            )
        if tuple(z.shape[:-1]) != context.shape:
            raise InPlaceTTTError(
                f"layer {self.layer}'s down-projection got rows {list(z.shape[:-1])} of a sequence of {list(context.shape)}: "
                "the MLP is tiled or flattened, or the sequence is split across devices; TTT needs whole sequences."
            )
        context.called.add(self.layer)
        return context, call


class FastWeight(nn.Module):
    """Mixin over a linear map's own class: its forward, plus the fast weight."""

    ttt: TargetGenerator
    fast: FastWeightSlot

    def forward(self, z: Tensor) -> Tensor:
        """[B, T, h] -> [B, T, d]."""
        claimed = self.fast.claim(z)
        if claimed is None:
            return super().forward(z)
        context, call = claimed
        x = self._source(context, call)
        if call.cache is None:
            return self._read_whole(z, x, context)
        if context.group is not None:
            raise InPlaceTTTError("a cache cannot be shared by the ranks of a sequence; pass use_cache=False.")
        stream = stream_of(call.cache, self.fast.layer, z.shape[0], self.chunk_size)
        if not self._needs_gradient(z, x):
            return stream.advance(super().forward(z), self.keys(z), x, context.spans(), self)
        context.spans()  # with a cache, attention sees one document a row: refuse packed ones
        stream.abandon()
        return self._read_whole(z, x, context)

    def _source(self, context: ForwardContext, call: LayerCall) -> Tensor:
        """X of the target [B, T, d]."""
        assert context.embeddings is not None
        if self.training and context.with_gradient and not torch.is_grad_enabled():
            raise InPlaceTTTError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the targets; enable it with "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        x = context.embeddings if self.fast.config.target == "embeddings" else call.mlp_input
        assert x is not None
        return x.detach() if self.fast.config.detach_target else x

    def _read_whole(self, z: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        if not (self.training or context.layout().writes()):
            return super().forward(z)
        v, w0 = self.ttt(x, context.part()), self.matrix()
        if self.ttt.keys is None and w0 is not None and w0.dtype == z.dtype == v.dtype and takes_weight(z):
            out = self._fast(z, v, w0, context)
            bias = getattr(self, "bias", None)
            return out if bias is None else out + bias
        base = super().forward(z)
        return base + self._fast(self.keys(z), v.to(z.dtype), None, context).to(base.dtype)

    def keys(self, z: Tensor) -> Tensor:
        """What is written under and read with [..., h]: z itself (the paper), or z whitened."""
        return z if self.ttt.keys is None else self.ttt.keys(z)

    def _fast(self, z: Tensor, v: Tensor, w0: Tensor | None, context: ForwardContext) -> Tensor:
        if self.fast.observer is not None:
            self.fast.observer(self, z, v, context)
        damping = self.fast.config.damping
        if context.group is None:
            return fast_weight(z, v, w0, eta=self.eta, layout=context.layout(), clip=self.tau(), damping=damping)
        if damping is not None:
            raise InPlaceTTTError(
                "error-correcting writes are no sum that ranks could share; leave damping out, or give each rank whole rows."
            )
        return fast_weight_across_ranks(z, v, w0, eta=self.eta, layout=context.layout(), group=context.group, clip=self.tau())

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

    def write(self, z: Tensor, x: Tensor, state: Tensor | None) -> Tensor:
        """The state [d, h] after one complete chunk: keys [C, h], target source [C, d], and the state before (None: zero)."""
        is_sum = self.fast.config.damping is None  # which goes on without what it has
        known = None if state is None or is_sum else state[None]
        after = self.read_and_write(z[None], x[None], ChunkLayout.from_lengths([[len(z)]], len(z)), known)[1][0]
        return state + after if is_sum and state is not None else after

    def read_and_write(self, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """η Z Sᵀ [B, T, d] and the states [B, d, h] after complete chunks: keys [B, T, h], target source [B, T, d]; as `write`."""
        settings: dict[str, Any] = {"eta": self.eta, "layout": layout, "clip": self.tau(), "damping": self.fast.config.damping}
        return fast_weight(z, self.ttt(x, layout).to(z.dtype), None, initial_state=state, return_state=True, **settings)


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


def check(parts: DecoderLayer) -> None:
    """Refuse a down-projection that cannot become a fast weight; done for all layers before the first is touched."""
    down = parts.down_proj
    features(down)
    if hasattr(down, "_hf_hook") and any(p.device.type == "meta" for p in down.parameters()):
        raise InPlaceTTTError(f"{parts.down_proj_path} is offloaded, so that the new parameters have no place; convert before offloading.")
    if "forward" in down.__dict__ and "_old_forward" not in down.__dict__:
        raise InPlaceTTTError(f"something replaced the forward of {parts.down_proj_path}, which the fast weight would bypass; undo that.")


def install(parts: DecoderLayer, slot: FastWeightSlot, *, dtype: torch.dtype, std: float, seed: int) -> None:
    """Make a decoder layer's down-projection a fast weight, in place, and hook its attention and MLP to it."""
    down, config = parts.down_proj, slot.config
    weight = next(down.parameters())
    (width, dim), factory = features(down), {"device": weight.device, "dtype": dtype}
    keys = None if config.whitening is None else WhitenedKeys(width, config.whitening.rank, **factory)
    target = TargetGenerator(
        dim,
        config.kernel_size,
        config.conv,
        standardised=config.standardised,
        calibrated_proj=config.calibrated_proj,
        keys=keys,
        **factory,
    )
    if weight.device.type != "meta":
        with gathered(target.parameters()):
            target.reset_parameters(std, seed)
    plain = type(down)
    _become(down, _PLAIN.get(plain) or type(f"FastWeight{plain.__name__}", (FastWeight, plain), {}))
    down.ttt, down.fast = target, slot  # type: ignore[assignment]
    slot.handles = [parts.attention.register_forward_pre_hook(slot.on_attention, with_kwargs=True)]
    if config.target == "hidden_states":
        slot.handles.append(parts.mlp.register_forward_pre_hook(slot.on_mlp, with_kwargs=True))


def remove(down: FastWeight) -> None:
    """Undo `install`: the plain module again, its weight untouched."""
    for handle in down.fast.handles:
        handle.remove()
    del down.ttt, down.fast
    _become(down, type(down).__mro__[2])


def _become(module: nn.Module, new: type[nn.Module]) -> None:
    """Change a module's class in place, also under the hook that accelerate puts around its forward."""
    module.__class__ = new
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(new.forward, module)  # type: ignore[assignment]
