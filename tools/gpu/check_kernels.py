"""Compares the kernels with the sequential reference on this machine's GPU, without pytest.

    python tools/gpu/check_kernels.py [--few] [--smoke]

Exits with 1 if a line of the table does not hold. --smoke runs through Triton's interpreter.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
ETA = 0.02
_PROCESSES = 16
"""Largest number of processes. Each takes GPU memory for its context."""
# name -> documents of each row in eighths of a chunk, and the row length with its padding
DOCUMENTS: dict[str, tuple[list[list[tuple[int, int]]], int]] = {
    "one": ([[(0, 61)]], 61),
    "packed": ([[(0, 5), (5, 40), (40, 61), (61, 62)]], 62),
    "rows with padding": ([[(3, 50)], [(2, 19), (21, 60)], [], [(0, 1)]], 62),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--few", action="store_true", help="tiny sizes on the GPU, for a sanitizer")
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    rows = list(checks("cpu" if args.smoke else "cuda", args.smoke or args.few))
    for row in rows:
        print(
            f"{'ok  ' if row['ok'] else 'FAIL'} {row['name']:60} worst {row['worst']:.1e} of {row['bound']:.0e} ({row['where']})"
        )
    return 0 if all(row["ok"] for row in rows) else 1


def checks(device: str, smoke: bool, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
    """Yields a row for each case: name, ok, the worst error relative to the largest entry, its bound and its
    place.

    Args:
        part, parts: run only every parts-th group of cases, so that several processes compile and check
            side by side.
    """
    # chunk size, d, h: tiles by descriptor, with edges; by pointer, for chunks or rows without whole
    # vectors; documents of up to 1365 tokens (51 in the smoke run) in the dual form
    shapes = {
        "descriptors": (192, 328, 712), "pointers": (75, 129, 203), "short": (64, 1024, 2048), "SmolLM2-135M": (256, 576, 1536),
    }  # fmt: skip
    if smoke:
        shapes = {"descriptors": (32, 40, 72), "pointers": (13, 17, 35), "short": (8, 40, 72)}
    dtypes = (torch.bfloat16,) if smoke else tuple(BOUND)
    forms = ((False, False, True), (True, True, True), (True, True, False))
    cases = [(*form, clip) for form in forms for clip in (False, True)]
    for number, (documents, shape, dtype) in enumerate(itertools.product(DOCUMENTS, shapes, dtypes)):
        if number % parts != part:
            continue
        few = smoke or dtype == torch.float16
        every_tile = (documents, shape, dtype) == ("one", "SmolLM2-135M", torch.bfloat16)
        chosen = [cases[(number + 1) % len(cases)]] if few else cases
        for (start, keep, w0, clip), tile in itertools.product(chosen, range(3 if every_tile else 1)):
            chunk, d, h = shapes[shape]
            # the typical norm of a random delta: some chunks are clipped
            tau = 0.9 * (chunk * d * h) ** 0.5 if clip else None
            name = f"{documents}, {shape}, {str(dtype)[6:]}, state {start}, weight {w0}, clip {clip}, tile {tile}"
            try:
                given = _inputs(documents, chunk, d, h, dtype, device, start, w0)
                expected = _run("reference", *given, tau, keep)
                with _poisoned(), _candidate(tile):
                    found = _run("triton", *given, tau, keep)
            except Exception as error:
                yield _broken(name, error, BOUND[dtype])
                continue
            yield _row(name, {key: _distance(found[key], expected[key]) for key in expected}, BOUND[dtype])
    for number, run in enumerate((_convolutions, _least_squares, _sums)):
        if part == parts - 1 - number % parts:
            try:
                yield from run(device, smoke)
            except Exception as error:
                yield _broken(run.__name__, error, 0.0)


def _row(name: str, errors: dict[str, float], bound: float) -> dict[str, Any]:
    where = max(errors, key=lambda key: errors[key])
    ok = all(error < bound for error in errors.values())  # NaN gives False
    return {"name": name, "ok": ok, "worst": errors[where], "bound": bound, "where": where}


def _broken(name: str, error: BaseException, bound: float) -> dict[str, Any]:
    """Returns the row of a case that raised, with the place of the error."""
    where = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    trace = "".join(traceback.format_exception(error))[-4000:]
    return {
        "name": name,
        "ok": False,
        "worst": float("nan"),
        "bound": bound,
        "where": where,
        "traceback": trace,
    }


def on_all_cores(device: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Runs the checks in one process per core, since most of the time goes into compiling.

    The compiled kernels stay in Triton's cache. A part whose process dies, as after an illegal address, gives
    a row that does not hold.
    """
    parts = 1 if smoke else min(len(os.sched_getaffinity(0)), _PROCESSES)
    if parts == 1:
        yield from checks(device, smoke)
        return
    with concurrent.futures.ProcessPoolExecutor(
        parts, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        running = {pool.submit(_part, device, part, parts): part for part in range(parts)}
        for done in concurrent.futures.as_completed(running):
            try:
                yield from done.result()
            except Exception as error:
                yield _broken(f"part {running[done]} of {parts}", error, 0.0)


def _part(device: str, part: int, parts: int) -> list[dict[str, Any]]:
    return list(checks(device, False, part, parts))


def _inputs(
    documents: str, chunk: int, d: int, h: int, dtype: torch.dtype, device: str, start: bool, w0: bool
) -> tuple[Any, dict[str, Tensor]]:
    from inplace_ttt.layout import ChunkLayout

    rows, length = DOCUMENTS[documents]
    scaled = tuple(tuple((a * chunk // 8, b * chunk // 8) for a, b in row) for row in rows)
    layout = ChunkLayout(scaled, length * chunk // 8, chunk)
    g = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    made = {"z": draw(layout.batch, layout.length, h), "v": draw(layout.batch, layout.length, d)}
    made |= {"weight": draw(d, h)} if w0 else {}
    made = {name: x.to(dtype) for name, x in made.items()}
    made |= {"initial_state": draw(layout.batch, d, h)} if start else {}
    return layout, {name: x.requires_grad_() for name, x in made.items()}


def _run(
    backend: str, layout: Any, given: dict[str, Tensor], clip: float | None, keep: bool
) -> dict[str, Tensor]:
    from inplace_ttt.ops import fast_weight

    result = fast_weight(
        **{"weight": None, **given}, eta=ETA, layout=layout, clip=clip, backend=backend, return_state=keep
    )
    results = dict(zip(("out", "state"), result, strict=True)) if keep else {"out": result}
    g = torch.Generator(given["z"].device).manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, device=x.device).to(x)).sum() for x in results.values())
    grads = torch.autograd.grad(loss, list(given.values()))
    return {
        name: x.detach()
        for name, x in {
            **results,
            **{f"d_{name}": grad for name, grad in zip(given, grads, strict=True)},
        }.items()
    }


@contextlib.contextmanager
def _candidate(number: int) -> Iterator[None]:
    """Takes a fixed candidate of each kernel's tiles in place of the tuned one.

    So the checks do not depend on the winner of the tuning.
    """
    from inplace_ttt.kernels import gram, tuning, walk

    def tiles(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = tuning.tiles(*args, **kwargs)
        return (found[number % len(found)],)

    with (
        mock.patch.dict(tuning._chosen, clear=True),
        mock.patch.object(walk, "tiles", tiles),
        mock.patch.object(gram, "tiles", tiles),
    ):
        yield


def _convolutions(device: str, smoke: bool) -> Iterator[dict[str, Any]]:
    from inplace_ttt.kernels import chunk_conv
    from inplace_ttt.layout import ChunkLayout
    from inplace_ttt.ops.conv import chunk_conv as conv_by_taps

    d = 19 if smoke else 1000
    layout = (
        ChunkLayout((((3, 20), (20, 41)), ()), 44, 9)
        if smoke
        else ChunkLayout((((3, 2000), (2000, 5001)), ()), 5004, 192)
    )
    for dtype, (first_tap, taps) in itertools.product(BOUND, ((-2, 5), (-3, 4))):
        g = torch.Generator(device).manual_seed(2)
        sizes = (2, layout.length, d), (2, layout.length, d), (d, 1, taps)
        x, d_out, conv = (torch.randn(*size, generator=g, device=device) for size in sizes)
        results = []
        for convolve, precision in ((conv_by_taps, torch.float64), (chunk_conv, dtype)):
            leaves = [t.to(dtype).to(precision).requires_grad_() for t in (x, conv)]
            with _poisoned():
                out = convolve(*leaves, layout.chunk_ids(device), first_tap)
                results.append(
                    [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype).to(precision))]
                )
        errors = {
            name: _distance(found, wanted)
            for name, wanted, found in zip(("out", "d_x", "d_conv"), *results, strict=True)
        }
        yield _row(f"convolution, {taps} taps, {str(dtype)[6:]}", errors, BOUND[dtype])


def _least_squares(device: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Checks least squares: several chunks together, inverse factors, and float32 in two halves.

    The cases have wide keys, few keys, gates, clips, a starting state and packed rows.
    """
    from inplace_ttt.layout import ChunkLayout
    from inplace_ttt.ops import fast_weight
    from inplace_ttt.rules import RidgeRule

    shapes = (
        {"tiny": (8, 12, 10)}
        if smoke
        else {"odd": (75, 129, 203), "SmolLM2-135M": (128, 576, 1024), "few keys": (64, 512, 48)}
    )
    for (name, documents), (shape, (chunk, d, r)), dtype in itertools.product(
        DOCUMENTS.items(), shapes.items(), BOUND
    ):
        rows, length = documents
        scaled = tuple(tuple((a * chunk // 8, b * chunk // 8) for a, b in row) for row in rows)
        layout, g = ChunkLayout(scaled, length * chunk // 8, chunk), torch.Generator(device).manual_seed(3)
        size = (layout.batch, layout.length)
        made = {
            "z": torch.randn(*size, r, generator=g, device=device),
            "v": torch.randn(*size, d, generator=g, device=device),
        }
        made = {key: x.to(dtype) for key, x in made.items()}
        keys = torch.randn(layout.batch, 2 * r, r, generator=g, device=device)
        made["initial_state"] = torch.cat(
            [torch.randn(layout.batch, d, r, generator=g, device=device), keys.mT @ keys], dim=1
        )
        made["gate"] = 2 * torch.rand(*size, generator=g, device=device)
        clips = {"free": None, "clipped": 0.9 * (chunk * d * r) ** 0.5}
        for (clipped, clip), given in itertools.product(clips.items(), (("z", "v"), tuple(made))):
            inputs = {key: made[key].detach().requires_grad_() for key in given}
            results: list[list[Tensor]] = []
            for backend in ("reference", "auto"):
                out = fast_weight(
                    **inputs,
                    weight=None,
                    eta=1.0,
                    layout=layout,
                    clip=clip,
                    rule=RidgeRule(3.0),
                    backend=backend,
                )
                grad = torch.randn(
                    out.shape, generator=torch.Generator(device).manual_seed(4), device=device
                ).to(out)
                results.append([out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)])
            errors = {
                key: _distance(found, wanted)
                for key, wanted, found in zip(("out", *given), *results, strict=True)
            }
            case = f"least squares, {name}, {shape}, {str(dtype)[6:]}, {clipped}, {'gated, from a state' if 'gate' in given else 'plain'}"
            # of 1,024 keys G + λI has a condition of 1e3
            bound = 100 * BOUND[dtype] if dtype == torch.float32 else 2 * BOUND[dtype]
            yield _row(case, errors, bound)


def _sums(device: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Checks the sums of writes that ranks exchange: the last document of each row, free and clipped."""
    from inplace_ttt.layout import ChunkLayout
    from inplace_ttt.ops import fast_weight
    from inplace_ttt.ops.forms import form_of
    from inplace_ttt.rules import PAPER_RULE

    chunk, d, h = (8, 12, 10) if smoke else (192, 328, 712)
    for (name, (rows, length)), dtype in itertools.product(DOCUMENTS.items(), BOUND):
        scaled = tuple(tuple((a * chunk // 8, b * chunk // 8) for a, b in row if b - a >= 8) for row in rows)
        layout, g = ChunkLayout(scaled, length * chunk // 8, chunk), torch.Generator(device).manual_seed(5)
        size = (layout.batch, layout.length)
        inputs = [
            torch.randn(*size, width, generator=g, device=device).to(dtype).requires_grad_()
            for width in (h, d)
        ]
        spans = [spans[-1] if spans else None for spans in layout.documents]
        for clip in (None, 0.9 * (chunk * d * h) ** 0.5):
            found = form_of(PAPER_RULE).sum_of_writes(
                *inputs, spans, layout=layout, rule=PAPER_RULE, clip=clip, gate=None
            )
            _, wanted = fast_weight(
                *inputs, None, eta=ETA, layout=layout, clip=clip, backend="reference", return_state=True
            )
            grad = torch.randn(found.shape, generator=g, device=device).to(found)
            pairs = [(x.detach(), *torch.autograd.grad(x, inputs, grad.to(x))) for x in (found, wanted)]
            errors = {
                key: _distance(ours, theirs)
                for key, ours, theirs in zip(("state", "d_z", "d_v"), *pairs, strict=True)
            }
            yield _row(f"sums, {name}, {str(dtype)[6:]}, clip {clip is not None}", errors, BOUND[dtype])


def _distance(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    )


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Fills new memory with NaN, so that a read of unwritten memory shows."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            make = getattr(owner, name)

            def filled(*args: Any, _make: Any = make, **kwargs: Any) -> Tensor:
                made = _make(*args, **kwargs)
                return made.fill_(float("nan")) if made.is_floating_point() else made

            stack.enter_context(mock.patch.object(owner, name, filled))
        yield


if __name__ == "__main__":
    sys.exit(main())
