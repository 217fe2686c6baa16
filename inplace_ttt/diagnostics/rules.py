"""The rules from measurements to findings: what is wrong, how bad it is, and the number that says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import torch

from ..layer.overrides import with_config
from ..surgery import config_of
from .diagnosed_model import GENERATOR, DiagnosedModel
from .fault_rules import NO_EFFECT, faults, not_finite, weights_not_finite
from .findings import Finding, Severity, named
from .gradient_causes import causes_of_low_gradient
from .gradients import Gradients, Rates, first_step, gradients
from .measurements import Measurements
from .overrides import with_eta, with_values
from .write_effects import HARM, Few

EXCEEDS_WEIGHT, TENTH_OF_WEIGHT = 1.0, 0.1
"""η‖S‖/‖W0‖ after a document: as large as the weight; enough to look at."""
DOMINATES = 0.99
"""Of the target generators' squared gradient norm, in one layer: ten times that of all others together."""
OF_FEW = 0.5
"""Of the loss that writes add, what a hundredth of the tokens carries."""
ALIGNED = 0.9
"""Mean cosine of successive writes."""
FEW_DIRECTIONS = 10.0
"""Participation ratio of the keys; of SmolLM2-135M's layers the last two have 2 to 7, most others 40 and
more."""
ROUNDED_AWAY = 0.5
"""Of what writes add to an output; of the entries that a step should change."""
EXPLODES, RISES = 0.5, 0.1
"""Nats that a first step raises the loss by."""
CONSTANT = 1e-3
"""Of a source's square, what is not its mean."""
ONE_DIRECTION = 1.5
"""Participation ratio."""
SLOPE_NOISE = {16: 0.05, 32: 1e-3, 64: 1e-6}
"""Of a slope of the loss in nats, by the bits of a number: below it nothing is said."""
NOTICED = 0.01
"""Of the embeddings' gradient, lost by detaching the targets' source."""


def findings_of(
    model: DiagnosedModel,
    m: Measurements,
    rates: Rates,
    tick: Callable[[str], None],
    *,
    rates_given: bool,
    float32_masters: bool,
) -> list[Finding]:
    """Every finding; measurements that only some findings need are made here."""
    broken = weights_not_finite(model)
    if not math.isfinite(m.gradients.loss):
        return [*(broken or [not_finite(model, m)]), *_precision(m)]
    flow = _gradient_flow(model, m, rates, tick)
    named_already = {finding.id for finding in flow}
    made = [
        finding
        for finding in (*_targets(m), *_no_keys(m), *_slopes(model, m))
        if finding.id not in named_already
    ]
    steps = [*_first_step(m, rates), *([] if float32_masters else _rounded(m, rates, rates_given))]
    # embeddings of zero: every layer's keys are zero for that, and any step is the first
    if "source-zero" in named_already:
        made, steps = [], []
    explained = {layer for finding in made if finding.severity == "severe" for layer in finding.layers}
    flow = [
        finding
        for finding in flow
        if finding.id != "gradient-vanishing" or not set(finding.layers) <= explained
    ]
    planted = faults(model, m)
    small = {layer for finding in planted if finding.id == "conv-too-small" for layer in finding.layers}
    precision = [
        finding
        for finding in _precision(m)
        if finding.id != "compute-precision" or not set(finding.layers) <= small
    ]
    # the layers before lose the gradient that went through keys
    if any(finding.id == "keys-detached" for finding in planted):
        flow = [finding for finding in flow if finding.id != "layer-dominates"]
    return [*broken, *flow, *made, *planted, *steps, *_writes(model, m), *_keys(m), *precision, *_advice(m)]


def _helps(m: Measurements) -> bool:
    """Whether the text is predicted better with all writes on, by a model that predicts at all."""
    change = m.all_writes
    return change is not None and (-change).exceeds(HARM) and m.gradients.loss < m.chance


