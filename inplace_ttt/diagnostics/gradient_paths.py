"""Measures the gradient on each path through a TTT layer: writing keys, reading keys, and W0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..layer.fast_linear import FastWeight
from ..layer.forward_context import ForwardContext
from ..layer.overrides import overriding
from ..surgery import initial_std
from .diagnosed_model import DiagnosedModel
from .observing import observing
from .overrides import paper_p, random_like, with_values
from .writes import longest_document

_LOST = 0.01
"""A path is cut if at most this fraction of its expected gradient is left."""
_ROUNDING = 64.0
"""Largest rounding error of a difference of two gradients, in steps of their dtype."""


@dataclass(frozen=True)
class Way:
    """Gradient on one path through a layer.

    Attributes:
        found: norm of the gradient that takes this path.
        expected: least norm that it should have.
        rounding: part of `found` that rounding can produce.
        noise: part of `expected` that rounding can produce.
    """

    found: float
    expected: float
    rounding: float = 0.0
    noise: float = 0.0

    @property
    def cut(self) -> bool:
        """True if the path has at most 1 % of the expected gradient, or only rounding errors.

        A gradient below `rounding` cannot be distinguished from noise. A path whose expected gradient is that
        small is never reported as cut.
        """
        if self.expected <= max(4 * self.noise, self.rounding / 1000):
            return False
        return self.found <= max(
            _LOST * self.expected, self.rounding if self.expected > 10 * self.rounding else 0.0
        )


@dataclass(frozen=True)
class Ways:
    """Gradient paths of one layer; None for a path that cannot be measured.

    Attributes:
        writing: through the keys of the first chunk, which only write.
        reading: through the keys of the last chunk, which only read.
        weight: to W0.
    """

    writing: Way | None
    reading: Way | None
    weight: Way | None


@dataclass
class _Pass:
    """Tensors of one layer, recorded in a forward pass."""

    given: Tensor  # the input, [B, T, h] or [B T, h]
    out: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    context: ForwardContext | None = None
    wanted: dict[str, Tensor] = field(default_factory=dict)


def gradient_ways(model: DiagnosedModel) -> dict[int, Ways]:
    """Returns the gradient paths of every layer, by layer index, from one backward pass.

    If conv or P is zero, nothing is written. The pass then uses small random values instead.
    """
    known, passes = model.parameters(), dict[int, _Pass]()

    def observe(
        layer: FastWeight, k: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
    ) -> None:
        seen = passes[layer.fast.layer]
        seen.keys, seen.values, seen.context = k, v, context

    with (
        with_values(_writing(model)),
        model.mode(training=True),
        torch.enable_grad(),
        overriding(known.values(), requires_grad=True),
        observing(model.module, observe),
        _passing(model, passes),
    ):
        loss = model.forward(labels=model.labels).loss
        for index, seen in passes.items():
            tensors = {
                "out": seen.out,
                "keys": seen.keys,
                "values": seen.values,
                "weight": known.get((index, "weight")),
            }
            seen.wanted = {
                name: tensor
                for name, tensor in tensors.items()
                if tensor is not None and tensor.requires_grad
            }
        flat = [tensor for seen in passes.values() for tensor in seen.wanted.values()]
        found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        gradients = {index: {name: next(found) for name in seen.wanted} for index, seen in passes.items()}
    return {index: _ways(model.layers[index], seen, gradients[index]) for index, seen in passes.items()}


def _writing(model: DiagnosedModel) -> dict[nn.Parameter, Tensor]:
    """Returns values for the zero conv and P, with which every layer writes."""
    std, values = initial_std(model.module.config), dict[nn.Parameter, Tensor]()
    for (_, name), parameter in model.parameters().items():
        if name in ("conv", "proj") and not bool(parameter.any()):
            values[parameter] = (
                random_like(parameter, *parameter.shape) * std if name == "conv" else paper_p(parameter, std)
            )
    return values


@contextmanager
def _passing(model: DiagnosedModel, passes: dict[int, _Pass]) -> Iterator[None]:
    """Records the input and output of every TTT layer in `passes` during each forward pass."""

    def before(layer: FastWeight, args: tuple[Tensor, ...]) -> None:
        passes[layer.fast.layer] = _Pass(args[0], args[0])

    def after(layer: FastWeight, args: tuple[Tensor, ...], out: Tensor) -> None:
        passes[layer.fast.layer].out = out

    handles: list[Any] = [layer.register_forward_pre_hook(before) for layer in model.layers.values()]
    handles += [layer.register_forward_hook(after) for layer in model.layers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _ways(layer: FastWeight, seen: _Pass, gradients: Mapping[str, Tensor | None]) -> Ways:
    w0, at_out = layer.matrix(), gradients.get("out")
    if (
        seen.keys is None
        or seen.values is None
        or seen.context is None
        or at_out is None
        or layer.fast.config.prompt_write is not None
    ):
        return Ways(None, None, None)
    row, document = longest_document(seen.context.part(layer.chunk_size))
    chunks = list(seen.context.part(layer.chunk_size).chunks(document))
    shape = seen.context.shape

    def of(tensor: Tensor | None, chunk: tuple[int, int]) -> Tensor:
        """Returns one chunk of a tensor in float32; zero for None."""
        return torch.zeros(()) if tensor is None else tensor.reshape(*shape, -1)[row, slice(*chunk)].float()

    weight = None
    if w0 is not None:
        needed = (
            at_out.reshape(-1, at_out.shape[-1]).float().T
            @ seen.given.reshape(-1, seen.given.shape[-1]).float()
        )
        had = gradients.get("weight")
        weight = Way(0.0 if had is None else float(had.float().norm()), float(needed.norm()))
    if len(chunks) < 2 or (w0 is None and layer.ttt.keys is None):
        return Ways(None, None, weight)
    step = torch.finfo(seen.keys.dtype).eps
    # computed by the same product as in autograd, so that it cancels exactly in the difference below
    taken = at_out.reshape(-1, at_out.shape[-1]) @ w0 if w0 is not None and layer.ttt.keys is None else None
    bias = getattr(layer, "bias", None)

    def through_keys(chunk: tuple[int, int]) -> tuple[Tensor, float]:
        """Returns the gradient at the keys without W0's part, and the norm of W0's part.

        The norm sets the scale of the rounding error.
        """
        part = of(taken, chunk)
        at_keys = of(gradients.get("keys"), chunk)
        return (torch.zeros(()) if not bool(at_keys.any()) else at_keys - part), float(part.norm())

    # a last chunk of one token predicts nothing, so its gradient is zero
    final = next((chunk for chunk in reversed(chunks) if bool(of(at_out, chunk).any())), chunks[-1])
    (written, w_part), (read, r_part) = through_keys(chunks[0]), through_keys(final)
    first, last = of(seen.keys, chunks[0]), of(seen.keys, final)
    size = float(first.norm().clamp_min(1e-30))
    worth = float((of(gradients.get("values"), chunks[0]) * of(seen.values, chunks[0])).sum().abs())
    writing = Way(float(written.norm()), worth / size, _ROUNDING * step * w_part)
    reading = None
    if w0 is not None:
        plain = of(seen.given, final) @ w0.float().T + (0 if bias is None else bias.float())
        out, back, size = of(seen.out, final), of(at_out, final), float(last.norm().clamp_min(1e-30))
        gained, noise = float((back * (out - plain)).sum().abs()), step * float(back.norm() * out.norm())
        reading = Way(float(read.norm()), gained / size, _ROUNDING * step * r_part, noise / size)
    return Ways(writing, reading, weight)
