"""Probes of a stream that takes tokens back, and of a saved stream (neither is in the paper)."""

from __future__ import annotations

from typing import Any

import torch

from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from .bench import Bench
from .streams import refuse_blind_streams


def take_back(bench: Bench, expected: Any) -> Outcome:
    """Takes back tokens that completed a chunk, and compares with a stream that never read these tokens."""
    if not hasattr(bench.module.stream(), "take_back"):
        raise NotChecked("the module cannot take tokens back")
    chunk, off = bench.chunk, {}
    for name, known in (("from the first chunk", chunk // 2), ("from the second chunk", chunk + chunk // 2)):
        x, target = bench.tiled(known + 3 * chunk), bench.scale * bench.units(known + 3 * chunk)
        pieces = [chunk] * 3
        right = bench.stream(x, target, [known, *pieces])[known:]
        stream: Any = bench.module.stream()
        bench.stream(x[:known], target[:known], [known], stream)
        bench.stream(bench.same(chunk), bench.scale * bench.units(chunk), [chunk], stream)
        with torch.no_grad(), bench.module.guarded():
            stream.take_back(chunk)
        off[name] = bench.size(bench.stream(x[known:], target[known:], pieces, stream) - right)
    worst = max(off, key=lambda name: off[name])
    found = (
        "tokens taken back leave nothing"
        if off[worst] < TOLERANCE
        else f"tokens taken back {worst} leave {off[worst]:.3g} times one write's effect"
    )
    return judged(off[worst] < TOLERANCE, found, off, TOLERANCE)


def saved_session(bench: Bench, expected: Any) -> Outcome:
    """Continues a stream from data saved in the middle of a chunk, and compares with an uninterrupted one."""
    stream: Any = bench.module.stream()
    if not hasattr(stream, "saved"):
        raise NotChecked("the module cannot save a stream")
    refuse_blind_streams(bench)
    chunk = bench.chunk
    known = 2 * chunk + chunk // 2
    x, target = bench.tiled(known + 2 * chunk), bench.scale * bench.units(known + 2 * chunk)
    right = bench.stream(x, target, [known, chunk, chunk])[known:]
    bench.stream(x[:known], target[:known], [known], stream)
    off = bench.size(bench.stream(x[known:], target[known:], [chunk, chunk], stream.saved()) - right)
    found = (
        "a saved stream goes on as it was"
        if off < TOLERANCE
        else f"outputs of a loaded stream differ by {off:.3g} times one write's effect"
    )
    return judged(off < TOLERANCE, found, {"saved against uninterrupted": off}, TOLERANCE)
