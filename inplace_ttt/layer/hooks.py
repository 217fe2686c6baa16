"""Hooks that pass the context of a forward to its TTT layers.

    base model      creates a `ForwardContext` and adds it to the keyword arguments.
    first layer     adds the embeddings to the context.
    attention i     takes the context and the cache from its arguments, and creates layer i's `LayerCall`.
    MLP i           adds its input to that call, if it is the target source.
    down-proj. i    claims the call, once.
    base model      checks that every TTT layer has run.

The context is passed with the arguments. So a recomputation by gradient checkpointing receives the context of
its own forward, even if other forwards ran since. The open context and the unclaimed call belong to the
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
from .cache import known_stream, skip
from .forward_context import ForwardContext
from .learning import warn_if_nothing_learns
from .overrides import overriding
from .per_thread import this_thread
from .sequence_parallel import ulysses_group

_KEY = "inplace_ttt_context"


@dataclass
class LayerCall:
    """The arguments of a TTT layer's single call in a forward.

    Attributes:
        layer: the hooks of the layer.
        context: the context of the forward.
        cache: the cache of the forward, or None.
        mlp_input: the MLP's input [B, T, d], if it is the target source.
    """

    layer: LayerHooks
    context: ForwardContext
    cache: Any
    mlp_input: Tensor | None = None

    @property
    def decoder(self) -> Any:
        """The `graph_ops.Decoder` by which a graph reads the call's single tokens, or None.

        Only a static cache has one, after a forward outside of graphs.
        """
        can = self.context.enabled and self.context.group is None and self.context.shape[1] == 1
        stream = known_stream(self.cache, self.layer.index) if can and not torch.is_grad_enabled() else None
        return None if stream is None else stream.decoder


@contextmanager
def switching(models: Iterable[ModelHooks], enabled: bool) -> Iterator[None]:
    """Returns a context in which TTT of these models is on or off, in the current thread."""
    with overriding([this_thread()], switched={**this_thread().switched, **dict.fromkeys(models, enabled)}):
        yield


@contextmanager
def sharing(models: Iterable[ModelHooks], group: ProcessGroup | None) -> Iterator[None]:
    """Returns a context in which the ranks of `group` share the rows of these models' forwards.

    It applies to the current thread. With None, no ranks share rows.
    """
    with overriding([this_thread()], groups={**this_thread().groups, **dict.fromkeys(models, group)}):
        yield


class ModelHooks:
    """The hooks of one converted model.

    They are methods of one object, so a deep copy of the model has its own hooks.

    Args:
        base: the base model.
        layers: indices of the TTT layers.
    """

    def __init__(self, base: nn.Module, layers: list[int]) -> None:
        self.layers = frozenset(layers)
        self.handles: list[RemovableHandle] = []
        self.has_trained = False
        parameters = inspect.signature(type(base).forward).parameters
        self.names = [name for name in parameters if name != "self"]
        self.travels = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def attach(self, base: nn.Module, first_block: nn.Module, other_attentions: Iterable[nn.Module]) -> None:
        """Registers the hooks of the base model, its first decoder layer, and the other attentions.

        Args:
            base: the base model.
            first_block: its first decoder layer.
            other_attentions: the attentions of layers without TTT.
        """
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
        """True if TTT is on in this thread."""
        return this_thread().switched.get(self, True)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share rows, if this thread named them by `sharing`."""
        return this_thread().groups.get(self)

    @property
    def current(self) -> ForwardContext | None:
        """The context of this model's forward in this thread."""
        context = this_thread().open
        return context if context is not None and context.owner is self else None

    def open(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Creates the context before the base model's forward, and adds it to the keyword arguments."""
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
                f"a {type(cache).__name__} (continuous batching, generate_batch) cannot hold the fast "
                "weight; use generate, or disable_ttt(model)."
            )
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        group = self.group or (ulysses_group() if base.training else None)
        context = ForwardContext(given, owner=self, enabled=self.enabled, group=group, outer=_around())
        this_thread().open = context
        return (args, {**kwargs, _KEY: context}) if self.travels else None

    def take_embeddings(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stores the embeddings before the first decoder layer's forward.

        A recomputation finds the embeddings already in its context.
        """
        if self.current is not None:
            self.current.take_embeddings(args[0] if args else kwargs["hidden_states"])

    def context_for(self, attention: nn.Module, kwargs: dict[str, Any]) -> ForwardContext | None:
        """Removes the context from the attention's arguments and returns it.

        If the arguments lack a context, it returns the open one.
        """
        context = kwargs.pop(_KEY, None) or self.current
        if context is None and torch.is_grad_enabled() and attention.training:
            raise InPlaceTTTError(
                f"{type(attention).__name__} is recomputed without the arguments of its forward, since "
                "this model family "
                "does not pass keyword arguments on; turn gradient checkpointing off for it."
            )
        return context

    def discard(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Removes the context from the arguments of an attention without TTT, which may not accept it."""
        kwargs.pop(_KEY, None)
        return args, kwargs

    def close(self, base: PreTrainedModel, args: Any, output: Any) -> None:
        """Closes the context after the base model's forward, also if the forward failed.

        Raises:
            InPlaceTTTError: if a TTT layer did not run. With an early exit, which lowers `num_hidden_layers`,
                the layers beyond need not run.
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
    """Returns the context of the forward around the new one, if there is one.

    After a KeyboardInterrupt torch calls no hook, so contexts stay open. There are then more open contexts
    than calls on the stack. This function drops the surplus contexts.
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
    """Returns the number of calls of converted base models on this thread's stack."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            hooks = frame.f_locals["self"]._forward_pre_hooks.values()
            calls += any(getattr(hook, "__func__", None) is ModelHooks.open for hook in hooks)
        frame = frame.f_back
    return calls


class LayerHooks:
    """The hooks of one TTT layer. They create the layer's call."""

    def __init__(self, index: int, model: ModelHooks) -> None:
        self.index, self.model = index, model
        self.handles: list[RemovableHandle] = []

    def attach(self, attention: nn.Module, mlp: nn.Module | None) -> None:
        """Registers the hooks of the layer's attention and, if it is given, of the MLP.

        Args:
            attention: the layer's attention.
            mlp: the layer's MLP, if its input is the target source.
        """
        self.handles = [attention.register_forward_pre_hook(self.arm, with_kwargs=True)]
        if mlp is not None:
            self.handles.append(mlp.register_forward_pre_hook(self.take_mlp_input, with_kwargs=True))

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def arm(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Creates the layer's call before the attention's forward, from the forward's context and cache."""
        context = self.model.context_for(attention, kwargs)
        cache = cache_in(kwargs)
        this_thread().armed = None if context is None else LayerCall(self, context, cache)
        if context is None or not context.enabled:
            skip(cache, self.index)
        return args, kwargs

    def take_mlp_input(self, mlp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stores the MLP's input before its forward. It is the source of the target `hidden_states`."""
        call = this_thread().armed
        if call is not None and call.layer is self:
            call.mlp_input = args[0] if args else kwargs["hidden_states"]

    @property
    def unclaimed(self) -> LayerCall | None:
        """The call that no down-projection has claimed yet."""
        return this_thread().armed

    def claim(self, z: Tensor) -> LayerCall | None:
        """Returns the layer's call, and removes it; returns None if TTT is off.

        Args:
            z: the down-projection's input [B, T, h] or [B T, h].

        Raises:
            InPlaceTTTError: if the layer runs outside a forward, several times in a forward, or on a part of
                its rows.
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
        # a recomputation runs after the forward has closed its context, and is allowed
        if self.index in call.context.called and call.context is self.model.current:
            raise InPlaceTTTError(
                f"layer {self.index} runs several times in one forward, as in a model that loops over "
                "layers, and would write each token several times; convert layers outside of the loop."
            )
        call.context.called.add(self.index)
        return call
