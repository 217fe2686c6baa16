"""Turns measurements into findings."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .diagnosed_model import DiagnosedModel
from .fault_rules import faults, not_finite, weights_not_finite
from .findings import Finding, Severity, named
from .gradient_rules import gradient_flow_findings
from .gradients import Rates
from .measurements import Measurements
from .write_rules import ROUNDED_AWAY, key_findings, precision_findings, safe_ranges, write_findings

EXPLODES, RISES = 0.5, 0.1
"""Rises of the loss by the first step, in nats: at the first it is severe, at the second a warning."""
CONSTANT = 1e-3
"""Smallest fraction of a source's square that is not its mean. Below it the source counts as constant."""
ONE_DIRECTION = 1.5
"""Largest participation ratio that counts as one direction."""
SLOPE_NOISE = {16: 0.05, 32: 1e-3, 64: 1e-6}
"""Noise of a slope of the loss in nats, by the bits of a dtype; smaller differences are ignored."""


def findings_of(
    model: DiagnosedModel,
    m: Measurements,
    rates: Rates,
    tick: Callable[[str], None],
    *,
    rates_given: bool,
    float32_masters: bool,
) -> list[Finding]:
    """Returns every finding, and makes the measurements that only some findings need.

    Args:
        model: the model and its rows.
        m: the measurements.
        rates: learning rates of Adam's first step.
        tick: called with a title before each pass.
        rates_given: True if the caller chose the rates.
        float32_masters: True if the optimizer keeps parameters in float32. No step is then lost to rounding.
    """
    broken = weights_not_finite(model)
    if not math.isfinite(m.gradients.loss):
        return [*(broken or [not_finite(model, m)]), *precision_findings(m)]
    flow = gradient_flow_findings(model, m, rates, tick)
    named_already = {finding.id for finding in flow}
    made = [
        finding
        for finding in (*_targets(m), *_no_keys(m), *_slopes(model, m))
        if finding.id not in named_already
    ]
    steps = [*_first_step(m, rates), *([] if float32_masters else _rounded(m, rates, rates_given))]
    # Embeddings of zero make every layer's keys zero, and Adam's first step is then meaningless.
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
        for finding in precision_findings(m)
        if finding.id != "compute-precision" or not set(finding.layers) <= small
    ]
    # Detached keys also cut the gradient of the layers below, so one layer seems to dominate.
    if any(finding.id == "keys-detached" for finding in planted):
        flow = [finding for finding in flow if finding.id != "layer-dominates"]
    return [
        *broken,
        *flow,
        *made,
        *planted,
        *steps,
        *write_findings(model, m),
        *key_findings(m),
        *precision,
        *safe_ranges(m),
    ]


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
            id, message = "source-zero", "the target's source is zero at every token"
        elif target.spread < CONSTANT:
            id, message = (
                "source-constant",
                f"{target.spread:.1e} of the square of the target's source is not its mean over tokens",
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
    message = "the down-projection's input is zero at every token, so nothing is written or read"
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
        f"{named(s.layers)}: the slope of the loss with ln ‖P‖ is {s.differences:.2g} ± {s.error:.1g} nats "
        f"by finite differences, and {s.autograd:.2g} by autograd"
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
        f"the loss goes from {before:.2f} to {whole:.2f}, at a tenth of them to {gentle:.2f}"
    )
    severity: Severity = "warning" if whole - before < EXPLODES else "severe"
    numbers = {"before": before, "after": whole, "at_a_tenth": gentle}
    return [Finding("step-too-large", severity, message, tuple(m.etas), numbers)]


def _rounded(m: Measurements, rates: Rates, rates_given: bool) -> list[Finding]:
    """Returns a finding on the parameter among conv, P and W0 that Adam's first step changes least.

    Embeddings are left out, since the fraction of their entries that change depends on rare tokens.
    """
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
