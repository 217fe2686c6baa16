"""The op against the plain linear, the materialising formulation and the limit: time and peak memory as ratios."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InPlaceTTTError
from .layout import ChunkLayout
from .ops import fast_weight

LIMIT = 7 / 3
"""Products of the fused op over those of the plain linear, forward and backward: (2 + 5) / (1 + 2)."""

_ETA = 0.1


@dataclass(frozen=True)
class Shape:
    """One sequence through one fast weight: d, h as in W0 [d, h], T tokens, chunks of C."""

    d: int
    h: int
    tokens: int
    chunk_size: int


def materialising(z: Tensor, v: Tensor, weight: Tensor, chunk_size: int) -> Tensor:
    """The formulation of the public code: one weight for every chunk, by cumulative sum, then a batched product."""
    batch, tokens, h = z.shape
    keys, values = z.view(batch, -1, chunk_size, h), v.view(batch, -1, chunk_size, v.shape[-1])
    deltas = torch.einsum("bkcd,bkch->bkdh", values[:, :-1], keys[:, :-1])
    first = weight.expand(batch, 1, *weight.shape)
    weights = torch.cat([first, _ETA * deltas], dim=1).cumsum(dim=1)
    return torch.einsum("bkch,bkdh->bkcd", keys, weights).reshape(batch, tokens, -1)


def measure(shape: Shape, repeats: int = 5, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Forward + backward of each formulation, interleaved in one run.

    Rows: name, median / min / max seconds, the ratio of its time to the plain linear's (median of paired runs, with the
    range), and peak bytes beyond inputs and gradients of the plain linear's own run.
    """
    if shape.tokens % shape.chunk_size:
        raise InPlaceTTTError(
            f"{shape.tokens} tokens are not whole chunks of {shape.chunk_size}, which the materialising formulation needs."
        )
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*size: int, scale: float) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype).requires_grad_()

    z, v = tensor(1, shape.tokens, shape.h, scale=1.0), tensor(1, shape.tokens, shape.d, scale=0.01)
    weight = tensor(shape.d, shape.h, scale=0.02)
    grad = torch.randn(1, shape.tokens, shape.d, generator=generator, device=device).to(dtype)
    layout = ChunkLayout.from_lengths([[shape.tokens]], shape.chunk_size)
    forms: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: torch.nn.functional.linear(z, weight),
        "fast_weight": lambda: fast_weight(z, v, weight, eta=_ETA, layout=layout),
        "materialising": lambda: materialising(z, v, weight, shape.chunk_size),
    }

    def run(form: Callable[[], Tensor]) -> float:
        z.grad = v.grad = weight.grad = None
        _synchronize(device)
        start = time.perf_counter()
        form().backward(grad)
        _synchronize(device)
        return time.perf_counter() - start

    peaks = {name: _peak_bytes(lambda form=form: run(form), device) for name, form in forms.items()}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            seconds[name].append(run(form))
    return [_row(name, seconds[name], seconds["linear"], peaks[name] - peaks["linear"]) for name in forms]


def _row(name: str, seconds: list[float], linear: list[float], extra_bytes: int) -> dict[str, Any]:
    ratios = sorted(mine / theirs for mine, theirs in zip(seconds, linear, strict=True))
    return {
        "name": name,
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "ratio_to_linear": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
        "extra_peak_bytes": max(extra_bytes, 0),
    }


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _peak_bytes(run: Callable[[], object], device: str) -> int:
    """Peak memory of a second run beyond what was held before it."""
    run()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from here
    except OSError:
        raise InPlaceTTTError("the peak memory of a run on the CPU is read from Linux's /proc; bench there, or on a GPU.") from None
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    def lines() -> Iterator[str]:
        with open("/proc/self/status", encoding="ascii") as file:
            yield from file

    return next(int(line.split()[1]) * 1024 for line in lines() if line.startswith(field))