def _targets(m: Measurements) -> list[Finding]:
    found = []
    for index, target in m.targets.items():
        numbers = {
            "size": target.size,
            "spread": target.spread,
            "targets": target.target_rank,
            "proj": target.proj_rank,
        }
        severity: Severity = "severe"
        if target.size == 0:
            id, message = "source-zero", "what the target reads is zero at every token"
        elif target.spread < CONSTANT:
            id, message = (
                "source-constant",
                f"of the square of what the target reads, {target.spread:.1e} is not its mean over tokens",
            )
        elif 0 < target.proj_rank < ONE_DIRECTION:
            id, message = "projection-collapsed", f"P's rows have an effective rank of {target.proj_rank:.2f}"
        elif 0 < target.target_rank < ONE_DIRECTION:
            id, severity = "targets-collapsed", "warning"
            message = (
                f"targets have an effective rank of {target.target_rank:.2f}, their source "
                f"{target.source_rank:.1f}"
            )
        else:
            continue
        found.append(Finding(id, severity, f"layer {index}: {message}", (index,), numbers))
    return found


def _no_keys(m: Measurements) -> list[Finding]:
    layers = tuple(index for index in m.etas if m.keys[index].effective == 0)
    message = "the down-projection's input is zero at every token, so that nothing is written or read"
    return (
        [Finding("keys-zero", "severe", f"{named(layers)}: {message}", layers, {"effective": 0.0})]
        if layers
        else []
    )


def _slopes(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    s = m.slopes
    if s is None or m.gradients.cut:
        return []
    bits = min(torch.finfo(model.parameters()[i, "proj"].dtype).bits for i in s.layers)
    apart = abs(s.autograd - s.differences)
    if apart < max(0.5 * abs(s.differences), 4 * s.error, SLOPE_NOISE[bits]):
        return []
    message = (
        f"{named(s.layers)}: as P grows the loss changes by {s.differences:.2g} ± {s.error:.1g} nats for "
        "its size, and the gradient says "
        f"{s.autograd:.2g}"
    )
    numbers = {"autograd": s.autograd, "differences": s.differences, "error": s.error}
    return [Finding("scan-detached", "severe", message, s.layers, numbers)]


def _first_step(m: Measurements, rates: Rates) -> list[Finding]:
    if m.stepped is None:
        return []
    (whole, gentle), before = m.stepped.losses, m.gradients.loss
    if whole - before < RISES:
        return []
    message = (
        f"after Adam's first step at rates of {rates.conv:g} (conv), {rates.proj:g} (P) and {rates.rest:g} "
        "the loss goes from "
        f"{before:.2f} to {whole:.2f}, at a tenth of them to {gentle:.2f}"
    )
    severity: Severity = "warning" if whole - before < EXPLODES else "severe"
    numbers = {"before": before, "after": whole, "at_a_tenth": gentle}
    return [Finding("step-too-large", severity, message, tuple(m.etas), numbers)]


def _rounded(m: Measurements, rates: Rates, rates_given: bool) -> list[Finding]:
    """Of conv, P and W0, what moves least; the embeddings' rare tokens say little."""
    moved = {
        key: share
        for key, share in (m.stepped.moved if m.stepped else {}).items()
        if key[0] is not None and share < ROUNDED_AWAY
    }
    if not moved:
        return []
    least = min(moved, key=lambda key: moved[key])
    layers = tuple(sorted({key[0] for key in moved if key[0] is not None}))
    what = {"conv": "conv", "proj": "P", "weight": "W0"}[least[1]]
    message = (
        f"{named(layers)}: a step of {rates.of(least):g} changes {moved[least]:.1%} of the entries "
        f"of {what} in half precision"
    )
    numbers = {f"{name} of layer {index}": share for (index, name), share in moved.items()}
    return [Finding("updates-rounded", "warning" if rates_given else "info", message, layers, numbers)]


def _gradient_flow(
    model: DiagnosedModel, m: Measurements, rates: Rates, tick: Callable[[str], None]
) -> list[Finding]:
    found: list[Finding] = []
    g = m.gradients
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
        f"{named(layers)}: conv is zero, so that nothing is written yet and P has no gradient; conv's is "
        f"up to {conv:.2g}, "
        f"and after Adam's first step P's is up to {proj:.2g}"
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
        "parameters train; "
        f"unfrozen, it would get {norm:.2g}"
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
    """What the embeddings would get through the targets, by attaching them."""
    with with_config(model.layers.values(), detach_target=False):
        attached = gradients(model, rates, keep=("embeddings",)).kept.get((None, "embeddings"))
    detached, layers = m.gradients.kept.get((None, "embeddings")), tuple(model.layers)
    lost = 0.0
    if attached is not None and detached is not None and bool(attached.any()):
        lost = float((attached - detached).float().norm() / attached.float().norm())
    message = (
        f"{named(layers)}: no gradient flows from the targets into their source; attached, "
        f"{lost:.2%} of the embeddings' comes that way"
    )
    return Finding(
        "target-detached", "warning" if lost > NOTICED else "info", message, layers, {"lost": lost}
    )


def _dominant(g: Gradients) -> int | None:
    """The layer with nearly all of the target generators' gradient, where there are several."""
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
        f"{total:.3g}, "
        f"with its writes off {left:.3g}{moved}"
    )
    return Finding(
        "layer-dominates",
        "severe",
        message,
        (layer,),
        {"share": share, "total": total, "total_without": left},
    )


