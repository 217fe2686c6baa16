"""Probes of training mode. They compare a whole model's outputs and gradients with the declared rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InPlaceTTTError
from ...layer.overrides import overriding
from ..limits import gradient_limit, limits
from ..outcome import NotChecked, Outcome, judged
from ..prepared import Reading
from ..probed import Probed
from ..readings import padded_training_rows, recomputing, training_rows
from ..recorded_errors import gradient_errors
from ..whole_model import WholeModel
from .circumstances import NARROW, judged_errors, lawful_layers, visible
from .twin import twin


@dataclass(frozen=True)
class Trained:
    """Errors of packed and padded rows in training mode.

    Attributes:
        outputs: by reading and layer.
        gradients: by reading, layer and tensor, for layers whose outputs are right.
    """

    outputs: dict[str, dict[int, float]]
    gradients: dict[str, dict[int, dict[str, float]]]


def trained(whole: WholeModel) -> Trained:
    """Measures training mode on the layers that follow their declared rule in evaluation mode.

    Raises:
        NotChecked: if no layer follows it on these rows.
    """
    found, lawful = Trained({}, {}), lawful_layers(whole)
    with Probed.of(whole.lm, whole.seed) as small, small.with_chunks_of(2 * small.chunk + 5) as large:
        _train(large, padded_training_rows, lawful, found)
    with Probed.of(whole.lm, whole.seed) as small:
        _train(small, training_rows, lawful, found)
        if whole.is_small:
            _recompute(small, lawful, found)
    if not whole.is_small:
        with (
            twin(visible(whole.config), width=NARROW) as model,
            Probed.of(model.to(whole.lm.dtype), whole.seed) as small,
        ):
            _recompute(small, list(small.layers), found)
    if not found.outputs:
        raise NotChecked(
            "rows of documents do not follow the declared rule in evaluation either, which other items report"
        )
    return found


def _recompute(probed: Probed, lawful: Sequence[int], found: Trained) -> None:
    """Trains with gradient checkpointing.

    Families that do not pass keyword arguments on refuse gradient checkpointing, and are skipped.
    """
    with recomputing(probed.lm) as takes_it, suppress(InPlaceTTTError):
        if takes_it:
            _train(probed, training_rows, lawful, found, ", recomputed in the backward pass")


def _train(
    probed: Probed, scene: Callable[[Probed], Reading], lawful: Sequence[int], found: Trained, how: str = ""
) -> None:
    """Reads one scene in evaluation mode, then in training mode with gradients."""
    lm, limit = probed.lm, limits(probed.lm.dtype).outputs
    name, record, rows = scene(probed)
    known = [i for i, off in probed.errors(record, rows).items() if i in lawful and off < limit]
    if not known:
        return
    learner = Probed(lm, probed.config, probed.seed, training=True)
    # the embeddings are included, so every layer's input has a gradient
    learning = [lm.get_input_embeddings(), *probed.layers.values()]
    parameters = [p for module in learning for p in module.parameters() if p.is_floating_point()]
    with (
        overriding(lm.modules(), training=True),
        overriding(parameters, requires_grad=True),
        torch.enable_grad(),
    ):
        name, record, rows = scene(learner)
        name += how
        found.outputs[name] = outputs = {
            i: off for i, off in learner.errors(record, rows).items() if i in known
        }
        layers = {i: learner.layers[i] for i, off in outputs.items() if off < limit}
        if layers:
            found.gradients[name] = gradient_errors(record, layers, rows, learner.rule)


def in_training(whole: WholeModel, expected: Any) -> Outcome:
    return judged_errors(
        whole.once(trained).outputs, limits(whole.lm.dtype).outputs, "training follows the declared rule"
    )


def gradient(whole: WholeModel, expected: Any) -> Outcome:
    """Compares gradients in training with those of the declared rule, on rows of up to nine chunks.

    They are the gradients by conv, P, W0 and the down-projection's input.
    """
    errors = {
        (name, layer, tensor): off
        for name, layers in whole.once(trained).gradients.items()
        for layer, tensors in layers.items()
        for tensor, off in tensors.items()
    }
    if not errors:
        raise NotChecked(
            "in training the outputs themselves do not follow the declared rule, which `in-training` reports"
        )
    limit = gradient_limit(whole.lm.dtype, whole.config)
    worst = max(errors, key=lambda key: errors[key])
    found = "the gradient is that of the whole scan"
    if errors[worst] >= limit:
        found = (
            f"{worst[0]}: the gradient by {worst[2]} in layer {worst[1]} differs from that of the declared "
            f"rule by {errors[worst]:.0%}"
        )
    numbers = {f"{name}, layer {layer}, {tensor}": off for (name, layer, tensor), off in errors.items()}
    return judged(errors[worst] < limit, found, numbers, limit)
