"""Rules for a gradient of conv and P that is cut off, frozen, vanishing, or dominated by one layer."""

from __future__ import annotations

from collections.abc import Callable

from ..layer.overrides import with_config
from ..surgery import config_of
from .diagnosed_model import GENERATOR, DiagnosedModel
from .findings import Finding, named
from .gradient_causes import causes_of_low_gradient
from .gradients import Gradients, Rates, first_step, gradients
from .measurements import Measurements
from .overrides import with_eta, with_values

DOMINATES = 0.99
"""Share of the squared gradient norm of all conv and P at which a layer dominates.

Its norm is then ten times that of all other layers together.
"""
NOTICED = 0.01
"""Lost fraction of the embeddings' gradient at which a detached target source is a warning."""


def gradient_flow_findings(
    model: DiagnosedModel, m: Measurements, rates: Rates, tick: Callable[[str], None]
) -> list[Finding]:
    """Returns the findings on the gradient of conv and P, and searches for causes if it is low.

    With loss gradients as targets there is neither conv nor P, so there is nothing to find.
    """
    found: list[Finding] = []
    g = m.gradients
    if config_of(model.module).target == "gradient":
        return found
    if g.cut:
        reaching = max((max(g.by_chunk[i], default=0.0) for i in g.cut), default=0.0)
        message = (
            f"{named(g.cut)}: a gradient of up to {reaching:.2g} reaches the targets, and none of it "
            "reaches conv and P"
        )
        found.append(Finding("writer-detached", "severe", message, g.cut, {"reaches_targets": reaching}))
    if m.after_step is not None:
        found.append(_zero_init(m, m.after_step))
    if any(p.requires_grad for p in model.module.parameters()):
        frozen = [(i, name) for i in m.etas for name in GENERATOR if not m.trained.get((i, name), True)]
        if frozen:
            found.append(_frozen(m, frozen))
    low = any(g.low(index) for index in model.layers if index not in g.cut)
    if low:
        tick("removing possible causes")
        found += causes_of_low_gradient(model, g, rates)
    elif m.after_step is not None and any(m.after_step.low(index) for index in model.layers):
        tick("removing possible causes after the first step")
        found += _after_first_step(model, m, rates)
    if config_of(model.module).detach_target:
        tick("source attached")
        found.append(_detached(model, m, rates))
    if not low and (one := _dominant(g)) is not None:
        tick(f"layer {one} off")
        found.append(_dominates(model, m, one, rates))
    return found


def _zero_init(m: Measurements, after: Gradients) -> Finding:
    g = m.gradients
    layers = tuple(index for index in m.etas if m.sizes[index, "conv"] == 0)
    conv, proj = (
        max(x.norms.get((i, name), 0.0) for i in layers) for x, name in ((g, "conv"), (after, "proj"))
    )
    message = (
        f"{named(layers)}: conv is zero, so nothing is written yet and P gets no gradient; conv's "
        f"gradient is up to {conv:.2g}, and after Adam's first step P's is up to {proj:.2g}"
    )
    return Finding("zero-init", "info", message, layers, {"conv": conv, "proj_after_step": proj})


def _frozen(m: Measurements, frozen: list[tuple[int, str]]) -> Finding:
    layers = tuple(sorted({index for index, _ in frozen}))
    names = {
        index: " and ".join({"conv": "conv", "proj": "P"}[name] for i, name in frozen if i == index)
        for index in layers
    }
    norm = max((m.after_step or m.gradients).norms.get(key, 0.0) for key in frozen)
    message = (
        f"{named(layers)}: {', '.join(sorted(set(names.values())))} requires no gradient while other "
        f"parameters train; unfrozen, it would get {norm:.2g}"
    )
    return Finding("writer-frozen", "severe", message, layers, {"gradient_thawed": norm})


def _after_first_step(model: DiagnosedModel, m: Measurements, rates: Rates) -> list[Finding]:
    assert m.after_step is not None
    with with_values(first_step(model, m.gradients, rates)):
        return [
            Finding(f.id, f.severity, f"after Adam's first step, {f.message}", f.layers, f.numbers)
            for f in causes_of_low_gradient(model, m.after_step, rates)
        ]


def _detached(model: DiagnosedModel, m: Measurements, rates: Rates) -> Finding:
    """Measures the gradient that the embeddings would get through the targets, by attaching them."""
    with with_config(model.layers.values(), detach_target=False):
        attached = gradients(model, rates, keep=("embeddings",)).kept.get((None, "embeddings"))
    detached, layers = m.gradients.kept.get((None, "embeddings")), tuple(model.layers)
    lost = 0.0
    if attached is not None and detached is not None and bool(attached.any()):
        lost = float((attached - detached).float().norm() / attached.float().norm())
    message = (
        f"{named(layers)}: no gradient flows from the targets into their source; with the source "
        f"attached, {lost:.2%} of the embeddings' gradient comes that way"
    )
    return Finding(
        "target-detached", "warning" if lost > NOTICED else "info", message, layers, {"lost": lost}
    )


def _dominant(g: Gradients) -> int | None:
    """Returns the layer with nearly all of the gradient of conv and P, if there are several layers."""
    shares = g.shares()
    one = max(shares, key=lambda index: shares[index], default=None)
    return one if one is not None and len(shares) > 1 and shares[one] > DOMINATES else None


def _dominates(model: DiagnosedModel, m: Measurements, layer: int, rates: Rates) -> Finding:
    with with_eta(model.layers, {layer: 0.0}):
        without = gradients(model, rates)
    total, left, share = (
        m.gradients.total_of_generators(),
        without.total_of_generators(),
        m.gradients.shares()[layer],
    )
    effect = m.effects.get(layer)
    moved = "" if effect is None else f"; its writes move the logits by {effect.logits:.2g} (RMS)"
    message = (
        f"layer {layer} has {share:.2%} of the squared gradient of all conv and P: their norm is "
        f"{total:.3g}, with its writes off {left:.3g}{moved}"
    )
    return Finding(
        "layer-dominates",
        "severe",
        message,
        (layer,),
        {"share": share, "total": total, "total_without": left},
    )
