"""Probes of where the rule has to hold: in training, in batches, in pieces, over many chunks, in half
precision.

A converted model runs as a user runs it, and each TTT layer's outputs are held against what it declares
(`DeclaredRule`). The other items name what is wrong with a rule; these decide whether anything is, also where
nobody thought of a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...config import InPlaceTTTConfig
from ...errors import InPlaceTTTError, one_line
from ...layer.overrides import overriding
from ..blame import is_the_probes
from ..limits import LIMITS, gradient_limit, limits, room
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..probed import Probed, Reading, Scene
from ..prompts import prompt_deviations
from ..readings import (
    batches,
    documents,
    many_chunks,
    many_writes,
    padded_training_rows,
    pieces,
    plain,
    recomputing,
    taken_back,
    training_rows,
)
from ..recording import gradient_errors
from ..sizes import drawn_sizes
from ..ways import ways_of_calling
from ..whole_model import WholeModel
from .bench import Bench, error
from .twin import twin

_LEAST_ETA = 1e-3
"""Targets that make up for a smaller one are beyond float16."""
_NARROW = 32
"""Width of the small model that reads long texts, and in every precision."""
_FEW, _MANY = 6, 70
"""Chunks after which a state that is rounded with each write is off by more than targets are."""
_BEYOND_FLOAT16 = {1e-5: (48.0, 20), 1e3: (1.0, 1)}
"""η at which what is written is above or below what float16 has, how much larger embeddings and keys are
then, and how much further off

a sound layer may be: large numbers amplify rounding, and what leaves the range is infinite."""


def declared_rule(whole: WholeModel, expected: Any) -> Outcome:
    """A plain reading by the first TTT layer, which `every-layer` holds the others against; what every layer
    writes at a prompt's end."""
    errors, settings = whole.once(plain_deviations), whole.config.prompt_write
    first = next(iter(errors))
    readings = {"one row in one call": {first: errors[first]}}
    if settings is not None:
        readings |= prompt_deviations(whole.lm, settings, whole.seed)
    return _judged(readings, limits(whole.lm.dtype).outputs, "a reading computes what the settings declare")


def in_batches(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, batches, "padded, packed and reordered rows each compute what they declare")


def in_pieces(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, pieces, "a text in pieces computes what is declared for the whole")


def take_back(whole: WholeModel, expected: Any) -> Outcome:
    return _held(
        whole, taken_back, "tokens that are taken back, and a session's branch, leave nothing behind"
    )


def packed_documents(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, documents, "five documents in a row compute what they do alone")


def over_many_chunks(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, many_chunks, "sixteen chunks, and larger ones, compute what is declared")


def called_otherwise(whole: WholeModel, expected: Any) -> Outcome:
    """A large model's settings are read with a small one, since single tokens cost a large one much."""
    found = "however it is called, the model computes what it declares"
    if whole.is_small:
        return _held(whole, ways_of_calling, found)
    return _of_a_small_model(whole, ways_of_calling, found)


def at_drawn_sizes(whole: WholeModel, expected: Any) -> Outcome:
    return _of_a_small_model(
        whole, drawn_sizes, "rows, chunks, documents and texts of drawn sizes compute it"
    )


def _of_a_small_model(whole: WholeModel, scene: Scene, found: str) -> Outcome:
    """A small model with these settings and of this dtype, which is cheap to read with."""
    limit = limits(whole.lm.dtype).outputs
    with (
        twin(_visible(whole.config), width=_NARROW) as model,
        Probed.of(model.to(whole.lm.dtype), whole.seed) as probed,
    ):
        (usual,) = probed.deviations(plain).values()
        if max(usual.values()) >= limit:
            raise NotChecked("a plain reading is not what is declared, which other items report")
        return _judged(probed.deviations(scene), limit, found)


@dataclass(frozen=True)
class Trained:
    """Of packed and padded rows in training: by way and layer how far outputs are off, and by tensor
    gradients where outputs are not."""

    outputs: dict[str, dict[int, float]]
    gradients: dict[str, dict[int, dict[str, float]]]


