"""Measures time and peak memory of the op's forms, as ratios to the plain linear layer.

Two further references are the materializing formulation, and the limit, which is a ratio of operation counts.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InPlaceTTTError
from ..layout import ChunkLayout
from ..rules import RidgeRule
from . import fast_weight

LIMIT = 7 / 3
"""Products of the fused op per product of the plain linear, forward and backward: (2 + 5) / (1 + 2)."""

WIDTHS = {
    "SmolLM2-135M": (576, 1536),
    "Qwen3-1.7B": (2048, 6144),
    "Qwen3-4B": (2560, 9728),
    "LLaMA-3.1-8B": (4096, 14336),
}
"""d and h of real down-projections."""
TOKENS = (8192, 32768, 131072)
CHUNK_SIZES = (256, 512, 1024, 2048, 4096)

_ETA = 0.1
_WARM_UP_SECONDS = 0.1
"""Time that an idle GPU needs to reach its clock."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one measurement, with one sequence of T tokens, chunks of C tokens and W0 [d, h]."""

    d: int
    h: int
    tokens: int
    chunk_size: int

    @property
    def product(self) -> float:
        """Floating-point operations of one product over the sequence."""
        return 2.0 * self.tokens * self.d * self.h


def registry() -> Iterator[tuple[str, Shape]]:
    """Yields the model's name and the shape of each measurement on a GPU, the most informative first."""
    names = sorted(WIDTHS, key=lambda name: name != "Qwen3-4B")
    for tokens, name, chunk_size in itertools.product(
        sorted(TOKENS, key=lambda n: n != 32768), names, CHUNK_SIZES
    ):
        yield name, Shape(*WIDTHS[name], tokens, chunk_size)


def materializing(z: Tensor, v: Tensor, weight: Tensor, chunk_size: int) -> Tensor:
    """Computes the op as the reference code does, with one stored weight per chunk and a batched product.

    The weights are a cumulative sum over chunks.

    Args:
        z: Keys [B, T, h]; T is a multiple of chunk_size.
        v: Targets [B, T, d].
        weight: W0 [d, h].
        chunk_size: C.

    Returns:
        The outputs [B, T, d].
    """
    batch, tokens, h = z.shape
    keys, values = z.view(batch, -1, chunk_size, h), v.view(batch, -1, chunk_size, v.shape[-1])
    deltas = torch.einsum("bkcd,bkch->bkdh", values[:, :-1], keys[:, :-1])
    first = weight.expand(batch, 1, *weight.shape)
    weights = torch.cat([first, _ETA * deltas], dim=1).cumsum(dim=1)
    return torch.einsum("bkch,bkdh->bkcd", keys, weights).reshape(batch, tokens, -1)


