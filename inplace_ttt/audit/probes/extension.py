"""Probes of two extensions of the paper, keys and least squares, by their own definitions."""

from __future__ import annotations

from typing import Any

import torch

from ...surgery import fast_weights
from ..borrowing import borrowed
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..whole_model import WholeModel
from .bench import Bench
from .rule import own_keys, own_write
from .twin import calibration_ids, twin


def least_squares(bench: Bench, expected: Any) -> Outcome:
    """Compares outputs over scattered keys and random targets with a direct solve.

    The solve uses the module's own keys and targets.
    """
    module = bench.module
    if module.ridge is None:
        raise NotChecked("least squares is off")
    if max(abs(own_write(bench)), own_keys(bench)) >= TOLERANCE:
        raise NotChecked(
            "a chunk reads its own write or keys, which `exclusive-sum` and `own-chunk-exposure` report"
        )
    if bench.key_error >= TOLERANCE:
        raise NotChecked("reads do not follow the keys, which `keys` reports")
    off, numbers = bench.law_error, {"λ": module.ridge, "error against a direct solve": bench.law_error}
    if off >= TOLERANCE:
        found = f"reads differ by {off:.0%} from the least-squares map of all writes"
        return judged(False, f"{found} with λ = {module.ridge:g}", numbers, TOLERANCE)
    found = "least squares: reads use the map M that minimizes Σ ‖V - KMᵀ‖² + λ‖M‖² over all writes"
    return Outcome("extension", f"{found}, λ = {module.ridge:g}", numbers, TOLERANCE)


def keys(bench: Bench, expected: Any) -> Outcome:
    """Compares the reads of scattered keys from a chunk with K Kᵀ V."""
    bench.unit  # noqa: B018 - raises NotChecked if nothing is written
    off, whitening = bench.key_error, bench.module.whitening
    numbers = {
        "error of reading as K Kᵀ V": off,
        "numbers per key": bench.module.h,
        "of": bench.module.input_size,
    }
    if off >= TOLERANCE:
        found = f"writes and reads differ by {off:.0%} from those with {whitening or 'Z'} as keys"
        return judged(False, found, numbers, TOLERANCE)
    if whitening is None:
        return judged(True, "keys are the down-projection's input", numbers, TOLERANCE)
    found = f"whitened keys: {whitening}, the same for writing and reading"
    return Outcome("extension", found, numbers, TOLERANCE)


def model_keys(whole: WholeModel, expected: Any) -> Outcome:
    """Measures `keys` on the first TTT layer, and the calibration of keys on a small model.

    The calibrated keys are measured over the text of their calibration.
    """
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
    if max(mean * whole.config.whitening.centered, abs(size - 1)) >= TOLERANCE:
        found = (
            f"over the text of their calibration, their mean by length is {mean:.2g} (0 if centered) and "
            f"their size {size:.2g}, where 1 is meant"
        )
        return judged(False, found, numbers, TOLERANCE)
    return Outcome(outcome.verdict, outcome.found, numbers, TOLERANCE)
