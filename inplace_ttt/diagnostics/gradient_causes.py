"""Finds the cause of a low gradient of a target generator by ablation.

Every possible cause is removed in turn, and the gradient is measured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..layer.overrides import with_config
from ..layout import ChunkLayout
from ..surgery import initial_std
from ..tasks import IGNORED
from .diagnosed_model import DiagnosedModel
from .findings import Finding, named, times
from .gradients import Gradients, Rates, gradients, norm_of
from .overrides import paper_p, random_like, with_eta, with_values
from .write_effects import Scored

RAISES = 10.0
"""A cause is confirmed if its removal raises the gradient by at least this factor."""

_SMALL_ETA, _SMALL_P = 0.1, 0.5


@dataclass(frozen=True)
class Cause:
    """A possible cause of a low gradient.

    Attributes:
        id: key of the fault in `CATALOG`.
        present: returns the layers in which it can be the cause.
        removed: returns the rows and the change of the model that remove the cause.
        message: describes the cause for some layers, with numbers.
    """

    id: str
    present: Callable[[DiagnosedModel, Gradients], list[int]]
    removed: Callable[[DiagnosedModel], tuple[DiagnosedModel, AbstractContextManager[Any]]]
    message: Callable[[DiagnosedModel, Gradients, list[int]], str]


@dataclass(frozen=True)
class Raised:
    """Effect of removing one cause.

    Attributes:
        cause: the cause.
        layers: layers whose gradient rises enough.
        factor: rise of the gradient of conv and P in the layer with the smallest rise; None for a rise from
            zero. The gradient is taken relative to W_down's, if that is not zero.
        after: gradient norm of conv and P in that layer after the removal.
    """

    cause: Cause
    layers: list[int]
    factor: float | None  # of the layer with the smallest rise; None from zero
    after: float


def causes_of_low_gradient(model: DiagnosedModel, found: Gradients, rates: Rates) -> list[Finding]:
    """Returns findings for the layers whose conv and P get little or no gradient.

    Args:
        model: the model and its rows.
        found: the gradients.
        rates: learning rates of Adam's first step.

    Returns:
        The findings; empty if no layer's gradient is low.
    """
    low = [index for index in model.layers if index not in found.cut and found.low(index)]
    if not low:
        return []
    present = [s for s in CAUSES if set(s.present(model, found)) & set(low)]
    raised = [r for s in present if (r := _without(model, found, s, low, rates)) is not None]
    if not raised and len(present) > 1:
        raised = _put_back(model, found, present, low, rates)
    findings = [_finding(model, found, r) for r in raised]
    unexplained = sorted(
        {index for index in low if found.vanished(index)} - {index for r in raised for index in r.layers}
    )
    if unexplained:
        sizes = ", ".join(
            f"{found.of_generator(i):.2g} against {found.norms.get((i, 'weight'), 0.0):.2g}"
            for i in unexplained
        )
        message = (
            f"{named(unexplained)}: conv's and P's gradient against W_down's is {sizes}, and removing any "
            f"of {len(present)} possible causes does not bring it back"
        )
        findings.append(Finding("gradient-vanishing", "severe", message, tuple(unexplained)))
    return findings


def _without(
    model: DiagnosedModel, found: Gradients, cause: Cause, low: list[int], rates: Rates
) -> Raised | None:
    """Measures the gradient with a cause removed. Returns None if no layer's low gradient rises enough."""
    again = _measured(model, [cause], rates)
    return _raised(cause, [i for i in low if i in cause.present(model, found)], found, again)


def _put_back(
    model: DiagnosedModel, found: Gradients, present: list[Cause], low: list[int], rates: Rates
) -> list[Raised]:
    """Returns the causes that lower the gradient only in combination.

    It is called if no single removal helps. It removes all causes, and puts each one back alone.
    """
    healthy = _measured(model, present, rates)
    raised = []
    for cause in present:
        alone = _measured(model, [s for s in present if s is not cause], rates)
        raised.append(_raised(cause, [i for i in low if i in cause.present(model, found)], alone, healthy))
    return [r for r in raised if r is not None]


