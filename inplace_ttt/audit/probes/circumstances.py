"""Probes of the circumstances in which the model must compute its rule.

They are batches, pieces, many chunks and half precision. A converted model runs as a user runs it, and each
TTT layer's outputs are compared with its declared rule (`DeclaredRule`). The other items look for one fault
each. The items here detect any fault, whether or not another item can name it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...config import InPlaceTTTConfig
from ...errors import one_line
from ..blame import is_the_probes
from ..limits import LIMITS, limits, room
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..probed import Probed, Scene
from ..prompts import prompt_deviations
from ..readings import (
    batches,
    documents,
    many_chunks,
    many_writes,
    pieces,
    plain,
    taken_back,
)
from ..sizes import drawn_sizes
from ..ways import ways_of_calling
from ..whole_model import WholeModel
from .bench import Bench, error
from .twin import twin

_LEAST_ETA = 1e-3
"""Smallest η of the small model. With a smaller η, the targets would leave the range of float16."""
NARROW = 32
"""Width of the small model that reads long texts, and that runs in every precision."""
_FEW, _MANY = 6, 70
"""Numbers of chunks for the readings in half precision.

If the state is rounded at each write, its error after `_MANY` chunks exceeds the error of the targets.
"""
_BEYOND_FLOAT16 = {1e-5: (48.0, 20), 1e3: (1.0, 1)}
"""For each η, the factor on embeddings and keys, and the factor on the limit of a correct layer.

With these η the writes are below or above the range of float16. The limit is wider because large numbers
amplify rounding, and values outside the range become infinite.
"""


def declared_rule(whole: WholeModel, expected: Any) -> Outcome:
    """Compares a plain reading by the first TTT layer with its declared rule.

    The item `every-layer` compares the other layers. With `prompt_write`, the writes of every layer at a
    prompt's end are compared too.
    """
    errors, settings = whole.once(plain_deviations), whole.config.prompt_write
    first = next(iter(errors))
    readings = {"one row in one call": {first: errors[first]}}
    if settings is not None:
        readings |= prompt_deviations(whole.lm, settings, whole.seed)
    return judged_errors(readings, limits(whole.lm.dtype).outputs, "a reading follows the declared rule")


def in_batches(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, batches, "padded, packed and reordered rows each follow the declared rule")


def in_pieces(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, pieces, "a text in pieces follows the declared rule")


def take_back(whole: WholeModel, expected: Any) -> Outcome:
    return _held(
        whole, taken_back, "tokens that are taken back, and a session's branch, leave nothing behind"
    )


def packed_documents(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, documents, "five documents in a row compute the same as alone")


def over_many_chunks(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, many_chunks, "sixteen chunks, and larger ones, follow the declared rule")


def called_otherwise(whole: WholeModel, expected: Any) -> Outcome:
    """Calls the model in every way that users have.

    A large model is replaced by a small model with the same settings, because single tokens through a large
    model are slow.
    """
    found = "in every way of calling it, the model follows the declared rule"
    if whole.is_small:
        return _held(whole, ways_of_calling, found)
    return _of_a_small_model(whole, ways_of_calling, found)


def at_drawn_sizes(whole: WholeModel, expected: Any) -> Outcome:
    return _of_a_small_model(
        whole, drawn_sizes, "rows, chunks, documents and texts of drawn sizes follow the declared rule"
    )


def _of_a_small_model(whole: WholeModel, scene: Scene, found: str) -> Outcome:
    """Judges the readings of a scene with a small model that has these settings and this dtype.

    Raises:
        NotChecked: if even its plain reading differs from the declared rule.
    """
    limit = limits(whole.lm.dtype).outputs
    with (
        twin(visible(whole.config), width=NARROW) as model,
        Probed.of(model.to(whole.lm.dtype), whole.seed) as probed,
    ):
        (usual,) = probed.deviations(plain).values()
        if max(usual.values()) >= limit:
            raise NotChecked("a plain reading does not follow the declared rule, which other items report")
        return judged_errors(probed.deviations(scene), limit, found)


def precisions(whole: WholeModel, expected: Any) -> Outcome:
    """Reads many chunks in one call and in pieces with a small model in each precision, and checks its state.

    The small model has the settings of the audited one. In float16 it also reads with values of η whose
    writes leave the range of float16.
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
        raise NotChecked("the declared rule holds in no precision, which other items report")
    if failed:
        return judged(
            False, f"in {_named(failed[0])}, {found[failed[0]].found}", numbers, found[failed[0]].tolerance
        )
    return judged(
        True,
        f"the declared rule holds in {', '.join(map(_named, found))}",
        numbers,
        limits(torch.bfloat16).small_model,
    )


