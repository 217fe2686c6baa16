"""Why a writer's gradient is low or gone: every suspect that is there is removed in turn, and the gradient measured again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import ChunkLayout
from ..surgery import initial_std
from .ablation import with_config, with_eta, with_values
from .findings import Finding, named, times
from .gradients import Gradients, Rates, gradients
from .subject import Subject

EXPLAINS = 10.0
"""A suspect whose removal raises the gradient by as much is a cause."""

_SMALL_ETA, _SMALL_P = 0.1, 0.5


@dataclass(frozen=True)
class Suspect:
    """present: the layers where it can be the cause. removed: the rows to use, and the change to the model, without it."""

    id: str
    present: Callable[[Subject, Gradients], list[int]]
    removed: Callable[[Subject], tuple[Subject, AbstractContextManager[Any]]]
    says: Callable[[Subject, Gradients, list[int]], str]


@dataclass(frozen=True)
class Raised:
    """What removing one suspect did to a layer: the writer's gradient over W_down's, or its norm where W_down has none."""

    suspect: Suspect
    layers: list[int]
    factor: float | None  # of the least raised layer; None from zero
    after: float


def causes_of_low_gradient(subject: Subject, found: Gradients, rates: Rates) -> list[Finding]:
    """Findings for the layers whose writer has lost its gradient or most of it; none where no layer has."""
    low = [index for index in subject.layers if index not in found.cut and found.low(index)]
    if not low:
        return []
    present = [s for s in SUSPECTS if set(s.present(subject, found)) & set(low)]
    raised = [r for s in present if (r := _without(subject, found, s, low, rates)) is not None]
    if not raised and len(present) > 1:
        raised = _put_back(subject, found, present, low, rates)
    findings = [_finding(subject, found, r) for r in raised]
    unexplained = sorted({index for index in low if found.vanished(index)} - {index for r in raised for index in r.layers})
    if unexplained:
        sizes = ", ".join(f"{found.of_writer(i):.2g} against {found.norms.get((i, 'weight'), 0.0):.2g}" for i in unexplained)
        message = (
            f"{named(unexplained)}: conv's and P's gradient against W_down's is {sizes}, and none of {len(present)} suspects brings it back"
        )
        findings.append(Finding("gradient-vanishing", "severe", message, tuple(unexplained)))
    return findings


def _without(subject: Subject, found: Gradients, suspect: Suspect, low: list[int], rates: Rates) -> Raised | None:
    """The gradient with a suspect removed; None where that raises no low layer enough."""
    again = _measured(subject, [suspect], rates)
    return _raised(suspect, [i for i in low if i in suspect.present(subject, found)], found, again)


def _put_back(subject: Subject, found: Gradients, present: list[Suspect], low: list[int], rates: Rates) -> list[Raised]:
    """No single removal helps: remove all, then put each back alone; those that take the gradient are causes together."""
    healthy = _measured(subject, present, rates)
    raised = []
    for suspect in present:
        alone = _measured(subject, [s for s in present if s is not suspect], rates)
        raised.append(_raised(suspect, [i for i in low if i in suspect.present(subject, found)], alone, healthy))
    return [r for r in raised if r is not None]


def _raised(suspect: Suspect, layers: list[int], before: Gradients, after: Gradients) -> Raised | None:
    """What the suspect takes in those of the layers where it takes enough to be a cause."""
    rises = {i: rise for i in layers if (rise := _rise(before, after, i)) >= EXPLAINS}
    if not rises:
        return None
    least = min(rises, key=lambda i: rises[i])
    return Raised(suspect, list(rises), None if rises[least] == float("inf") else rises[least], after.of_writer(least))


def _measured(subject: Subject, suspects: list[Suspect], rates: Rates) -> Gradients:
    with ExitStack() as stack:
        for suspect in suspects:
            subject, change = suspect.removed(subject)
            stack.enter_context(change)
        return gradients(subject, rates)


def _rise(before: Gradients, after: Gradients, layer: int) -> float:
    """By how much the layer's writer gained, relative to W_down where both have that."""
    a, b = before.ratio(layer), after.ratio(layer)
    if a is None or b is None:
        a, b = before.of_writer(layer), after.of_writer(layer)
    if a == 0:
        return float("inf") if b > 0 else 0.0
    return b / a


def _finding(subject: Subject, found: Gradients, raised: Raised) -> Finding:
    index = raised.layers[0]
    ratio = found.ratio(index)
    against = f" ({ratio:.1e} of W_down's)" if ratio else ""
    message = (
        f"{named(raised.layers)}: {raised.suspect.says(subject, found, raised.layers)}; the writer's gradient is "
        f"{found.of_writer(index):.2g}{against}, without this cause {raised.after:.2g}: {times(raised.factor)} as much"
        if raised.factor is not None
        else f"{named(raised.layers)}: {raised.suspect.says(subject, found, raised.layers)}; the writer's gradient is zero, "
        f"without this cause {raised.after:.2g}"
    )
    numbers = {"gradient": found.of_writer(index), "over_weight": ratio, "without_cause": raised.after, "factor": raised.factor}
    lost = any(found.vanished(index) for index in raised.layers)
    return Finding(raised.suspect.id, "severe" if lost else "warning", message, tuple(raised.layers), numbers)


# The suspects.


def _etas(subject: Subject, found: Gradients) -> list[int]:
    return [i for i, layer in subject.layers.items() if layer.eta < _SMALL_ETA]


