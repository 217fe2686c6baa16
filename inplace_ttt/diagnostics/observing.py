"""Observes the fast-weight reads of a forward pass, and measures the pass's writes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..layer.fast_linear import FastWeight
from ..layer.forward_context import ForwardContext
from ..layer.overrides import overriding
from ..surgery import fast_weights
from ..tasks import IGNORED
from .writes import WriteHealth, state_ratio, write_health

Observer = Callable[[FastWeight, Tensor, Tensor, Tensor | None, ForwardContext], None]


@contextmanager
def observing(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Calls `observer` on every fast-weight read of a forward pass.

    The observer receives the layer, keys, targets, write gate and forward context.
    """
    with overriding([layer.fast for layer in fast_weights(model).values()], observer=observer):
        yield


@contextmanager
def observed(model: nn.Module, found: dict[int, WriteHealth]) -> Iterator[None]:
    """Records the health of every layer's writes in `found`, at each forward pass."""
    with _labels_noted(model) as labels:

        def observe(
            layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
        ) -> None:
            found[layer.fast.layer] = write_health(layer, z, v, gate, context, labels(v))

        with observing(model, observe):
            yield


@contextmanager
def watched(model: nn.Module, found: dict[int, Tensor]) -> Iterator[None]:
    """Records `state_ratio` of every layer in `found`, at the first forward pass.

    Only the labels are copied to the CPU. Nothing else waits for the device.
    """
    with _labels_noted(model) as labels:

        def observe(
            layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
        ) -> None:
            if layer.fast.layer not in found:
                found[layer.fast.layer] = state_ratio(layer, z, v, gate, context, labels(v))

        with observing(model, observe):
            yield


@contextmanager
def _labels_noted(model: nn.Module) -> Iterator[Callable[[Tensor], Tensor | None]]:
    """Yields a function that returns the labels [B, T] of the current forward pass, on the CPU.

    The function's argument is an activation [B, T, ...] of that pass. It returns None if the pass received no
    labels for these rows.
    """
    last: dict[str, Any] = {}

    def note(_: nn.Module, args: Any, given: dict[str, Any]) -> None:
        last.clear()
        last.update({name: given.get(name) for name in ("labels", "logits_to_keep")})

    def labels(of: Tensor) -> Tensor | None:
        given, kept = last.get("labels"), last.pop("logits_to_keep", None)
        if isinstance(given, Tensor) and isinstance(kept, Tensor):  # the labels cover only kept positions
            given = given.new_full(of.shape[:2], IGNORED).index_copy(1, kept, given)
        last["labels"] = given = (
            given.cpu() if isinstance(given, Tensor) and given.shape == of.shape[:2] else None
        )
        return given

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield labels
    finally:
        handle.remove()
