"""Times each kernel against plain torch for the same job, and measures two ceilings of the GPU.

python tools/bench/bench_kernels.py [--smoke]    # prints one JSON object per line
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU, through Triton's interpreter"
    )
    smoke = parser.parse_args().smoke
    if smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    for row in [*ceilings(smoke), *kernels(smoke)]:
        print(json.dumps(row), flush=True)


def ceilings(smoke: bool) -> Iterator[dict[str, Any]]:
    """Measures a large bf16 product in TFLOP/s, and a device-to-device copy in TB/s of bytes read and
    written."""
    device, n, gib = ("cpu", 64, 2**-12) if smoke else ("cuda", 8192, 4)
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    yield {"name": "product", "tflops": 2 * n**3 / seconds(lambda: torch.mm(a, b, out=out), device) / 1e12}
    source = torch.ones(int(gib * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield {
        "name": "copy",
        "terabytes_per_second": 2 * source.numel() / seconds(lambda: target.copy_(source), device) / 1e12,
    }


def kernels(smoke: bool) -> Iterator[dict[str, Any]]:
    """Times the walk, chunk norms, short documents and the convolution at the widths of Qwen3-4B.

    The walk and chunk norms are also timed at the widths of SmolLM2-135M.
    """
    from inplace_ttt.kernels import conv, gram, schedule
    from inplace_ttt.kernels.documents import plan_of
    from inplace_ttt.kernels.walk import walk
    from inplace_ttt.layout import ChunkLayout
    from inplace_ttt.ops.conv import chunk_conv as conv_by_taps

    device, dtype = "cpu" if smoke else "cuda", torch.bfloat16
    for d, h, chunk in (
        [(40, 72, 32)]
        if smoke
        else [(d, h, c) for d, h in ((2560, 9728), (576, 1536)) for c in (256, 512, 1024, 2048, 4096)]
    ):
        steps = 4
        a, b = (
            torch.randn(steps * chunk + 1, d, device=device).to(dtype),
            torch.randn(steps * chunk + 1, h, device=device).to(dtype),
        )
        w0 = torch.randn(d, h, device=device).to(dtype)
        carry = torch.empty(d, h, device=device)
        slots = torch.empty(steps, d, h, device=device, dtype=dtype)

        # a document that hands its state on, in one group; the chunk after it reads the last slot
        plan = plan_of(torch.tensor([[0, 0, steps * chunk + 1]]), 1, steps * chunk + 1, chunk, 0, False, True)
        (launch,) = schedule.reads(plan, True, steps, 1, a.device)

        def ours(a=a, b=b, carry=carry, slots=slots, w0=w0, chunk=chunk, launch=launch, dither=True) -> None:
            base, shape = w0 if dither else None, tuple(w0.shape)
            walk(
                a,
                b,
                launch,
                chunk=chunk,
                shape=shape,
                slots=slots,
                final=carry[None],
                scale=0.1,
                base=base,
                dither=dither,
            )

        def theirs(a=a, b=b, carry=carry, slots=slots, w0=w0, chunk=chunk) -> None:
            carry.zero_()
            for j, (values, keys) in enumerate(zip(a[:-1].split(chunk), b[:-1].split(chunk), strict=True)):
                if smoke:
                    carry.add_(values.float().T @ keys.float())
                else:
                    torch.addmm(carry, values.T, keys, out_dtype=torch.float32, out=carry)
                torch.add(w0, carry, alpha=0.1, out=slots[j])

        work = 2 * steps * chunk * d * h
        where = {"d": d, "h": h, "chunk": chunk, "chunks": steps}
        for name, run in (
            ("walk, W0 + ηS", ours),
            ("walk, R", lambda ours=ours: ours(dither=False)),
            ("torch addmm into float32", theirs),
        ):
            taken = _try(run, device)
            yield {
                "name": name,
                **where,
                "seconds": taken,
                "tflops": None if taken is None else work / taken / 1e12,
            }
        starts = torch.arange(steps, device=device) * chunk
        deltas = {
            "norms, Gram": lambda a=a, b=b, starts=starts, chunk=chunk: gram.squared_norms(
                a, b, starts, chunk
            ),
            "norms, torch delta": lambda a=a, b=b, chunk=chunk: [
                torch.linalg.vector_norm(v.T @ k, dtype=torch.float32)
                for v, k in zip(a[:-1].split(chunk), b[:-1].split(chunk), strict=True)
            ],
        }
        for name, run in deltas.items():
            yield {"name": name, **where, "seconds": _try(run, device)}
    yield from short_documents(device, smoke)
    yield from inverse_factors(device, smoke)
    tokens, d, chunk = (64, 40, 32) if smoke else (32768, 2560, 512)
    x, taps = (
        torch.randn(*size, device=device).to(dtype).requires_grad_() for size in ((1, tokens, d), (d, 1, 5))
    )
    ids = ChunkLayout.from_lengths([[tokens]], chunk).chunk_ids(device)
    grad = torch.randn(1, tokens, d, device=device).to(dtype)
    once = x.numel() * 2
    forms = {
        "convolution": (lambda: conv.convolve(x.detach(), taps.detach(), ids, -2), 2 * once),
        "convolution, gradient of its taps": (
            lambda: conv.taps_gradient(grad, x.detach(), ids, -2, 5),
            2 * once,
        ),
        "convolution in torch, both ways": (
            lambda: torch.autograd.grad(conv_by_taps(x, taps, ids, -2), (x, taps), grad),
            6 * once,
        ),
    }
    for name, (run, moved) in forms.items():
        taken = seconds(run, device)
        yield {
            "name": name,
            "tokens": tokens,
            "d": d,
            "seconds": taken,
            "terabytes_per_second": moved / taken / 1e12,
        }


def short_documents(device: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Times a row of packed documents of one length, forward and backward, by the dual form and by walks."""
    from inplace_ttt.kernels import dual, fast_weight
    from inplace_ttt.layout import ChunkLayout

    (d, h), tokens, chunk = ((40, 72), 96, 8) if smoke else ((2560, 9728), 32768, 256)
    z, v = (torch.randn(1, tokens, n, device=device).to(torch.bfloat16).requires_grad_() for n in (h, d))
    w0, grad = (
        torch.randn(d, h, device=device).to(torch.bfloat16).requires_grad_(),
        torch.randn(1, tokens, d, device=device).to(torch.bfloat16),
    )
    for length in (24,) if smoke else (512, 1024, 2048, 4096):
        spans = ChunkLayout.from_lengths([[length] * (tokens // length)], chunk).spans

        def run(spans=spans) -> object:
            out, _ = fast_weight(z, v, w0, None, None, spans, chunk, 0.1, False)
            return torch.autograd.grad(out, (z, v, w0), grad)

        for name, longest in (("short documents, dual form", length), ("short documents, walked", 0)):
            with mock.patch.object(dual, "longest", lambda d, h, longest=longest: longest):
                taken = seconds(run, device)
            yield {
                "name": name,
                "d": d,
                "h": h,
                "chunk": chunk,
                "tokens": tokens,
                "document": length,
                "seconds": taken,
            }


def inverse_factors(device: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Times the factors that least squares needs, for many chunks at once.

    These are L⁻¹ by products of halves, L⁻¹ by torch's library, and the Cholesky factor alone.
    """
    from inplace_ttt.kernels import halves, inverse_factor

    for matrices, r in ((3, 20),) if smoke else ((64, 256), (15, 1024), (36, 1024), (64, 1280)):
        x = torch.randn(matrices, r, 2 * r, device=device)
        grams, one = (
            x @ x.mT + r * torch.eye(r, device=device),
            torch.eye(r, device=device).expand(matrices, r, r),
        )
        forms: dict[str, Callable[[], object]] = {
            "inverse factor": lambda grams=grams: inverse_factor(grams.clone()),  # type: ignore[misc]
            "inverse factor in torch": lambda grams=grams, one=one: torch.linalg.solve_triangular(  # type: ignore[misc]
                torch.linalg.cholesky_ex(grams)[0], one, upper=False
            ),
            "Cholesky factor in torch": lambda grams=grams: torch.linalg.cholesky_ex(grams),  # type: ignore[misc]
            "halves of float32": lambda grams=grams: halves(grams),  # type: ignore[misc]
        }
        for name, run in forms.items():
            yield {"name": name, "matrices": matrices, "r": r, "seconds": seconds(run, device)}


def _try(run: Callable[[], object], device: str) -> float | None:
    """Returns the seconds of `run`, or None if this torch lacks such a product."""
    try:
        return seconds(run, device)
    except (RuntimeError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        print(json.dumps({"name": "refused by this torch", "error": str(error).splitlines()[0]}), flush=True)
        return None


def seconds(run: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Returns the median time of a run. Before it, two runs compile and tune, and 100 ms let the clock rise."""
    for _ in range(2):
        run()
    end = time.monotonic() + (0 if device == "cpu" else 0.1)
    while time.monotonic() < end:
        run()
        torch.cuda.synchronize()
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
