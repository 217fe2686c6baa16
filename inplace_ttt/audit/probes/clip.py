"""Probes of the clip of a chunk's delta (paper appendix, "Clipping"), with the module's own clip on.

A write grows with its targets until a clip bounds it. The size at which growth ends is measured in both
modes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..outcome import NotChecked, Outcome, judged
from .bench import SCALES, Bench

PAPER_TAU = 1e-5
_CHUNKS = 128
"""A long prompt, in chunks: 128k tokens in chunks of 1,024."""
_SEEN = 1e-3
"""Smallest relative change of the weight that counts as an effect."""


def clip_training(bench: Bench, expected: Any) -> Outcome:
    """Measures the growth of a write with its targets in training mode."""
    sizes = bench.sizes(training=True)
    _alive(sizes)
    knee = bench.knee(sizes)
    found = "deltas are not clipped in training"
    if knee is not None:
        found = f"deltas are clipped in training too (from targets of size {knee:.0e})"
    return judged(knee is None, found, {"clipped from targets of size": knee}, None, _curve(bench, sizes))


def clip_inference(bench: Bench, expected: Any) -> Outcome:
    """Measures the bound on the norm of a chunk's delta in evaluation mode, without η."""
    tau = applied_tau(bench)
    if tau is None:
        found = "no clip: the paper clips in some of its evaluations only"
        return Outcome("unspecified", found, {"tau": None})
    w0 = float(torch.linalg.vector_norm(bench.module.fast_weight.detach().double()))
    meant = bench.module.tau
    if meant is not None and abs(tau / meant - 1) > 0.05:
        why = "another norm, or η is counted in"
        why += ", or the clip leaves the Gram out" * (bench.module.ridge is not None)
        found = f"a delta is held to a Frobenius norm of {tau:.3g} where {meant:.3g} is meant: {why}"
        return judged(False, found, {"tau": tau, "meant": meant}, 0.05)
    numbers = {"tau": tau, "tau / ‖W0‖": tau / w0, "the paper's tau": PAPER_TAU}
    if abs(tau / PAPER_TAU - 1) < 0.05:
        return judged(True, f"a chunk's delta is held to a norm of {tau:.2g}", numbers, 0.05)
    found = f"a chunk's delta is held to a norm of {tau:.3g}, {tau / w0:.2g} of ‖W0‖"
    return Outcome("extension", found, numbers, 0.05)


def clip_scope(bench: Bench, expected: Any) -> Outcome:
    """Writes four clipped chunks with the same targets and compares their sum with one chunk's bound."""
    tau, meant = applied_tau(bench), bench.module.tau
    if tau is None:
        raise NotChecked("no clip is on")
    if bench.module.ridge is not None and meant is not None and abs(tau / meant - 1) > 0.05:
        raise NotChecked("the clip holds one of the two sums, which `clip-inference` reports")
    chunk = bench.module.chunk_size
    x = bench.bank[:chunk].repeat(5, 1)
    target = bench.zeros(5 * chunk)
    target[: 4 * chunk] = SCALES[-1] * bench.units(1)[0]
    with bench.mode(False):
        effect = bench.response(x, target).split(chunk)
    ratio = float(torch.linalg.vector_norm(effect[4]) / torch.linalg.vector_norm(effect[1]))
    found = "each chunk's delta is clipped on its own"
    if ratio <= 3.9:
        found = f"four clipped chunks weigh {ratio:.3g} of one: the sum is clipped"
    return judged(ratio > 3.9, found, {"four clipped chunks, over one": ratio, "expected": 4.0}, 0.1)


def clip_effect(bench: Bench, expected: Any) -> Outcome:
    """Compares the largest delta that the clip admits with the weight.

    The steps of the precisions that may hold the weight are part of the report.
    """
    tau = applied_tau(bench)
    if tau is None:
        raise NotChecked("no clip is on")
    if bench.module.ridge is not None:
        raise NotChecked(
            "under least squares a bound on a delta limits the share of a chunk, not the change of the weight"
        )
    w0 = bench.module.fast_weight.detach().double()
    norm, size = float(torch.linalg.vector_norm(w0)), abs(bench.module.eta or 1.0)
    step = size * tau / w0.numel() ** 0.5
    typical = norm / w0.numel() ** 0.5
    drift = _CHUNKS * size * tau / norm
    numbers = {
        "‖W0‖": norm,
        "entry moved by a chunk": step,
        "half a step of bfloat16 at a typical entry": typical * 2**-9,
        "half a step of float32": typical * 2**-25,
        f"‖change‖ / ‖W0‖ after {_CHUNKS} equal chunks": drift,
    }
    found = f"{_CHUNKS} chunks can move the weight by {drift:.2g} of its norm"
    if drift < _SEEN:
        half = typical * 2**-9
        found = (
            f"the clip leaves nothing to see: {_CHUNKS} chunks that all agree move the weight by {drift:.1e} "
            f"of its norm, an entry by {step:.1e} per chunk, {'below' if step < half else 'above'} half a "
            f"step of bfloat16 ({half:.1e})"
        )
    return judged(drift >= _SEEN, found, numbers, _SEEN)


def applied_tau(bench: Bench) -> float | None:
    """Returns the bound on the norm of a delta in evaluation mode, or None without a bound.

    Under least squares, G is negligible compared with λ if the targets are very large. λM is then the delta.
    """
    sizes = bench.sizes(training=False)
    _alive(sizes)
    if bench.knee(sizes) is None:
        return None
    chunk = bench.module.chunk_size
    x, target = bench.bank[:chunk], SCALES[-1] * bench.units(1)[0].expand(chunk, -1)
    with bench.mode(False):
        effect = bench.response(torch.cat([x, x]), torch.cat([target, bench.zeros(chunk)]))[chunk:]
    read = torch.linalg.vector_norm(torch.linalg.lstsq(bench.keys_of(x), effect, driver="gelsd").solution)
    return float(read) * (bench.module.ridge or 1.0) / abs(bench.module.eta or 1.0)


def _alive(sizes: list[float]) -> None:
    if not any(sizes):
        raise NotChecked("no write is ever read")


def _curve(bench: Bench, training: list[float]) -> dict[str, Any]:
    return {
        "kind": "curve",
        "title": "Effect of a chunk's write, as its targets grow",
        "x": "size of the targets",
        "y": "change of the next chunk's outputs",
        "at": list(SCALES),
        "lines": {"training": training, "evaluation": bench.sizes(training=False)},
    }
