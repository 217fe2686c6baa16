"""The few tile shapes that are tried, and which one is kept for a device and a problem."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from .support import INTERPRETED

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a product's tile, in how many column parts its result is written, warps,
    stages."""

    rows: int
    columns: int
    depth: int
    parts: int = 1
    warps: int = 4
    stages: int = 3


# Of Hopper's, those of 4 warps and 3 stages are for two programs a multiprocessor: one multiplies while the
# other writes.
_HOPPER = (Tile(128, 256, 64, 2, 8, 3), Tile(128, 128, 64, 4, 4, 3), Tile(64, 128, 64, 1, 4, 4))
_HOPPER_TWO_SUMS = (Tile(128, 128, 64, 2, 8, 3), Tile(64, 128, 64, 2, 4, 3))
# By pointer, which is Ampere's way, addresses take registers too.
_AMPERE = (Tile(128, 128, 32, 4, 8, 3), Tile(64, 128, 32, 4, 4, 3))
_AMPERE_TWO_SUMS = (Tile(64, 128, 32, 4, 8, 3), Tile(64, 64, 32, 4, 4, 3))
_SQUARE = (Tile(128, 128, 64, 1, 8, 3), Tile(64, 64, 64, 1, 4, 3))
_FULL_PRECISION = (Tile(64, 64, 16, 1, 8, 2),)
_INTERPRETER = (Tile(32, 64, 16, 4),)


def tiles(
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    two_sums: bool = False,
    square: bool = False,
    by_pointer: bool = False,
) -> tuple[Tile, ...]:
    """The candidates, the first one the default. None: the interpreter.

    two_sums: a program holds two float32 tiles. square: rows = columns, and few enough for two. by_pointer:
        no copies by descriptor.
    """
    if capability is None:
        return _INTERPRETER
    if dtype == torch.float32:
        return _FULL_PRECISION
    has_room = capability[0] in (9, 10)  # 227 KiB of shared memory a program
    if square:
        return _SQUARE if has_room else _SQUARE[1:]
    if has_room and not by_pointer:
        return _HOPPER_TWO_SUMS if two_sums else _HOPPER
    return _AMPERE_TWO_SUMS if two_sums else _AMPERE


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    return None if INTERPRETED else torch.cuda.get_device_capability(device)


_chosen: dict[Hashable, Tile] = {}
timed: dict[Hashable, dict[Tile, float]] = {}
"""What each candidate took, in milliseconds, for the problems that were timed."""

_WARM_UP_SECONDS = 0.1
_ROUNDS = 5


def run_tuned(
    key: Hashable,
    candidates: Sequence[Tile],
    run: Callable[[Tile], T],
    *,
    repeatable: bool,
    device: torch.device,
    restore: Callable[[], object] | None = None,
) -> T:
    """Run with the best tile for `key`, finding it first where that is allowed: `run` may be called again and
    again.

    restore: undoes what runs leave, where it is not the same each time. Tiles of one depth add in one order,
        so the choice
    does not change a result's bits; still, deterministic mode takes the default.
    """
    if key not in _chosen:
        if len(candidates) == 1 or torch.are_deterministic_algorithms_enabled():
            _chosen[key] = candidates[0]
        elif not repeatable or torch.cuda.is_current_stream_capturing():
            return run(candidates[0])
        else:
            timed[key] = _milliseconds(candidates, run, device)
            _chosen[key] = min(candidates, key=lambda tile: timed[key][tile])
            if restore is not None:
                restore()
    return run(_chosen[key])


def _milliseconds(
    candidates: Sequence[Tile], run: Callable[[Tile], object], device: torch.device
) -> dict[Tile, float]:
    """Median time of each, in turn so that a clock that moves moves all; infinite where the device has no
    room for it."""
    times: dict[Tile, list[float]] = {tile: [] for tile in candidates}
    with torch.cuda.device(device):
        for tile in candidates:
            try:
                run(tile)  # compiles
            except OutOfResources:
                del times[tile]
        end = time.monotonic() + _WARM_UP_SECONDS
        while time.monotonic() < end:  # a GPU at rest takes this long to reach its clock
            for tile in times:
                run(tile)
            torch.cuda.synchronize()
        for _, tile in itertools.product(range(_ROUNDS), times):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(tile)
            stop.record()
            stop.synchronize()
            times[tile].append(start.elapsed_time(stop))
    return {tile: statistics.median(times[tile]) if tile in times else float("inf") for tile in candidates}
