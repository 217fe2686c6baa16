"""Probes of models with `target: gradient` (extension), apart from those that all models share.

The targets come from the loss of the whole model, so the probes of a single layer do not apply. Whole
readings are compared with `GradientRule`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...layer.overrides import overriding
from ...surgery import disable_ttt
from ..gradient_rule import GradientRule
from ..item import Item, Probe
from ..limits import STEPS
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..probed import Stepped
from ..whole_model import WholeModel
from .bench import largest_difference
from .circumstances import NARROW, lawful_layers, plain_deviations
from .twin import twin


def probe_of(item: Item) -> Probe:
    """Returns the probe that decides an item on a model with `target: gradient`."""
    if item.id in LAW:
        return LAW[item.id]
    if item.id in SHARED:
        assert item.on_model is not None
        return item.on_model
    return item.by_settings or not_checked


def not_checked(whole: WholeModel, expected: Any) -> Outcome:
    raise NotChecked(whole.undrivable)


def target_source(whole: WholeModel, expected: Any) -> Outcome:
    """Names the targets, if a reading has shown that they are those of the settings."""
    lawful_layers(whole)
    steps = whole.config.steps_per_chunk
    return Outcome(
        "extension",
        f"targets are V = -gain ∂L/∂o of the chunk's own loss, {steps} step{'s' * (steps > 1)} per chunk",
        {"error against plain gradient steps": whole.once(plain_deviations)[0]},
        STEPS[whole.lm.dtype],
    )


def writes(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the logits of three chunks with those without writes."""
    with Stepped.of(whole.lm, whole.seed) as probed:
        ids = probed.ids(1, 3 * probed.chunk)
        on = probed.forward(ids, use_cache=False).logits
        with disable_ttt(whole.lm):
            effect = largest_difference(on, probed.forward(ids, use_cache=False).logits)
    reach = effect > TOLERANCE
    found = "a chunk's write reaches the chunks after it" if reach else "no write reaches a later chunk"
    return judged(reach, found, {"largest change of a logit by writes": effect}, TOLERANCE)


def causality(whole: WholeModel, expected: Any) -> Outcome:
    """Changes one token and compares the outputs before it, bit by bit."""
    with Stepped.of(whole.lm, whole.seed) as probed:
        ids = probed.ids(1, 3 * probed.chunk)
        wanted, worst = probed.forward(ids, use_cache=False).logits, 0.0
        for place in (probed.chunk - 1, probed.chunk, 2 * probed.chunk + 2):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % whole.lm.config.get_text_config().vocab_size
            found = probed.forward(other, use_cache=False).logits
            worst = max(worst, float((found - wanted)[:, :place].abs().max()))
    text = "no output depends on a later token" if worst == 0 else "an output depends on a later token"
    return judged(worst == 0, text, {"largest change of an earlier logit": worst}, 0)


def trained(whole: WholeModel) -> dict[str, float]:
    """Trains a small model on a row, and compares it with autograd through plain steps.

    Targets are constants.

    Returns:
        The error of the logits, under "", and that of the gradient of each parameter of the base.
    """
    lawful_layers(whole)
    config = dataclasses.replace(whole.config, steps_per_chunk=1)  # several steps cannot be trained
    with (
        twin(config, width=NARROW) as model,
        Stepped.of(model.double(), whole.seed) as probed,
        torch.enable_grad(),
    ):
        ids = probed.ids(1, 3 * probed.chunk + 5)
        with overriding(model.modules(), training=True):
            rule = GradientRule(model, probed.config, training=True)
            learning = {n: p for n, p in model.named_parameters() if p.requires_grad and ".ttt." not in n}
            found = model(input_ids=ids, use_cache=False).logits[0]
            given = _gradients(found, learning)
        wanted = rule.logits(ids, graph=True)
        right = _gradients(wanted, learning)
        off = {name: largest_difference(given[name], gradient) for name, gradient in right.items()}
        return {"": largest_difference(found.detach(), wanted.detach()), **off}


def _gradients(logits: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(logits.square().mean(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def in_training(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the logits of a row in training mode with those of plain gradient steps."""
    off, limit = whole.once(trained)[""], STEPS[torch.float64]
    found = "training equals plain gradient steps"
    if not off < limit:
        found = f"in training mode the logits differ from those of plain gradient steps by {off:.2g}"
    return judged(off < limit, found, {"a row in training mode": off}, limit)


def gradient(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the gradients of a row with those through keys, sums and KV cache. Targets are constants."""
    errors, limit = {name: off for name, off in whole.once(trained).items() if name}, STEPS[torch.float64]
    worst = max(errors, key=lambda name: errors[name])
    found = "gradients are those of first order: the targets are constants"
    if not errors[worst] < limit:
        found = f"the gradient by {worst} differs from that of first order by {errors[worst]:.2g}"
    return judged(errors[worst] < limit, found, errors, limit)


LAW: dict[str, Probe] = {
    "writes": writes,
    "causality": causality,
    "target-source": target_source,
    "in-training": in_training,
    "gradient": gradient,
}
"""Probes for these targets alone, by the id of the item that they decide."""

SHARED = (
    "slow-weights",
    "state-place",
    "layer-spacing",
    "layer-offset",
    "layers-in-range",
    "extensions",
    "declared-rule",
    "in-pieces",
    "in-batches",
    "document-grid",
    "take-back",
    "over-many-chunks",
    "ways-of-calling",
    "drawn-sizes",
    "saved-session",
    "precisions",
)
"""Items whose probes are the same for every model."""
