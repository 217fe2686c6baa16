"""Probes of what goes beyond the paper and still has a law: the keys, and least squares."""

from __future__ import annotations

from typing import Any

import torch

from ...surgery import fast_weights
from ..converted import borrowed
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..whole_model import WholeModel
from .bench import Bench
from .rule import own_keys, own_write
from .twin import calibration_ids, twin


def least_squares(bench: Bench, expected: Any) -> Outcome:
    """Outputs over scattered keys and random targets against the map solved for from the module's own keys
    and targets."""
    module = bench.module
    if module.ridge is None:
        raise NotChecked("no least squares is on")
    if max(abs(own_write(bench)), own_keys(bench)) >= TOLERANCE:
        raise NotChecked(
            "a chunk reads its own write or keys, which `exclusive-sum` and `own-chunk-exposure` report"
        )
    if bench.key_error >= TOLERANCE:
        raise NotChecked("what is read does not follow the keys, which `keys` reports")
    off, numbers = bench.law_error, {"λ": module.ridge, "error against a direct solve": bench.law_error}
    if off >= TOLERANCE:
        found = (
            f"what is read is {off:.0%} off the least-squares map of all that was written with λ = "
            f"{module.ridge:g}"
        )
        return judged(False, found, numbers, TOLERANCE)
    found = (
        "least squares: what is read is the map that minimises Σ ‖V - KMᵀ‖² + λ‖M‖² over all that was "
        f"written, λ = {module.ridge:g}"
    )
    return Outcome("extension", found, numbers, TOLERANCE)


def keys(bench: Bench, expected: Any) -> Outcome:
    """What scattered keys read of a chunk with orthonormal ones, against K Kᵀ V."""
    bench.unit  # noqa: B018 - refuses where nothing is written
    off, whitening = bench.key_error, bench.module.whitening
    numbers = {
        "error of reading as K Kᵀ V": off,
        "numbers a key": bench.module.h,
        "of": bench.module.input_size,
    }
    if off >= TOLERANCE:
        named = "Z" if whitening is None else whitening
        return judged(
            False,
            f"what is written and read is {off:.0%} off what {named} for keys would give",
            numbers,
            TOLERANCE,
        )
    if whitening is None:
        return judged(True, "keys are the down-projection's input", numbers, TOLERANCE)
    return Outcome(
        "extension",
        f"whitened keys: {whitening}, centred, written under and read with alike",
        numbers,
        TOLERANCE,
    )


def model_keys(whole: WholeModel, expected: Any) -> Outcome:
    """The same of the first TTT layer; and what a calibration makes of keys over its own text, in a small
    model."""
    if whole.undrivable:
        raise NotChecked(whole.undrivable)
    with borrowed(whole.model, next(iter(whole.layers))) as module, module.unclipped():
        outcome = keys(Bench(module, whole.seed), expected)
    if whole.config.whitening is None or outcome.verdict == "deviates":
        return outcome
    seen: list[torch.Tensor] = []
    with twin(whole.config) as model, torch.no_grad():
        layer = fast_weights(model)[0]
        handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(calibration_ids(), use_cache=False)
        handle.remove()
        read, lengths = layer.keys(seen[0])[0].double(), seen[0][0].double().norm(dim=-1)
    mean = float((lengths @ read).norm() / len(read) / lengths.square().mean().sqrt())
    size = float(read.square().sum(-1).mean())
    numbers = {
        **outcome.numbers,
        "size of the mean key over the text, by length": mean,
        "mean of ‖K‖² over the text": size,
    }
    if max(mean, abs(size - 1)) >= TOLERANCE:
        found = (
            f"over the text of their calibration, their mean by length is {mean:.2g} and their size "
            f"{size:.2g}, where 0 and 1 are meant"
        )
        return judged(False, found, numbers, TOLERANCE)
    return Outcome(outcome.verdict, outcome.found, numbers, TOLERANCE)
