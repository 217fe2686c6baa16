"""Rules for the size, harm and direction of writes, for keys and precision, and for safe ranges."""

from __future__ import annotations

from dataclasses import asdict

import torch

from ..surgery import config_of
from .diagnosed_model import DiagnosedModel
from .fault_rules import NO_EFFECT
from .findings import Finding, Severity, named
from .measurements import Measurements
from .write_effects import HARM, Few

EXCEEDS_WEIGHT, TENTH_OF_WEIGHT = 1.0, 0.1
"""Values of η‖S‖/‖W0‖ after a document: as large as the weight, and large enough for a closer look."""
OF_FEW = 0.5
"""Fraction of the added loss in a hundredth of the tokens above which a few tokens bear the harm."""
ALIGNED = 0.9
"""Mean cosine of successive writes above which they repeat each other."""
FEW_DIRECTIONS = 10.0
"""Participation ratio of the keys below which they collide.

In SmolLM2-135M the last two layers have 2 to 7, most others 40 or more.
"""
ROUNDED_AWAY = 0.5
"""Fraction of the writes' part of an output lost to rounding, or of entries that a step changes."""


def write_findings(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    """Returns the findings on the size and direction of writes, and on the loss that they cause."""
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
    text = "" if few.text is None else f" ({few.text!r})"
    message = (
        f"layer {index}: of the {loss:.3g} nats per token that its writes add, {few.share:.0%} is lost at "
        f"{few.count} tokens; {few.times} of them are where token {few.token}{text} is read"
    )
    return Finding("few-tokens-hurt", "warning", message, (index,), asdict(few))


def key_findings(m: Measurements) -> list[Finding]:
    """Returns a finding for each TTT layer whose keys span few directions."""
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
                f"and their cosine with each other {keys.collision:.2f} (RMS){better}"
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


def precision_findings(m: Measurements) -> list[Finding]:
    """Returns the findings on the dtype of the state and on the rounding of outputs."""
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
        said = "" if lost is None else f", where these writes lose {lost:.1%} of their sum"
        message = f"{named(layers)}: the state is kept in {low[layers[0]][0]}{said}"
        found.append(Finding("state-precision", "severe", message, layers, {"lost": lost}))
    hidden = {
        i: w.lost.output
        for i, w in m.writes.items()
        if w.lost.output is not None and w.lost.output > ROUNDED_AWAY
    }
    if hidden:
        message = (
            f"{named(list(hidden))}: rounding removes {max(hidden.values()):.0%} of the writes' "
            "part of the output"
        )
        found.append(
            Finding("compute-precision", "warning", message, tuple(hidden), {"lost": max(hidden.values())})
        )
    return found


def safe_ranges(m: Measurements) -> list[Finding]:
    """Returns the safe range that each sweep found."""
    found = []
    for sweep in m.sweeps:
        what = {"eta": "eta", "init": "an untrained conv's standard deviation"}[sweep.name]
        ends = f"{sweep.points[0].value:.2g} to {sweep.points[-1].value:.2g}"
        if sweep.safe is None:
            message = (
                f"{what}: of {ends}, even {sweep.points[0].value:.2g} raises the loss by "
                f"{sweep.points[0].loss.loss:.2g} nats per token"
            )
        else:
            bound = (
                "is the largest that does not raise the loss"
                if sweep.bounded
                else "and all below do not raise the loss; no limit was found"
            )
            message = f"{what}: of {ends}, {sweep.safe:.2g} {bound}"
        now = "" if sweep.now is None else f" (now {sweep.now:.2g})"
        found.append(
            Finding(
                "safe-range", "info", message + now, tuple(m.etas), {"sweep": sweep.name, "safe": sweep.safe}
            )
        )
    return found


def _helps(m: Measurements) -> bool:
    """Returns True if all writes together lower the loss of a model that is better than chance."""
    change = m.all_writes
    return change is not None and (-change).exceeds(HARM) and m.gradients.loss < m.chance