def _raised(cause: Cause, layers: list[int], before: Gradients, after: Gradients) -> Raised | None:
    """Returns the effect of a cause on the layers in which the effect is large enough."""
    rises = {i: rise for i in layers if (rise := _rise(before, after, i)) >= RAISES}
    if not rises:
        return None
    least = min(rises, key=lambda i: rises[i])
    return Raised(
        cause, list(rises), None if rises[least] == float("inf") else rises[least], after.of_generator(least)
    )


def _measured(model: DiagnosedModel, causes: list[Cause], rates: Rates) -> Gradients:
    with ExitStack() as stack:
        for cause in causes:
            model, change = cause.removed(model)
            stack.enter_context(change)
        return gradients(model, rates)


def _rise(before: Gradients, after: Gradients, layer: int) -> float:
    """Returns the factor by which the gradient of a layer's conv and P rises.

    The gradient is taken relative to W_down's if both measurements have one.
    """
    a, b = before.ratio(layer), after.ratio(layer)
    if a is None or b is None:
        a, b = before.of_generator(layer), after.of_generator(layer)
    if a == 0:
        return float("inf") if b > 0 else 0.0
    return b / a


def _finding(model: DiagnosedModel, found: Gradients, raised: Raised) -> Finding:
    index = raised.layers[0]
    ratio = found.ratio(index)
    against = f" ({ratio:.1e} of W_down's)" if ratio else ""
    message = (
        f"{named(raised.layers)}: {raised.cause.message(model, found, raised.layers)}; the target "
        f"generator's gradient is {found.of_generator(index):.2g}{against}, "
        f"without this cause {raised.after:.2g}: {times(raised.factor)} as much"
        if raised.factor is not None
        else f"{named(raised.layers)}: {raised.cause.message(model, found, raised.layers)}; the target "
        f"generator's gradient is zero, without this cause {raised.after:.2g}"
    )
    numbers = {
        "gradient": found.of_generator(index),
        "over_weight": ratio,
        "without_cause": raised.after,
        "factor": raised.factor,
    }
    lost = any(found.vanished(index) for index in raised.layers)
    return Finding(raised.cause.id, "severe" if lost else "warning", message, tuple(raised.layers), numbers)


# The possible causes.


def _etas(model: DiagnosedModel, found: Gradients) -> list[int]:
    return [i for i, layer in model.layers.items() if layer.eta < _SMALL_ETA]


def _both_zero(model: DiagnosedModel, found: Gradients) -> list[int]:
    known = model.parameters()
    return [
        i
        for i in model.layers
        if (i, "conv") in known and not _size(model, i, "conv") and not _size(model, i, "proj")
    ]


def _small_p(model: DiagnosedModel, found: Gradients) -> list[int]:
    return [i for i in model.layers if 0 < _size(model, i, "proj") < _SMALL_P * _usual_p(model, i)]


def _clipped(model: DiagnosedModel, found: Gradients) -> list[int]:
    return [i for i, fraction in found.clipped.items() if fraction > 0]


def _no_source(model: DiagnosedModel, found: Gradients) -> list[int]:
    """Returns the layers whose target reads embeddings that are zero for every token of the rows."""
    reads = [i for i, layer in model.layers.items() if layer.fast.config.target == "embeddings"]
    table: nn.Parameter | None = model.parameters().get((None, "embeddings"))
    return (
        reads
        if reads and table is not None and not bool(table.detach()[model.inputs["input_ids"].unique()].any())
        else []
    )


def _no_label_reads(model: DiagnosedModel, found: Gradients) -> list[int]:
    """Returns all layers if only first chunks have labels although documents are longer."""
    return (
        list(model.layers)
        if _teaches(found.layout) and not bool(Scored.of(model, found.layout).mask.any())
        else []
    )


def _no_document_is_long(model: DiagnosedModel, found: Gradients) -> list[int]:
    """Returns all layers if rows could write, but padding or document borders prevent it."""
    return list(model.layers) if not _teaches(found.layout) and _teaches(_whole_rows(model, found)) else []


def _no_row_is_long(model: DiagnosedModel, found: Gradients) -> list[int]:
    return list(model.layers) if not _teaches(_whole_rows(model, found)) else []


def _teaches(layout: ChunkLayout) -> bool:
    """Returns True if some token reads a write and predicts a token.

    Such a token lies after its document's first chunk and before the document's last token.
    """
    return any(stop - start > layout.chunk_size + 1 for row in layout.documents for start, stop in row)