def _writes(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    found = []
    for index, writes in m.writes.items():
        effect = m.effects.get(index)
        change = None if effect is None else effect.loss
        said = "" if change is None else f"; its writes change the loss by {change}"
        if writes.state_ratio > EXCEEDS_WEIGHT:
            helps = _helps(m) or (
                change is not None and (-change).exceeds(HARM) and m.gradients.loss < m.chance
            )
            safe = next(
                (
                    s.safe
                    for s in m.sweeps
                    if s.name == "eta" and s.safe is not None and s.now is not None and s.safe < s.now
                ),
                None,
            )
            advice = (
                ""
                if safe is None or helps
                else f"; up to eta {safe:.2g} the loss is not above that without writes"
            )
            message = (
                f"layer {index}: a document's writes add up to {writes.state_ratio:.3g} of ‖W0‖{said}{advice}"
            )
            numbers = {
                "state_ratio": writes.state_ratio,
                "loss_change": change and change.loss,
                "safe_eta": safe,
            }
            found.append(
                Finding("writes-too-large", "info" if helps else "severe", message, (index,), numbers)
            )
        elif change is not None and change.exceeds(HARM):
            message = f"layer {index}: its writes change the loss by {change}"
            found.append(
                Finding(
                    "writes-hurt",
                    "warning",
                    message,
                    (index,),
                    {"loss_change": change.loss, "stderr": change.stderr},
                )
            )
        if effect is not None and effect.loss.exceeds(HARM) and effect.few.share > OF_FEW:
            found.append(_few_tokens(index, effect.loss.loss, effect.few))
        if writes.alignment is not None and writes.alignment > ALIGNED and len(writes.by_chunk) > 2:
            growth = "" if writes.growth is None else f", and ‖S‖ grows as chunks^{writes.growth:.2f}"
            message = f"layer {index}: the mean cosine of successive writes is {writes.alignment:.3f}{growth}"
            severity: Severity = "info" if _helps(m) else "warning"
            found.append(
                Finding(
                    "writes-aligned",
                    severity,
                    message,
                    (index,),
                    {"alignment": writes.alignment, "growth": writes.growth},
                )
            )
    clip = config_of(model.module).clip
    undone = [
        i for i, w in m.writes.items() if clip is not None and w.clipped == 1 and w.state_ratio < NO_EFFECT
    ]
    if undone:
        ratio = max(m.writes[i].state_ratio for i in undone)
        message = (
            f"{named(undone)}: every chunk is clipped, and a whole document moves the weight by "
            f"{ratio:.1e} of its norm at most"
        )
        found.append(Finding("clip-at-inference", "warning", message, tuple(undone), {"state_ratio": ratio}))
    return found


def _few_tokens(index: int, loss: float, few: Few) -> Finding:
    message = (
        f"layer {index}: of the {loss:.3g} nats a token that its writes add, {few.share:.0%} is lost at "
        f"{few.count} tokens; "
        f"{few.times} of them are where token {few.token}{'' if few.text is None else f' ({few.text!r})'} "
        "is read"
    )
    return Finding("few-tokens-hurt", "warning", message, (index,), asdict(few))


def _keys(m: Measurements) -> list[Finding]:
    found = []
    for index in m.etas:
        keys = m.keys[index]
        if 0 < keys.effective < FEW_DIRECTIONS:
            others = {
                i: k.effective for i, k in m.keys.items() if i not in m.etas and k.effective >= FEW_DIRECTIONS
            }
            best = sorted(others, key=lambda i: -others[i])[:3]
            better = f"; layers {', '.join(map(str, sorted(best)))} have most" if best else ""
            message = (
                f"layer {index}: the effective rank of its keys is {keys.effective:.1f} of {keys.width}, "
                "and their cosine with each "
                f"other {keys.collision:.2f} (RMS){better}"
            )
            severity: Severity = "info" if _helps(m) else "warning"
            found.append(
                Finding(
                    "keys-collide",
                    severity,
                    message,
                    (index,),
                    {"effective": keys.effective, "collision": keys.collision},
                )
            )
    return found


def _precision(m: Measurements) -> list[Finding]:
    found = []
    low = {
        i: sorted(str(d).removeprefix("torch.") for d in dtypes if torch.finfo(d).bits < 32)
        for i, dtypes in m.states.items()
    }
    if layers := tuple(index for index, names in low.items() if names):
        lost = max(
            (w.lost.state for i, w in m.writes.items() if i in layers and w.lost.state is not None),
            default=None,
        )
        said = "" if lost is None else f", where these writes lose {lost:.1%} of what they add up to"
        message = f"{named(layers)}: the state is kept in {low[layers[0]][0]}{said}"
        found.append(Finding("state-precision", "severe", message, layers, {"lost": lost}))
    hidden = {
        i: w.lost.output
        for i, w in m.writes.items()
        if w.lost.output is not None and w.lost.output > ROUNDED_AWAY
    }
    if hidden:
        message = (
            f"{named(list(hidden))}: rounding takes {max(hidden.values()):.0%} of what the writes "
            "add to the output"
        )
        found.append(
            Finding("compute-precision", "warning", message, tuple(hidden), {"lost": max(hidden.values())})
        )
    return found


def _advice(m: Measurements) -> list[Finding]:
    found = []
    for sweep in m.sweeps:
        what = {"eta": "eta", "init": "an untrained conv's standard deviation"}[sweep.name]
        ends = f"{sweep.points[0].value:.2g} to {sweep.points[-1].value:.2g}"
        if sweep.safe is None:
            message = (
                f"{what}: of {ends}, even {sweep.points[0].value:.2g} raises the loss by "
                f"{sweep.points[0].loss.loss:.2g} nats a token"
            )
        else:
            bound = (
                "is the largest that does not raise the loss"
                if sweep.bounded
                else "and all below do not raise it; no limit was met"
            )
            message = f"{what}: of {ends}, {sweep.safe:.2g} {bound}"
        now = "" if sweep.now is None else f" (now {sweep.now:.2g})"
        found.append(
            Finding(
                "safe-range", "info", message + now, tuple(m.etas), {"sweep": sweep.name, "safe": sweep.safe}
            )
        )
    return found