def measure(
    shape: Shape,
    repeats: int = 5,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    every_form: bool | None = None,
) -> list[dict[str, Any]]:
    """Measures forward and backward of each formulation, and its forward alone, interleaved in one run.

    "additive" adds the reads of the paper's rule to a separate product with W0, as for half-precision weights
    on a CPU. "least squares" is the ridge rule with keys of d/2 numbers. Its time includes the computation of
    these keys and the product with W0.

    Args:
        shape: The sizes; the tokens are a multiple of the chunk size.
        repeats: Timed runs of each formulation.
        device: A torch device.
        dtype: The tensors' dtype.
        every_form: True adds the chunked form, and the materializing one under torch.compile. None: True on a
            GPU.

    Returns:
        One dict per formulation. It holds the name, and the median, minimum and maximum seconds of forward
        and backward, and of the forward alone. It also holds the ratios of these times to the plain linear's
        (median of paired runs, with the range), and the peak bytes beyond those of the plain linear's run.
        The rate (TFLOP/s) is that of 7 products in the time of forward and backward. A formulation that does
        not fit into the GPU's memory has `out_of_memory` instead of figures.

    Raises:
        InPlaceTTTError: If the tokens are not a multiple of the chunk size.
    """
    if shape.tokens % shape.chunk_size:
        raise InPlaceTTTError(
            f"{shape.tokens} tokens are not a multiple of the chunk size {shape.chunk_size}, which the "
            "materializing formulation needs; change one of them."
        )
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*size: int, scale: float) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype).requires_grad_()

    z, v = tensor(1, shape.tokens, shape.h, scale=1.0), tensor(1, shape.tokens, shape.d, scale=0.01)
    weight = tensor(shape.d, shape.h, scale=0.02)
    grad = torch.randn(1, shape.tokens, shape.d, generator=generator, device=device).to(dtype)
    layout = ChunkLayout.from_lengths([[shape.tokens]], shape.chunk_size)
    directions = (
        torch.randn(shape.d // 2, shape.h, generator=generator, device=device)
        .mul_((shape.h * shape.d / 2) ** -0.5)
        .to(dtype)
    )
    linear = torch.nn.functional.linear

    def least_squares() -> Tensor:
        return linear(z, weight) + fast_weight(
            linear(z, directions), v, None, eta=_ETA, layout=layout, rule=RidgeRule(1.0)
        )

    forms: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: linear(z, weight),
        "fast_weight": lambda: fast_weight(z, v, weight, eta=_ETA, layout=layout),
        "materializing": lambda: materializing(z, v, weight, shape.chunk_size),
        "additive": lambda: linear(z, weight) + fast_weight(z, v, None, eta=_ETA, layout=layout),
        "least squares": least_squares,
    }
    if device.startswith("cuda") if every_form is None else every_form:
        torch._dynamo.reset()  # without it, each shape adds to the guards of the shape before
        compiled = torch.compile(materializing, dynamic=False)
        forms["materializing, compiled"] = lambda: compiled(z, v, weight, shape.chunk_size)
        forms["chunked"] = lambda: fast_weight(z, v, weight, eta=_ETA, layout=layout, backend="chunked")

    def run(form: Callable[[], Tensor], backward: bool = True) -> float:
        z.grad = v.grad = weight.grad = None
        _synchronize(device)
        start = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = form()
        if backward:
            out.backward(grad)
        _synchronize(device)
        return time.perf_counter() - start

    peaks: dict[str, int] = {}
    for name, form in forms.items():
        try:
            run(form, backward=False)  # the first runs compile and tune
            run(form)
            peaks[name] = _peak_bytes(lambda form=form: run(form), device)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            z.grad = v.grad = weight.grad = None
            gc.collect()
            torch.cuda.empty_cache()
    end = time.monotonic() + (_WARM_UP_SECONDS if device.startswith("cuda") else 0)
    while time.monotonic() < end:
        run(forms["linear"])
    seconds, forward = ({name: list[float]() for name in peaks} for _ in range(2))
    for _ in range(repeats):
        for name in peaks:
            seconds[name].append(run(forms[name]))
            forward[name].append(run(forms[name], backward=False))
    return [
        {
            "name": name,
            **_times("", seconds[name], seconds["linear"]),
            **_times("forward_", forward[name], forward["linear"]),
            "extra_peak_bytes": max(peaks[name] - peaks["linear"], 0),
            "tflops_of_7_products": 7 * shape.product / statistics.median(seconds[name]) / 1e12,
        }
        if name in peaks
        else {"name": name, "out_of_memory": True}
        for name in forms
    ]


def _times(prefix: str, seconds: list[float], linear: list[float]) -> dict[str, Any]:
    ratios = sorted(mine / theirs for mine, theirs in zip(seconds, linear, strict=True))
    return {
        f"{prefix}seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        f"{prefix}ratio_to_linear": {
            "median": statistics.median(ratios),
            "min": ratios[0],
            "max": ratios[-1],
        },
    }


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _peak_bytes(run: Callable[[], object], device: str) -> int:
    """Returns the peak memory of a run beyond the memory held before it."""
    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        peak_starts_again()
    except OSError:
        raise InPlaceTTTError(
            "the peak memory of a run on the CPU is read from Linux's /proc; run on Linux, or on a GPU."
        ) from None
    before = memory_status("VmRSS")
    run()
    return memory_status("VmHWM") - before


def peak_starts_again() -> None:
    """Resets this process's peak memory, VmHWM. Raises OSError without Linux's /proc."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def memory_status(field: str) -> int:
    """Returns the bytes that this process holds (VmRSS) or held at its peak (VmHWM), from /proc."""

    def lines() -> Iterator[str]:
        with open("/proc/self/status", encoding="ascii") as file:
            yield from file

    return next(int(line.split()[1]) * 1024 for line in lines() if line.startswith(field))
