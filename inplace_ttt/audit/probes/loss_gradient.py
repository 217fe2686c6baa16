"""Probes of models with `target: gradient` (extension). They compare readings with plain gradient steps.

The targets come from the loss of the whole model, so the probes of a single layer do not apply. All readings
are compared with `GradientRule`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...errors import one_line
from ...layer.overrides import overriding
from ...surgery import disable_ttt
from ..blame import is_the_probes
from ..gradient_readings import (
    Probed,
    Scene,
    batches,
    documents,
    drawn_sizes,
    many_chunks,
    pieces,
    plain,
    saved_session,
    taken_back,
    ways_of_calling,
)
from ..gradient_rule import GradientRule
from ..item import Item, Probe
from ..limits import STEPS
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..whole_model import WholeModel
from .bench import largest_difference
from .circumstances import NARROW
from .twin import twin


def probe_of(item: Item) -> Probe:
    """Returns the probe that decides an item on a model with `target: gradient`."""
    if item.id in LAW:
        return LAW[item.id]
    if item.id in AS_EVER:
        assert item.on_model is not None
        return item.on_model
    return item.by_settings or _not_checked


def _not_checked(whole: WholeModel, expected: Any) -> Outcome:
    raise NotChecked(whole.undrivable)


def plain_error(whole: WholeModel) -> float:
    """Returns the error of one row in one call against plain gradient steps."""
    with Probed.of(whole.lm, whole.seed) as probed:
        (error,) = (error for _, error in plain(probed))
        return error


def declared_rule(whole: WholeModel, expected: Any) -> Outcome:
    errors = {"one row in one call": whole.once(plain_error)}
    return _judged(errors, whole.lm.dtype, "a reading equals plain gradient steps on each chunk's loss")


def target_source(whole: WholeModel, expected: Any) -> Outcome:
    """Names the targets, if a reading has shown that they are those of the settings."""
    error = whole.once(plain_error)
    if not error < STEPS[whole.lm.dtype]:
        raise NotChecked("a reading does not follow the declared rule, which `declared-rule` reports")
    steps = whole.config.steps_per_chunk
    return Outcome(
        "extension",
        f"targets are V = -gain ∂L/∂o of the chunk's own loss, {steps} step{'s' * (steps > 1)} per chunk",
        {"error against plain gradient steps": error},
        STEPS[whole.lm.dtype],
    )


def writes(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the logits of three chunks with those without writes."""
    with Probed.of(whole.lm, whole.seed) as probed:
        ids = probed.ids(1, 3 * probed.chunk)
        on = probed.forward(ids, use_cache=False)
        with disable_ttt(whole.lm):
            effect = largest_difference(on, probed.forward(ids, use_cache=False))
    reach = effect > TOLERANCE
    found = "a chunk's write reaches the chunks after it" if reach else "no write reaches a later chunk"
    return judged(reach, found, {"largest change of a logit by writes": effect}, TOLERANCE)


def causality(whole: WholeModel, expected: Any) -> Outcome:
    """Changes one token and compares the outputs before it, bit by bit."""
    with Probed.of(whole.lm, whole.seed) as probed:
        ids = probed.ids(1, 3 * probed.chunk)
        wanted, worst = probed.forward(ids, use_cache=False), 0.0
        for place in (probed.chunk - 1, probed.chunk, 2 * probed.chunk + 2):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % whole.lm.config.get_text_config().vocab_size
            found = probed.forward(other, use_cache=False)
            worst = max(worst, float((found - wanted)[:, :place].abs().max()))
    text = "no output depends on a later token" if worst == 0 else "an output depends on a later token"
    return judged(worst == 0, text, {"largest change of an earlier logit": worst}, 0)


def _on_this_model(scene: Scene, found: str) -> Probe:
    """Returns a probe that judges the readings of a scene with the audited model."""

    def probe(whole: WholeModel, expected: Any) -> Outcome:
        _require_lawful(whole)
        with Probed.of(whole.lm, whole.seed) as probed:
            return _of_scene(scene, probed, found)

    return probe


def _on_small_model(scene: Scene, found: str) -> Probe:
    """Returns a probe that judges the readings of a scene with a small model of the same settings."""

    def probe(whole: WholeModel, expected: Any) -> Outcome:
        _require_lawful(whole)
        with twin(whole.config, width=NARROW) as model, Probed.of(model.double(), whole.seed) as probed:
            return _of_scene(scene, probed, found)

    return probe


def _of_scene(scene: Scene, probed: Probed, found: str) -> Outcome:
    try:
        errors = dict(scene(probed))
    except Exception as error:  # although it ran in one call
        if is_the_probes(error):
            raise
        return judged(False, f"the model raises {type(error).__name__}: {one_line(error, kind=False)}", {})
    if not errors:
        raise NotChecked("neither several steps per chunk nor a model without position_ids takes packed rows")
    return _judged(errors, probed.lm.dtype, found)