def _whole_rows(model: DiagnosedModel, found: Gradients) -> ChunkLayout:
    batch, length = model.inputs["input_ids"].shape
    return ChunkLayout.from_lengths([[length]] * batch, found.layout.chunk_size)


def _size(model: DiagnosedModel, layer: int, name: str) -> float:
    return float(norm_of(model.parameters()[layer, name].detach()))


def _usual_p(model: DiagnosedModel, layer: int) -> float:
    """Returns ‖P‖ at the paper's initialization."""
    return initial_std(model.module.config) * model.parameters()[layer, "proj"].shape[0] ** 0.5


def _with_paper_p(model: DiagnosedModel) -> dict[nn.Parameter, Tensor]:
    """Returns P as the paper draws it, where conv and P are zero."""
    chosen = [model.parameters()[index, "proj"] for index in _both_zero(model, None)]  # type: ignore[arg-type]
    return {proj: paper_p(proj, initial_std(model.module.config)) for proj in chosen}


def _with_larger_p(model: DiagnosedModel) -> dict[nn.Parameter, Tensor]:
    chosen = _small_p(model, None)  # type: ignore[arg-type]
    pairs = [(model.parameters()[i, "proj"], _usual_p(model, i) / _size(model, i, "proj")) for i in chosen]
    return {proj: proj.detach() * factor for proj, factor in pairs}


def _with_embeddings(model: DiagnosedModel) -> dict[nn.Parameter, Tensor]:
    table = model.parameters()[None, "embeddings"]
    return {table: random_like(table, *table.shape) * initial_std(model.module.config)}


def _longest(model: DiagnosedModel) -> int:
    return model.inputs["input_ids"].shape[1]


CAUSES: tuple[Cause, ...] = (
    Cause(
        "padding",
        _no_document_is_long,
        lambda s: (s.without("attention_mask", "position_ids"), contextlib.nullcontext()),
        lambda s, g, layers: (
            f"no document is longer than a chunk of {g.layout.chunk_size} tokens and a last token, which "
            f"predicts nothing (the longest has {_document(g)}), though rows have {_longest(s)}"
        ),
    ),
    Cause(
        "one-chunk",
        _no_row_is_long,
        lambda s: (s, with_config(s.layers.values(), chunk_size=max(1, (_longest(s) - 1) // 2))),
        lambda s, g, layers: (
            f"rows of {_longest(s)} tokens hold at most one chunk of {g.layout.chunk_size} and a last "
            "token, which predicts nothing: no prediction reads a write"
        ),
    ),
    Cause(
        "labels-unread",
        _no_label_reads,
        lambda s: (DiagnosedModel.of(s.module, s.inputs), contextlib.nullcontext()),
        lambda s, g, layers: (
            f"all {int((s.next_tokens != IGNORED).sum())} tokens that are predicted are in first chunks, "
            "which read no write"
        ),
    ),
    Cause(
        "source-zero",
        _no_source,
        lambda s: (s, with_values(_with_embeddings(s))),
        lambda s, g, layers: "the embeddings of every token that is read are zero",
    ),
    Cause(
        "zero-times-zero",
        _both_zero,
        lambda s: (s, with_values(_with_paper_p(s))),
        lambda s, g, layers: "conv and P are both zero",
    ),
    Cause(
        "clip-saturated",
        _clipped,
        lambda s: (s, with_config(s.layers.values(), clip=None)),
        lambda s, g, layers: f"{max(g.clipped[i] for i in layers):.0%} of the chunks are clipped in training",
    ),
    Cause(
        "eta-too-small",
        _etas,
        lambda s: (
            s,
            with_eta(s.layers, {i: 1.0 for i, layer in s.layers.items() if layer.eta < _SMALL_ETA}),
        ),
        lambda s, g, layers: f"eta is {min(s.layers[i].eta for i in layers):g} (compared with 1)",
    ),
    Cause(
        "init-too-small",
        _small_p,
        lambda s: (s, with_values(_with_larger_p(s))),
        lambda s, g, layers: (
            f"‖P‖ is {min(_size(s, i, 'proj') / _usual_p(s, i) for i in layers):.1g} of ‖P‖ at the "
            "paper's start"
        ),
    ),
)


def _document(found: Gradients) -> int:
    return max((stop - start for row in found.layout.documents for start, stop in row), default=0)