def trained(whole: WholeModel) -> Trained:
    """Of the layers that compute in evaluation, in the same rows, what they declare."""
    found, lawful = Trained({}, {}), _lawful(whole)
    with Probed.of(whole.lm, whole.seed) as small, small.with_larger_chunks() as large:
        _train(large, padded_training_rows, lawful, found)
    with Probed.of(whole.lm, whole.seed) as small:
        _train(small, training_rows, lawful, found)
        if whole.is_small:
            _recompute(small, lawful, found)
    if not whole.is_small:
        with (
            twin(_visible(whole.config), width=_NARROW) as model,
            Probed.of(model.to(whole.lm.dtype), whole.seed) as small,
        ):
            _recompute(small, list(small.layers), found)
    if not found.outputs:
        raise NotChecked(
            "rows of documents are not what is declared in evaluation either, which other items report"
        )
    return found


def _recompute(probed: Probed, lawful: Sequence[int], found: Trained) -> None:
    """With gradient checkpointing, which is refused where a family passes no keyword arguments on."""
    with recomputing(probed.lm) as takes_it, suppress(InPlaceTTTError):
        if takes_it:
            _train(probed, training_rows, lawful, found, ", recomputed in the backward pass")


def _train(
    probed: Probed, scene: Callable[[Probed], Reading], lawful: Sequence[int], found: Trained, how: str = ""
) -> None:
    """One way of reading, first in evaluation, then in training, with gradients."""
    lm, limit = probed.lm, limits(probed.lm.dtype).outputs
    name, record, rows = scene(probed)
    known = [i for i, off in probed.errors(record, rows).items() if i in lawful and off < limit]
    if not known:
        return
    learner = Probed(lm, probed.config, probed.seed, training=True)
    # the embeddings, so that every layer's input has a gradient
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
    return _judged(
        whole.once(trained).outputs, limits(whole.lm.dtype).outputs, "training computes what is declared"
    )


def gradient(whole: WholeModel, expected: Any) -> Outcome:
    """By conv, P, W0 and the down-projection's input, in training, of rows of up to nine chunks; against the
    declared rule's."""
    errors = {
        (name, layer, tensor): off
        for name, layers in whole.once(trained).gradients.items()
        for layer, tensors in layers.items()
        for tensor, off in tensors.items()
    }
    if not errors:
        raise NotChecked(
            "in training the outputs themselves are not what is declared, which `in-training` reports"
        )
    limit = gradient_limit(whole.lm.dtype, whole.config)
    worst = max(errors, key=lambda key: errors[key])
    found = "the gradient is that of the whole scan"
    if errors[worst] >= limit:
        found = (
            f"{worst[0]}: the gradient by {worst[2]} in layer {worst[1]} is {errors[worst]:.0%} off "
            "that of what is declared"
        )
    numbers = {f"{name}, layer {layer}, {tensor}": off for (name, layer, tensor), off in errors.items()}
    return judged(errors[worst] < limit, found, numbers, limit)


def precisions(whole: WholeModel, expected: Any) -> Outcome:
    """A small model with these settings in each precision, over many chunks in one call and in pieces; what
    it then holds.

    In float16 also by an η at which what is written leaves that precision's range.
    """
    found: dict[torch.dtype, Outcome] = {}
    for dtype in LIMITS:
        try:
            found[dtype] = _in_precision(whole, dtype)
        except Exception as error:
            if is_the_probes(error):
                raise
            found[dtype] = judged(
                False, f"it raises {type(error).__name__}: {one_line(error, kind=False)}", {}
            )
    numbers = {
        f"{_named(dtype)}, {name}": value
        for dtype, outcome in found.items()
        for name, value in outcome.numbers.items()
    }
    failed = [dtype for dtype, outcome in found.items() if outcome.verdict == "deviates"]
    if len(failed) == len(found):
        raise NotChecked("what is declared holds in no precision, which other items report")
    if failed:
        return judged(
            False, f"in {_named(failed[0])}, {found[failed[0]].found}", numbers, found[failed[0]].tolerance
        )
    return judged(
        True,
        f"what is declared holds in {', '.join(map(_named, found))}",
        numbers,
        limits(torch.bfloat16).small_model,
    )