def precisions(whole: WholeModel, expected: Any) -> Outcome:
    """Reads sixteen chunks in one call and in pieces with a small model in each precision."""
    _require_lawful(whole)
    errors = {}
    for dtype in STEPS:
        with twin(whole.config, width=NARROW) as model, Probed.of(model.to(dtype), whole.seed) as probed:
            for name, error in many_chunks(probed):
                # relative to the limit of this precision
                errors[f"{str(dtype).removeprefix('torch.')}, {name}"] = error / STEPS[dtype]
    worst = max(errors, key=lambda name: errors[name])
    found = "plain gradient steps hold in every precision"
    if not errors[worst] < 1:
        found = f"{worst}: the error is {errors[worst]:.2g} times the limit of this precision"
    return judged(errors[worst] < 1, found, errors, 1)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Errors of a packed row of a small model in training mode.

    Attributes:
        outputs: error of the logits.
        gradients: error of the gradient of each parameter of the base, by name.
    """

    outputs: float
    gradients: dict[str, float]


def trained(whole: WholeModel) -> Trained:
    """Trains a small model on a row, and compares it with autograd through plain steps.

    Targets are constants.
    """
    _require_lawful(whole)
    config = dataclasses.replace(whole.config, steps_per_chunk=1)  # several steps cannot be trained
    with twin(config, width=NARROW) as model, Probed.of(model.double(), whole.seed) as probed:
        ids = probed.ids(1, 3 * probed.chunk + 5)
        with overriding(model.modules(), training=True), torch.enable_grad():
            rule = GradientRule(model, probed.config, training=True)
            learning = {n: p for n, p in model.named_parameters() if p.requires_grad and ".ttt." not in n}
            found = model(input_ids=ids, use_cache=False).logits[0]
            given = _gradients(found, learning)
        wanted = rule.logits(ids, graph=True)
        right = _gradients(wanted, learning)
        off = {name: largest_difference(given[name], gradient) for name, gradient in right.items()}
        return Trained(largest_difference(found.detach(), wanted.detach()), off)


def _gradients(logits: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(logits.square().mean(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def in_training(whole: WholeModel, expected: Any) -> Outcome:
    off = whole.once(trained).outputs
    return _judged({"a row in training mode": off}, torch.float64, "training equals plain gradient steps")


def gradient(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the gradients of a row with those through keys, sums and KV cache. Targets are constants."""
    errors = whole.once(trained).gradients
    worst = max(errors, key=lambda name: errors[name])
    found = "gradients are those of first order: the targets are constants"
    if not errors[worst] < STEPS[torch.float64]:
        found = f"the gradient by {worst} differs from that of first order by {errors[worst]:.2g}"
    return judged(errors[worst] < STEPS[torch.float64], found, errors, STEPS[torch.float64])


def _require_lawful(whole: WholeModel) -> None:
    if not whole.once(plain_error) < STEPS[whole.lm.dtype]:
        raise NotChecked("a plain reading does not follow the declared rule, which `declared-rule` reports")


def _judged(errors: dict[str, float], dtype: torch.dtype, found: str) -> Outcome:
    """Returns the outcome for errors by way of reading. The largest error decides."""
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    holds = errors[worst] < STEPS[dtype]
    if not holds:
        off = f"{errors[worst]:.2g} of the writes' effect"
        found = f"{worst}: the logits differ from plain gradient steps by {off}"
    return judged(holds, found, errors, STEPS[dtype])


LAW: dict[str, Probe] = {
    "writes": writes,
    "causality": causality,
    "target-source": target_source,
    "declared-rule": declared_rule,
    "in-pieces": _on_this_model(pieces, "a text in pieces equals plain gradient steps"),
    "in-batches": _on_this_model(batches, "padded and reordered rows each equal plain gradient steps"),
    "document-grid": _on_this_model(documents, "five documents in a row compute the same as alone"),
    "take-back": _on_this_model(taken_back, "tokens that are taken back, and a branch, leave nothing behind"),
    "over-many-chunks": _on_this_model(
        many_chunks, "sixteen chunks, and larger ones, equal plain gradient steps"
    ),
    "ways-of-calling": _on_small_model(
        ways_of_calling, "in every way of calling it, the model takes plain steps"
    ),
    "drawn-sizes": _on_small_model(drawn_sizes, "rows, chunks and documents of drawn sizes take plain steps"),
    "saved-session": _on_small_model(saved_session, "a saved session goes on as it was"),
    "precisions": precisions,
    "in-training": in_training,
    "gradient": gradient,
}
"""Probes by the id of the item that they decide."""

AS_EVER = ("slow-weights", "state-place", "layer-spacing", "layer-offset", "layers-in-range", "extensions")
"""Items whose probes are the same for every model."""
