"""Probes of the circumstances in which the model must compute its rule.

They are batches, pieces, many chunks and half precision. A converted model runs as a user runs it. Each TTT
layer's outputs are compared with its declared rule (`DeclaredRule`). With `target: gradient` the logits are
compared with plain gradient steps (`GradientRule`). The other items look for one fault each. The items here
detect any fault, whether or not another item can name it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...config import InPlaceTTTConfig
from ...errors import one_line
from ..blame import is_the_probes
from ..item import Probe
from ..limits import LIMITS, limits, room
from ..outcome import NotChecked, Outcome, judged, within
from ..prepared import Prepared, Scene
from ..probed import Probed, prepared, yardstick
from ..prompts import prompt_deviations
from ..scenes import (
    batches,
    documents,
    drawn_sizes,
    many_chunks,
    many_writes,
    pieces,
    plain,
    saved_session,
    taken_back,
)
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
_UNLAWFUL = "a plain reading does not follow the declared rule, which other items report"


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
    return _judged(readings, yardstick(whole.config), whole.lm.dtype, "a reading follows the declared rule")


def of_model(scene: Scene, found: str) -> Probe:
    """Returns a probe that judges the readings of a scene with the audited model."""

    def probe(whole: WholeModel, expected: Any) -> Outcome:
        lawful = lawful_layers(whole)
        with prepared(whole.lm, whole.seed) as probed:
            return _of_scene(probed, scene, lawful, found)

    return probe


def of_small_model(scene: Scene, found: str, dtype: torch.dtype | None = None, usual: Scene = plain) -> Probe:
    """Returns a probe that judges the readings of a scene with a small model that has these settings.

    Args:
        scene: the readings.
        found: the finding if none deviates.
        dtype: dtype of the small model. By default it is that of the audited one, or float64 for targets that
            are loss gradients.
        usual: a reading that must follow the rule. If it does not, the item is not checked.
    """

    def probe(whole: WholeModel, expected: Any) -> Outcome:
        wide = torch.float64 if whole.config.target == "gradient" else dtype or whole.lm.dtype
        with (
            twin(visible(whole.config), width=NARROW) as model,
            prepared(model.to(wide), whole.seed) as probed,
        ):
            (errors,) = probed.deviations(usual).values()
            if max(errors.values()) >= probed.limit(wide):
                raise NotChecked(_UNLAWFUL)
            return _of_scene(probed, scene, list(errors), found)

    return probe


def _of_scene(probed: Prepared, scene: Scene, layers: Sequence[int], found: str) -> Outcome:
    try:
        errors = probed.deviations(scene)
    except Exception as error:  # although it ran in one call
        if is_the_probes(error):
            raise
        return judged(False, f"the model raises {type(error).__name__}: {one_line(error, kind=False)}", {})
    if not errors:
        raise NotChecked("neither several steps per chunk nor a model without position_ids takes packed rows")
    known = {name: {i: by_layer[i] for i in layers} for name, by_layer in errors.items()}
    return _judged(known, type(probed), probed.lm.dtype, found)


in_batches = of_model(batches, "padded, packed and reordered rows each follow the declared rule")
in_pieces = of_model(pieces, "a text in pieces follows the declared rule")
take_back = of_model(taken_back, "tokens that are taken back, and a session's branch, leave nothing behind")
packed_documents = of_model(documents, "five documents in a row compute the same as alone")
over_many_chunks = of_model(many_chunks, "sixteen chunks, and larger ones, follow the declared rule")
at_drawn_sizes = of_small_model(
    drawn_sizes, "rows, chunks, documents and texts of drawn sizes follow the declared rule"
)
saved = of_small_model(
    saved_session,
    "a saved session goes on as it was",
    torch.float32,
    functools.partial(saved_session, saves=False),
)
_CALLS = ways_of_calling, "in every way of calling it, the model follows the declared rule"


def called_otherwise(whole: WholeModel, expected: Any) -> Outcome:
    """Calls the model in every way that users have.

    A large model is replaced by a small model with the same settings, because single tokens through a large
    model are slow.
    """
    own = whole.is_small and whole.config.target != "gradient"
    return (of_model if own else of_small_model)(*_CALLS)(whole, expected)


def precisions(whole: WholeModel, expected: Any) -> Outcome:
    """Reads many chunks in one call and in pieces with a small model in each precision, and checks its state.

    The small model has the settings of the audited one. In float16 it also reads with values of η whose
    writes leave the range of float16.
    """
    found: dict[str, Outcome] = {}
    for dtype in LIMITS:
        name = str(dtype).removeprefix("torch.")
        try:
            found[name] = _in_precision(whole, dtype)
        except Exception as error:
            if is_the_probes(error):
                raise
            found[name] = judged(
                False, f"it raises {type(error).__name__}: {one_line(error, kind=False)}", {}
            )
    numbers = {f"{dtype}, {name}": n for dtype, out in found.items() for name, n in out.numbers.items()}
    failed = [dtype for dtype, outcome in found.items() if outcome.verdict == "deviates"]
    if len(failed) == len(found):
        raise NotChecked("the declared rule holds in no precision, which other items report")
    if failed:
        wrong = found[failed[0]]
        return judged(False, f"in {failed[0]}, {wrong.found}", numbers, wrong.tolerance)
    return judged(
        True, f"the declared rule holds in {', '.join(found)}", numbers, found["bfloat16"].tolerance
    )


def _in_precision(whole: WholeModel, dtype: torch.dtype) -> Outcome:
    limit, usual = limits(dtype), visible(whole.config)
    errors: dict[str, dict[int, float]] = {}
    with twin(usual, width=NARROW) as model, prepared(model.to(dtype), whole.seed) as probed:
        if not isinstance(probed, Probed):
            return _of_scene(probed, many_chunks, [0], "")
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
    return judged_errors(errors, limit.small_model * room(dtype, whole.config), "", Probed.differs)


def visible(config: InPlaceTTTConfig) -> InPlaceTTTConfig:
    """Returns the settings with an η of at least `_LEAST_ETA`."""
    return dataclasses.replace(config, eta=max(config.eta_of(0), _LEAST_ETA))


def layer_in_training(bench: Bench, expected: Any) -> Outcome:
    """Compares the effect of one layer's writes in training mode with that in evaluation mode."""
    x, target = bench.tiled(3 * bench.chunk + 5), bench.scale * bench.units(3 * bench.chunk + 5)
    right = bench.response(x, target)
    with bench.mode(True):
        off = error(bench.response(x, target), right)
    good, bad = "training computes the same as evaluation", "training reads something {off:.0%} off"
    return within({"training against evaluation": off}, good, bad)


