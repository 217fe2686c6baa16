"""Measures the gradient of every diagnosed parameter, and the gradient at each chunk's targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InPlaceTTTError
from ..layer.fast_linear import FastWeight
from ..layer.forward_context import ForwardContext
from ..layer.overrides import overriding
from ..layout import ChunkLayout
from .diagnosed_model import GENERATOR, DiagnosedModel, Key
from .observing import observing
from .writes import longest_document, write_health

ADAM_EPSILON = 1e-8
LOW, VANISHED = 1e-1, 1e-2
"""Fractions of W_down's gradient. Below LOW a cause is searched for. Below VANISHED the gradient is lost.

A healthy target generator has a gradient of the order of W_down's or above.
"""


@dataclass(frozen=True)
class Rates:
    """Learning rates of conv, of P and the gate, and of all other parameters.

    Raises:
        InPlaceTTTError: if a rate is negative, infinite or NaN.
    """

    conv: float
    proj: float
    rest: float

    def __post_init__(self) -> None:
        for rate in (self.conv, self.proj, self.rest):
            if not 0 <= rate < float("inf"):
                raise InPlaceTTTError(
                    f"a learning rate to diagnose with must be a number of at least 0, got {rate!r}."
                )

    def of(self, key: Key) -> float:
        """Returns the learning rate of a parameter."""
        return {"conv": self.conv, "proj": self.proj, "gate": self.proj}.get(key[1], self.rest)


@dataclass(frozen=True)
class Gradients:
    """Results of one backward pass.

    Norms are Frobenius norms. A parameter that the loss does not reach is left out.

    Attributes:
        loss: mean loss in nats per token.
        layout: chunks of the rows.
        norms: norm of the gradient, by parameter.
        steps: norm of Adam's first step, by parameter.
        by_chunk: for each layer, ‖∂L/∂V_j‖ of the longest document's chunks, in order.
        cut: layers whose targets pass no gradient on to conv and P.
        clipped: for each layer, the fraction of chunks that are clipped in training.
        kept: the gradients themselves, for the kinds of parameter asked for.
    """

    loss: float
    layout: ChunkLayout
    norms: dict[Key, float]
    steps: dict[Key, float]
    by_chunk: dict[int, list[float]]
    cut: tuple[int, ...]
    clipped: dict[int, float]
    kept: dict[Key, Tensor]

    def of_generator(self, layer: int) -> float:
        """Returns the larger of the gradient norms of conv and P."""
        return max(self.norms.get((layer, name), 0.0) for name in GENERATOR)

    def ratio(self, layer: int) -> float | None:
        """Returns `of_generator` over the norm of W_down's gradient; None if W_down gets none."""
        weight = self.norms.get((layer, "weight"), 0.0)
        return self.of_generator(layer) / weight if weight > 0 else None

    def low(self, layer: int) -> bool:
        """Returns True if the gradient of conv and P is zero, or below a tenth of W_down's."""
        return self._below(layer, LOW)

    def vanished(self, layer: int) -> bool:
        """Returns True if the gradient of conv and P is zero, or below a hundredth of W_down's."""
        return self._below(layer, VANISHED)

    def _below(self, layer: int, limit: float) -> bool:
        ratio = self.ratio(layer)
        return self.of_generator(layer) == 0 or (ratio is not None and ratio < limit)

    def total_of_generators(self) -> float:
        """Returns the norm of the gradients of all conv and P together."""
        return sum(norm**2 for (_, name), norm in self.norms.items() if name in GENERATOR) ** 0.5

    def shares(self) -> dict[int, float]:
        """Returns each layer's share of the squared norm of all conv and P; empty if the norm is 0."""
        total = self.total_of_generators() ** 2
        own = {i: sum(self.norms.get((i, name), 0.0) ** 2 for name in GENERATOR) for i in self.by_chunk}
        return {i: square / total for i, square in own.items()} if total > 0 else {}


def gradients(model: DiagnosedModel, rates: Rates, keep: Collection[str] = ()) -> Gradients:
    """Runs a backward pass in training mode, also for frozen parameters.

    Every `.grad` and every random generator keeps its value. If targets were computed without a graph, the
    gradient at the targets is computed nevertheless, which shows where the path is cut.

    Args:
        model: the model and its rows.
        rates: learning rates of Adam's first step.
        keep: kinds of parameter whose gradients are returned in `kept`.
    """
    wanted = model.parameters()
    values: dict[int, Tensor] = {}
    cut: list[int] = []
    clipped: dict[int, float] = {}
    layout: list[ChunkLayout] = []

    def observe(
        layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
    ) -> None:
        index = layer.fast.layer
        if not v.requires_grad:
            v.requires_grad_()
            cut.append(index)
        values[index] = v
        layout.append(context.part(layer.chunk_size))
        clipped[index] = write_health(layer, z, v, gate, context).clipped if layer.tau() is not None else 0.0

    with (
        model.mode(training=True),
        torch.enable_grad(),
        overriding(wanted.values(), requires_grad=True),
        observing(model.module, observe),
    ):
        loss = model.forward(labels=model.labels).loss
        targets = dict(values)
        found = torch.autograd.grad(loss, [*wanted.values(), *targets.values()], allow_unused=True)
    by_parameter = dict(zip(wanted, found, strict=False))
    row, document = longest_document(layout[0])
    by_chunk = {}
    for index, d_v in zip(targets, found[len(wanted) :], strict=True):
        chunks = layout[0].chunks(document)
        by_chunk[index] = [
            0.0 if d_v is None else float(norm_of(d_v[row, start:stop])) for start, stop in chunks
        ]
    reached = {key: g for key, g in by_parameter.items() if g is not None}
    return Gradients(
        float(loss.detach()),
        layout[0],
        {key: float(norm_of(g)) for key, g in reached.items()},
        {
            key: rates.of(key) * float(norm_of(g.float() / (g.float().abs() + ADAM_EPSILON)))
            for key, g in reached.items()
        },
        by_chunk,
        tuple(sorted(set(cut))),
        clipped,
        {key: g for key, g in reached.items() if key[1] in keep},
    )


def first_step(model: DiagnosedModel, found: Gradients, rates: Rates) -> dict[nn.Parameter, Tensor]:
    """Returns conv after Adam's first step, for each conv that is zero and has a gradient.

    The step moves every entry by conv's rate against the sign of its gradient. `found.kept` must hold the
    gradients of conv.
    """
    convs = {model.parameters()[key]: gradient for key, gradient in found.kept.items() if key[1] == "conv"}
    return {
        conv: -rates.conv * gradient.sign()
        for conv, gradient in convs.items()
        if not bool(conv.any()) and bool(gradient.any())
    }


def summed(values: Mapping[Key, float], name: str) -> float | None:
    """Returns the norm of one kind of parameter over all layers; None if no layer has it."""
    squares = [value**2 for (_, kind), value in values.items() if kind == name]
    return sum(squares) ** 0.5 if squares else None


def norm_of(x: Tensor) -> Tensor:
    """Returns ‖x‖, computed in float32 or float64."""
    return torch.linalg.vector_norm(x, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