def _in_precision(whole: WholeModel, dtype: torch.dtype) -> Outcome:
    limit, usual = limits(dtype), _visible(whole.config)
    errors: dict[str, dict[int, float]] = {}
    with twin(usual, width=_NARROW) as model, Probed.of(model.to(dtype), whole.seed) as probed:
        errors |= probed.deviations(plain)
        (name, record, texts), off = many_writes(probed, _MANY)
        errors[name] = probed.errors(record, texts)
        if whole.config.write_norm is None:
            errors[f"what {_MANY} chunks wrote"] = {
                i: value * limit.small_model / limit.state for i, value in off.items()
            }
    # which bound what is written
    if dtype == torch.float16 and whole.config.write_norm is None and whole.config.clip is None:
        for eta, (louder, wider) in _BEYOND_FLOAT16.items():
            with twin(dataclasses.replace(usual, eta=eta), width=_NARROW) as model:
                model.get_input_embeddings().weight.data.mul_(louder)
                for layer in model.model.layers:
                    layer.mlp.up_proj.weight.data.mul_(louder)
                with Probed.of(model.to(dtype), whole.seed) as probed:
                    share = limit.small_model / (wider * limit.outputs)
                    (name, record, texts), _ = many_writes(probed, _FEW)
                    errors[f"{name}, η {eta:g}"] = {
                        i: share * value for i, value in probed.errors(record, texts).items()
                    }
    return _judged(errors, limit.small_model * room(dtype, whole.config), "")


def _visible(config: InPlaceTTTConfig) -> InPlaceTTTConfig:
    """The settings with an η that targets in float16 can make up for."""
    return dataclasses.replace(config, eta=max(config.eta_of(0), _LEAST_ETA))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_in_training(bench: Bench, expected: Any) -> Outcome:
    """One layer: what its writes change in training, against evaluation."""
    x, target = bench.tiled(3 * bench.chunk + 5), bench.scale * bench.units(3 * bench.chunk + 5)
    right = bench.response(x, target)
    with bench.mode(True):
        off = error(bench.response(x, target), right)
    found = (
        "training computes what evaluation does"
        if off < TOLERANCE
        else f"training reads something {off:.0%} off"
    )
    return judged(off < TOLERANCE, found, {"training against evaluation": off}, TOLERANCE)


def layer_over_many_chunks(bench: Bench, expected: Any) -> Outcome:
    """One layer: what each of fifteen chunks with the same keys reads of the first, by the size of what the
    second reads."""
    x = bench.tiled(16 * bench.chunk)
    effect = bench.response(x, bench.middle(len(x), 0)).split(bench.chunk)
    reads = [bench.share(part) / bench.diluted(number) for number, part in enumerate(effect) if number]
    off = max(abs(read - 1) for read in reads)
    found = (
        "a write is read by fifteen chunks alike"
        if off < TOLERANCE
        else f"one of fifteen chunks reads {off:.0%} more or less"
    )
    return judged(off < TOLERANCE, found, {"read of the first chunk's write, by chunk": reads}, TOLERANCE)


def _lawful(whole: WholeModel) -> list[int]:
    """The TTT layers whose plain reading is what they declare."""
    limit = limits(whole.lm.dtype).outputs
    found = [i for i, error in whole.once(plain_deviations).items() if error < limit]
    if not found:
        raise NotChecked("a plain reading is not what is declared, which other items report")
    return found


def plain_deviations(whole: WholeModel) -> dict[int, float]:
    """By layer, how far one row in one call is from what is declared."""
    with Probed.of(whole.lm, whole.seed) as probed:
        (errors,) = probed.deviations(plain).values()
    return errors


def _held(whole: WholeModel, scene: Scene, found: str) -> Outcome:
    lawful = _lawful(whole)
    with Probed.of(whole.lm, whole.seed) as probed:
        try:
            errors = {
                name: {i: by_layer[i] for i in lawful} for name, by_layer in probed.deviations(scene).items()
            }
        except Exception as error:  # in one call it ran
            if is_the_probes(error):
                raise
            return judged(
                False, f"the model raises {type(error).__name__}: {one_line(error, kind=False)}", {}
            )
    if not errors:
        raise NotChecked("the model takes no position_ids, so that a row is one document")
    return _judged(errors, limits(whole.lm.dtype).outputs, found)


def _judged(errors: dict[str, dict[int, float]], limit: float, found: str) -> Outcome:
    error, name, layer = max(
        (float("inf") if e != e else e, name, i)
        for name, by_layer in errors.items()
        for i, e in by_layer.items()
    )
    numbers = {name: max(by_layer.values()) for name, by_layer in errors.items()}
    if error >= limit:
        found = (
            f"{name}, layer {layer} gives outputs that are {error:.2g} of what is read off what its "
            "settings declare"
        )
    return judged(error < limit, found, numbers, limit)