def layer_over_many_chunks(bench: Bench, expected: Any) -> Outcome:
    """Compares the reads of the first chunk's write by fifteen later chunks with the same keys.

    They are measured in units of the read by the second chunk.
    """
    x = bench.tiled(16 * bench.chunk)
    effect = bench.response(x, bench.middle(len(x), 0)).split(bench.chunk)
    reads = [bench.share(part) / bench.diluted(number) for number, part in enumerate(effect) if number]
    return within(
        {"largest difference from the second chunk's read": max(abs(read - 1) for read in reads)},
        "a write is read by fifteen chunks alike",
        "one of fifteen chunks reads {off:.0%} more or less",
        more={"read of the first chunk's write, by chunk": reads},
    )


def lawful_layers(whole: WholeModel) -> list[int]:
    """Returns the TTT layers whose plain reading follows the declared rule.

    Raises:
        NotChecked: if there is none.
    """
    limit = yardstick(whole.config).limit(whole.lm.dtype)
    found = [i for i, error in whole.once(plain_deviations).items() if error < limit]
    if not found:
        raise NotChecked(_UNLAWFUL)
    return found


def plain_deviations(whole: WholeModel) -> dict[int, float]:
    """Returns by layer the error of one row in one call against the declared rule."""
    with prepared(whole.lm, whole.seed) as probed:
        (errors,) = probed.deviations(plain).values()
    return errors


def _judged(
    errors: dict[str, dict[int, float]], kind: type[Prepared], dtype: torch.dtype, found: str
) -> Outcome:
    return judged_errors(errors, kind.limit(dtype), found, kind.differs)


def judged_errors(
    errors: dict[str, dict[int, float]], limit: float, found: str, differs: str = Probed.differs
) -> Outcome:
    """Returns the outcome for errors by reading and layer; the largest one decides.

    Args:
        errors: relative errors by the name of the reading, then by layer.
        limit: the smallest error that deviates.
        found: the finding if none deviates.
        differs: the clause for a deviation, with the fields `layer` and `error`.
    """
    error, name, layer = max(
        (float("inf") if e != e else e, name, i)
        for name, by_layer in errors.items()
        for i, e in by_layer.items()
    )
    numbers = {name: max(by_layer.values()) for name, by_layer in errors.items()}
    if error >= limit:
        found = f"{name}: {differs.format(layer=layer, error=error)}"
    return judged(error < limit, found, numbers, limit)