def _in_precision(whole: WholeModel, dtype: torch.dtype) -> Outcome:
    limit, usual = limits(dtype), visible(whole.config)
    errors: dict[str, dict[int, float]] = {}
    with twin(usual, width=NARROW) as model, Probed.of(model.to(dtype), whole.seed) as probed:
        errors |= probed.deviations(plain)
        (name, record, texts), off = many_writes(probed, _MANY)
        errors[name] = probed.errors(record, texts)
        if whole.config.write_norm is None:
            errors[f"the writes of {_MANY} chunks"] = {
                i: value * limit.small_model / limit.state for i, value in off.items()
            }
    # with a write norm or a clip, the writes cannot leave the range
    if dtype == torch.float16 and whole.config.write_norm is None and whole.config.clip is None:
        for eta, (louder, wider) in _BEYOND_FLOAT16.items():
            with twin(dataclasses.replace(usual, eta=eta), width=NARROW) as model:
                model.get_input_embeddings().weight.data.mul_(louder)
                for layer in model.model.layers:
                    layer.mlp.up_proj.weight.data.mul_(louder)
                with Probed.of(model.to(dtype), whole.seed) as probed:
                    share = limit.small_model / (wider * limit.outputs)
                    (name, record, texts), _ = many_writes(probed, _FEW)
                    errors[f"{name}, η {eta:g}"] = {
                        i: share * value for i, value in probed.errors(record, texts).items()
                    }
    return judged_errors(errors, limit.small_model * room(dtype, whole.config), "")


def visible(config: InPlaceTTTConfig) -> InPlaceTTTConfig:
    """Returns the settings with an η of at least `_LEAST_ETA`."""
    return dataclasses.replace(config, eta=max(config.eta_of(0), _LEAST_ETA))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_in_training(bench: Bench, expected: Any) -> Outcome:
    """Compares the effect of one layer's writes in training mode with that in evaluation mode."""
    x, target = bench.tiled(3 * bench.chunk + 5), bench.scale * bench.units(3 * bench.chunk + 5)
    right = bench.response(x, target)
    with bench.mode(True):
        off = error(bench.response(x, target), right)
    found = (
        "training computes the same as evaluation"
        if off < TOLERANCE
        else f"training reads something {off:.0%} off"
    )
    return judged(off < TOLERANCE, found, {"training against evaluation": off}, TOLERANCE)


def layer_over_many_chunks(bench: Bench, expected: Any) -> Outcome:
    """Compares the reads of the first chunk's write by fifteen later chunks with the same keys.

    They are measured in units of the read by the second chunk.
    """
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


def lawful_layers(whole: WholeModel) -> list[int]:
    """Returns the TTT layers whose plain reading follows the declared rule.

    Raises:
        NotChecked: if there is none.
    """
    limit = limits(whole.lm.dtype).outputs
    found = [i for i, error in whole.once(plain_deviations).items() if error < limit]
    if not found:
        raise NotChecked("a plain reading does not follow the declared rule, which other items report")
    return found


def plain_deviations(whole: WholeModel) -> dict[int, float]:
    """Returns by layer the error of one row in one call against the declared rule."""
    with Probed.of(whole.lm, whole.seed) as probed:
        (errors,) = probed.deviations(plain).values()
    return errors


def _held(whole: WholeModel, scene: Scene, found: str) -> Outcome:
    lawful = lawful_layers(whole)
    with Probed.of(whole.lm, whole.seed) as probed:
        try:
            errors = {
                name: {i: by_layer[i] for i in lawful} for name, by_layer in probed.deviations(scene).items()
            }
        except Exception as error:  # although it ran in one call
            if is_the_probes(error):
                raise
            return judged(
                False, f"the model raises {type(error).__name__}: {one_line(error, kind=False)}", {}
            )
    if not errors:
        raise NotChecked("the model takes no position_ids, so a row is one document")
    return judged_errors(errors, limits(whole.lm.dtype).outputs, found)


def judged_errors(errors: dict[str, dict[int, float]], limit: float, found: str) -> Outcome:
    """Returns the outcome for errors by reading and layer; the largest one decides.

    Args:
        errors: relative errors by the name of the reading, then by layer.
        limit: the smallest error that deviates.
        found: the finding if none deviates.
    """
    error, name, layer = max(
        (float("inf") if e != e else e, name, i)
        for name, by_layer in errors.items()
        for i, e in by_layer.items()
    )
    numbers = {name: max(by_layer.values()) for name, by_layer in errors.items()}
    if error >= limit:
        found = (
            f"{name}: the outputs of layer {layer} differ from the declared rule by {error:.2g} of the size "
            "of a read"
        )
    return judged(error < limit, found, numbers, limit)