def _both_zero(subject: Subject, found: Gradients) -> list[int]:
    return [i for i in subject.layers if not _size(subject, i, "conv") and not _size(subject, i, "proj")]


def _small_p(subject: Subject, found: Gradients) -> list[int]:
    return [i for i in subject.layers if 0 < _size(subject, i, "proj") < _SMALL_P * _usual_p(subject, i)]


def _clipped(subject: Subject, found: Gradients) -> list[int]:
    return [i for i, fraction in found.clipped.items() if fraction > 0]


def _no_source(subject: Subject, found: Gradients) -> list[int]:
    """Layers whose target reads embeddings that are all zero, for the tokens that are read."""
    reads = [i for i, layer in subject.layers.items() if layer.fast.config.target == "embeddings"]
    table: nn.Parameter | None = subject.parameters().get((None, "embeddings"))
    return reads if reads and table is not None and not bool(table.detach()[subject.inputs["input_ids"].unique()].any()) else []


def _no_document_is_long(subject: Subject, found: Gradients) -> list[int]:
    """Rows that would write if pads and borders between documents were text."""
    return list(subject.layers) if not found.layout.writes() and _whole_rows(subject, found).writes() else []


def _no_row_is_long(subject: Subject, found: Gradients) -> list[int]:
    return list(subject.layers) if not _whole_rows(subject, found).writes() else []


def _whole_rows(subject: Subject, found: Gradients) -> ChunkLayout:
    batch, length = subject.inputs["input_ids"].shape
    return ChunkLayout.from_lengths([[length]] * batch, found.layout.chunk_size)


def _size(subject: Subject, layer: int, name: str) -> float:
    return float(torch.linalg.vector_norm(subject.parameters()[layer, name].detach(), dtype=torch.float32))


def _usual_p(subject: Subject, layer: int) -> float:
    """‖P‖ at the paper's start."""
    return initial_std(subject.model.config) * subject.parameters()[layer, "proj"].shape[0] ** 0.5


def _with_paper_p(subject: Subject) -> dict[nn.Parameter, Tensor]:
    """P as the paper draws it, where P is zero."""
    values = {}
    for index in _both_zero(subject, None):  # type: ignore[arg-type]
        proj = subject.parameters()[index, "proj"]
        values[proj] = torch.diag(random_like(proj, proj.shape[0]) * initial_std(subject.model.config))
    return values


def _with_larger_p(subject: Subject) -> dict[nn.Parameter, Tensor]:
    chosen = _small_p(subject, None)  # type: ignore[arg-type]
    pairs = [(subject.parameters()[i, "proj"], _usual_p(subject, i) / _size(subject, i, "proj")) for i in chosen]
    return {proj: proj.detach() * factor for proj, factor in pairs}


def _with_embeddings(subject: Subject) -> dict[nn.Parameter, Tensor]:
    table = subject.parameters()[None, "embeddings"]
    return {table: random_like(table, *table.shape) * initial_std(subject.model.config)}


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """The same standard normal draws every time, in a parameter's dtype and place."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(parameter)


def _longest(subject: Subject) -> int:
    return subject.inputs["input_ids"].shape[1]


SUSPECTS: tuple[Suspect, ...] = (
    Suspect(
        "padding",
        _no_document_is_long,
        lambda s: (s.without("attention_mask", "position_ids"), contextlib.nullcontext()),
        lambda s, g, layers: (
            f"no document is longer than a chunk of {g.layout.chunk_size} tokens (the longest has {_document(g)}), "
            f"though rows have {_longest(s)}"
        ),
    ),
    Suspect(
        "one-chunk",
        _no_row_is_long,
        lambda s: (s, with_config(s.layers.values(), chunk_size=max(1, (_longest(s) - 1) // 2))),
        lambda s, g, layers: f"rows of {_longest(s)} tokens are one chunk of {g.layout.chunk_size}, so that nothing reads a write",
    ),
    Suspect(
        "source-zero",
        _no_source,
        lambda s: (s, with_values(_with_embeddings(s))),
        lambda s, g, layers: "the embeddings of every token that is read are zero",
    ),
    Suspect(
        "zero-times-zero",
        _both_zero,
        lambda s: (s, with_values(_with_paper_p(s))),
        lambda s, g, layers: "conv and P are both zero",
    ),
    Suspect(
        "clip-saturated",
        _clipped,
        lambda s: (s, with_config(s.layers.values(), clip=None)),
        lambda s, g, layers: f"{max(g.clipped[i] for i in layers):.0%} of the chunks are clipped in training",
    ),
    Suspect(
        "eta-too-small",
        _etas,
        lambda s: (s, with_eta(s.layers, {i: 1.0 for i, layer in s.layers.items() if layer.eta < _SMALL_ETA})),
        lambda s, g, layers: f"eta is {min(s.layers[i].eta for i in layers):g} (compared with 1)",
    ),
    Suspect(
        "init-too-small",
        _small_p,
        lambda s: (s, with_values(_with_larger_p(s))),
        lambda s, g, layers: f"‖P‖ is {min(_size(s, i, 'proj') / _usual_p(s, i) for i in layers):.1g} of what the paper starts from",
    ),
)


def _document(found: Gradients) -> int:
    return max((stop - start for row in found.layout.documents for start, stop in row), default=0)
