"""Checks and times the op beyond one long document.

The cases are packed rows, clips, memory for slots, states, CUDA graphs and a host that never waits. Each is a
check (ok or not) or a time. A time is a ratio to the plain linear, forward and backward, in paired runs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SANITIZER_SECONDS = 150


def checks(smoke: bool) -> Iterator[dict[str, Any]]:
    """Checks the op in a CUDA graph and without a waiting host.

    On a CPU, it checks that a second run gives the same bits.
    """
    for clipped in (False, True):
        name = "clipped" if clipped else "free"
        yield _check(f"the same in a second run, {name}", lambda clipped=clipped: _again(smoke, clipped))
        if not smoke:
            yield _check(f"no host waits, {name}", lambda clipped=clipped: _no_host_waits(clipped))
            yield _check(f"in a CUDA graph, {name}", lambda clipped=clipped: _in_a_graph(clipped))


def sanitizer() -> Iterator[dict[str, Any]]:
    """Checks the same kernels under compute-sanitizer, if it is installed."""
    if shutil.which("compute-sanitizer"):
        yield _check("compute-sanitizer finds nothing", _sanitized)


def _check(name: str, run: Callable[[], float]) -> dict[str, Any]:
    """Returns the row of a check. `run` returns an error that should be zero."""
    try:
        worst, where = run(), ""
    except Exception as error:
        worst, where = float("nan"), f"{type(error).__name__}: {str(error)[:200]}"
    return {"name": name, "ok": worst == 0, "worst": worst, "bound": 0.0, "where": where}


def _op(smoke: bool, clipped: bool) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """Returns a forward and backward over a packed row of all kinds of documents, and the keys that it
    reads."""
    from inplace_ttt.layout import ChunkLayout
    from inplace_ttt.ops import fast_weight

    device, chunk, (d, h) = ("cpu", 8, (40, 72)) if smoke else ("cuda", 64, (576, 1536))
    layout = ChunkLayout.from_lengths([[chunk // 2, 2 * chunk, 3 * chunk + 3, chunk]], chunk)
    g = torch.Generator(device).manual_seed(0)
    sizes = (1, layout.length, h), (1, layout.length, d), (d, h)
    z, v, w0 = (
        torch.randn(*size, generator=g, device=device).to(torch.bfloat16).requires_grad_() for size in sizes
    )
    clip = torch.full((), 0.9 * (chunk * d * h) ** 0.5, device=device) if clipped else None

    def run() -> list[Tensor]:
        out = fast_weight(z, v, w0, eta=0.02, layout=layout, clip=clip, backend="triton")
        return [out, *torch.autograd.grad(out, (z, v, w0), torch.ones_like(out))]

    return run, z


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((one.float() - other.float()).abs().max()) for one, other in zip(found, expected, strict=True)
    )


def _again(smoke: bool, clipped: bool) -> float:
    run, _ = _op(smoke, clipped)
    return _difference(run(), run())


def _no_host_waits(clipped: bool) -> float:
    run, _ = _op(False, clipped)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0.0


def _in_a_graph(clipped: bool) -> float:
    """Returns the error of a graph that is captured once and replayed on other keys."""
    run, z = _op(False, clipped)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        z.copy_(z.flip(1))
    graph.replay()
    return _difference(found, run())


def _sanitized() -> float:
    script = Path(__file__).with_name("check_kernels.py")
    command = [
        "compute-sanitizer",
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        str(script),
        "--few",
    ]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=SANITIZER_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-200:])
    return 0.0


def times(smoke: bool, repeats: int = 5) -> Iterator[tuple[str, float, Callable[[], dict[str, Any]]]]:
    """Yields the name, the approximate seconds and the function of each measurement."""
    shape = ("tiny", 40, 72, 96, 8) if smoke else ("Qwen3-4B", 2560, 9728, 32768, 512)
    lengths = (
        {"packed with 24": [24] * 4}
        if smoke
        else {f"packed with {n}": [n] * (32768 // n) for n in (512, 4096)}
    )
    for (name, packed), clipped in itertools.product(lengths.items(), (True,) if smoke else (False, True)):
        chunk = shape[4] if smoke else 256
        label = f"{shape[0]}, {name}, chunks of {chunk}{', clipped' if clipped else ''}"
        yield (
            label,
            20,
            lambda packed=packed, chunk=chunk, clipped=clipped: _paired(
                shape, [packed], chunk, clipped, None, repeats, smoke
            ),
        )
    if smoke:
        return
    yield (
        f"{shape[0]}, 8 rows",
        20,
        lambda: _paired(shape, [[4096]] * 8, shape[4], False, None, repeats, smoke),
    )
    yield (
        f"{shape[0]}, one document, clipped",
        20,
        lambda: _paired(shape, [[shape[3]]], shape[4], True, None, repeats, smoke),
    )
    for mebibytes in (128, 256, 512, 1024, 2048, 4096):
        label = f"{shape[0]}, {mebibytes} MiB of slots"
        yield (
            label,
            12,
            lambda room=mebibytes << 20: _paired(shape, [[shape[3]]], shape[4], False, room, repeats, smoke),
        )


def _paired(
    shape: tuple[str, int, int, int, int],
    lengths: list[list[int]],
    chunk: int,
    clipped: bool,
    room: int | None,
    repeats: int,
    smoke: bool,
) -> dict[str, Any]:
    """Returns the op's time over the plain linear's, for these documents and this memory for slots."""
    from bench_converted import paired

    from inplace_ttt.kernels import operands
    from inplace_ttt.layout import ChunkLayout
    from inplace_ttt.ops import fast_weight

    _, d, h, _, _ = shape
    device, layout = "cpu" if smoke else "cuda", ChunkLayout.from_lengths(lengths, chunk)
    g = torch.Generator(device).manual_seed(0)
    sizes = (layout.batch, layout.length, h), (layout.batch, layout.length, d), (d, h)
    scales = 1.0, 0.01, 0.02
    z, v, w0 = (
        (torch.randn(*size, generator=g, device=device) * scale).to(torch.bfloat16).requires_grad_()
        for size, scale in zip(sizes, scales, strict=True)
    )
    grad = torch.randn(*sizes[1], generator=g, device=device).to(torch.bfloat16)
    clip = 0.01 * (chunk * d * h) ** 0.5 if clipped else None

    def ours() -> object:
        return torch.autograd.grad(
            fast_weight(z, v, w0, eta=0.1, layout=layout, clip=clip, backend="triton"), (z, v, w0), grad
        )

    def linear() -> object:
        return torch.autograd.grad(torch.nn.functional.linear(z, w0), (z, w0), grad)

    with mock.patch.object(operands, "SLOTS_BYTES", operands.SLOTS_BYTES if room is None else room):
        return paired(ours, linear, repeats, device)
