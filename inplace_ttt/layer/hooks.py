"""How a TTT layer learns of the forward it runs in: hooks that hand it over, stop by stop.

    base model      opens a `ForwardContext` and puts it into the keyword arguments
    first layer     adds the embeddings to it
    attention i     takes the context and the cache out of its arguments and arms the one `LayerCall` of layer
    i MLP i           adds its input to that call, if the target wants it down-proj. i    takes the armed
    call, once base model      closes: every TTT layer must have run

The context travels with the arguments, so that the recomputation of gradient checkpointing meets the context
of its own forward, however many forwards came in between. What is open and what is armed belongs to the
thread that runs the forward.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from ..errors import InPlaceTTTError
from ..families import cache_in
from .cache import skip
from .forward_context import ForwardContext
from .learning import warn_if_nothing_learns
from .overrides import overriding
from .per_thread import this_thread
from .sequence_parallel import ulysses_group

_KEY = "inplace_ttt_context"


@dataclass
class LayerCall:
    """What a TTT layer is handed for its one call in a forward: the cache, and the MLP's input if the target
    wants it."""

    layer: LayerHooks
    context: ForwardContext
    cache: Any
    mlp_input: Tensor | None = None


@contextmanager
def switching(models: Iterable[ModelHooks], enabled: bool) -> Iterator[None]:
    """Within it TTT of these models is on or off, for the thread that says so."""
    with overriding([this_thread()], switched={**this_thread().switched, **dict.fromkeys(models, enabled)}):
        yield


@contextmanager
def sharing(models: Iterable[ModelHooks], group: ProcessGroup | None) -> Iterator[None]:
    """Within it the ranks of `group`, or none, share the rows of these models' forwards, for the thread that
    says so."""
    with overriding([this_thread()], groups={**this_thread().groups, **dict.fromkeys(models, group)}):
        yield


class ModelHooks:
    """The hooks of one converted model, as methods of one object so that a deep copy of the model keeps its
    own."""

    def __init__(self, base: nn.Module, layers: list[int]) -> None:
        self.layers = frozenset(layers)
        self.handles: list[RemovableHandle] = []
        self.has_trained = False
        parameters = inspect.signature(type(base).forward).parameters
        self.names = [name for name in parameters if name != "self"]
        self.travels = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def attach(self, base: nn.Module, first_block: nn.Module, other_attentions: Iterable[nn.Module]) -> None:
        """Register the hooks of the base model, its first decoder layer, and the attentions of layers without
        TTT."""
        self.handles = [
            base.register_forward_pre_hook(self.open, with_kwargs=True),
            base.register_forward_hook(self.close, always_call=True),
            first_block.register_forward_pre_hook(self.take_embeddings, with_kwargs=True),
            *(
                attention.register_forward_pre_hook(self.discard, with_kwargs=True)
                for attention in other_attentions
            ),
        ]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def enabled(self) -> bool:
        """Whether TTT is on in this thread."""
        return this_thread().switched.get(self, True)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the rows of forwards in this thread, where it names them."""
        return this_thread().groups.get(self)

    @property
    def current(self) -> ForwardContext | None:
        """The context of this model's forward in this thread."""
        context = this_thread().open
        return context if context is not None and context.owner is self else None

    def open(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Base model, before its forward."""
        if (
            base.training
            and not self.has_trained
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            self.has_trained = True
            warn_if_nothing_learns(base)
        cache = cache_in(kwargs)
        if self.enabled and cache is not None and not isinstance(cache, Cache):
            raise InPlaceTTTError(
                f"a {type(cache).__name__} (continuous batching, generate_batch) has no place for the fast "
                "weight; "
                "use generate, or disable_ttt(model)."
            )
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        group = self.group or (ulysses_group() if base.training else None)
        context = ForwardContext(given, owner=self, enabled=self.enabled, group=group, outer=_around())
        this_thread().open = context
        return (args, {**kwargs, _KEY: context}) if self.travels else None

    def take_embeddings(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """First decoder layer, before its forward (a recomputation finds the embeddings there already)."""
        if self.current is not None:
            self.current.take_embeddings(args[0] if args else kwargs["hidden_states"])

    def context_for(self, attention: nn.Module, kwargs: dict[str, Any]) -> ForwardContext | None:
        """The context that travelled to this attention, removed from its arguments; else the open one."""
        context = kwargs.pop(_KEY, None) or self.current
        if context is None and torch.is_grad_enabled() and attention.training:
            raise InPlaceTTTError(
                f"{type(attention).__name__} is recomputed without the arguments of its forward, since "
                "this model family "
                "does not pass keyword arguments on; turn gradient checkpointing off for it."
            )
        return context

    def discard(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Attention of a layer without TTT: it must not meet an argument that is not its own."""
        kwargs.pop(_KEY, None)
        return args, kwargs

    def close(self, base: PreTrainedModel, args: Any, output: Any) -> None:
        """Base model, after its forward: every TTT layer must have run, up to the last that it was to run (it
        may exit early).

        After a forward that broke off, nothing is left armed.
        """
        context = self.current
        if context is None:
            return
        this_thread().open = context.outer
        this_thread().armed = None
        if output is None:
            context.embeddings = None
        elif context.enabled and (
            missed := sorted(i for i in self.layers - context.called if i < base.config.num_hidden_layers)
        ):
            raise InPlaceTTTError(
                f"the TTT down-projections of layers {missed} did not run in this forward: something "
                "replaced their MLP's "
                "forward; undo that, or exclude these layers."
            )


def _around() -> ForwardContext | None:
    """The context of the forward around the one that opens.

    What a KeyboardInterrupt left open, of which torch tells no hook, is dropped: it lies above all that is on
    the stack.
    """
    contexts, context = [], this_thread().open
    if context is None or torch.compiler.is_compiling():
        return context
    while context is not None:
        contexts.append(context)
        context = context.outer
    around = _calls_under_way() - 1
    return next(iter(contexts[max(len(contexts) - around, 0) :]), None)


def _calls_under_way() -> int:
    """How many calls of converted models' bases are on this thread's stack."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            hooks = frame.f_locals["self"]._forward_pre_hooks.values()
            calls += any(getattr(hook, "__func__", None) is ModelHooks.open for hook in hooks)
        frame = frame.f_back
    return calls


class LayerHooks:
    """The hooks of one TTT layer, and the call that they arm."""

    def __init__(self, index: int, model: ModelHooks) -> None:
        self.index, self.model = index, model
        self.handles: list[RemovableHandle] = []

    def attach(self, attention: nn.Module, mlp: nn.Module | None) -> None:
        """Hook the layer's attention, and its MLP where the target's source is the MLP's input."""
        self.handles = [attention.register_forward_pre_hook(self.arm, with_kwargs=True)]
        if mlp is not None:
            self.handles.append(mlp.register_forward_pre_hook(self.take_mlp_input, with_kwargs=True))

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def arm(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Attention, before its forward: the context and the cache of this forward."""
        context = self.model.context_for(attention, kwargs)
        cache = cache_in(kwargs)
        this_thread().armed = None if context is None else LayerCall(self, context, cache)
        if context is None or not context.enabled:
            skip(cache, self.index)
        return args, kwargs

    def take_mlp_input(self, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """MLP, before its forward: the source of the `hidden_states` target."""
        call = this_thread().armed
        if call is not None and call.layer is self:
            call.mlp_input = args[0] if args else kwargs["hidden_states"]

    @property
    def has_cache(self) -> bool:
        """Whether the call that is armed reads into a cache."""
        call = this_thread().armed
        return call is not None and call.cache is not None

    def claim(self, z: Tensor) -> LayerCall | None:
        """The armed call for z [B, T, h] or [B T, h], once, or None when TTT is off.

        Raises InPlaceTTTError when this is not the one call of a forward over all its rows.
        """
        call = this_thread().armed
        if call is not None and call.layer is not self:
            call = None
        if call is not None:
            this_thread().armed = None
        if not (self.model.enabled if call is None else call.context.enabled):
            return None
        if call is None:
            raise InPlaceTTTError(
                f"layer {self.index}'s down-projection was called outside a forward of the model, or twice "
                "in one (a tiled or "
                "replaced MLP?); undo that, or call it under disable_ttt(model)."
            )
        if tuple(z.shape[:-1]) not in (call.context.shape, (math.prod(call.context.shape),)):
            raise InPlaceTTTError(
                f"layer {self.index}'s down-projection got rows {list(z.shape[:-1])} of a sequence of "
                f"{list(call.context.shape)}: "
                "the MLP is tiled or flattened, or the sequence is split across devices; TTT needs whole "
                "sequences."
            )
        # a recomputation comes when the forward is over
        if self.index in call.context.called and call.context is self.model.current:
            raise InPlaceTTTError(
                f"layer {self.index} runs several times in one forward, as in a model that loops over "
                "layers, and would write a token as "
                "often; convert layers outside of the loop."
            )
        call.context.called.add(self.index)
        return call
