"""The candidate tile shapes, and the choice of a tile for a device and a problem."""

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
    """The tile of a product.

    parts is the number of column parts in which the result is written. stages is the number of stages of the
    pipeline of loads.
    """

    rows: int
    columns: int
    depth: int
    parts: int = 1
    warps: int = 4
    stages: int = 3


# On Hopper, two programs with tiles of 4 warps and 3 stages share a multiprocessor. One multiplies while the
# other writes.
_HOPPER = (Tile(128, 256, 64, 2, 8, 3), Tile(128, 128, 64, 4, 4, 3), Tile(64, 128, 64, 1, 4, 4))
_HOPPER_TWO_SUMS = (Tile(128, 128, 64, 2, 8, 3), Tile(64, 128, 64, 2, 4, 3))
# Ampere copies tiles by pointer. The addresses need registers, so its tiles are smaller.
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
    """Returns the candidate tiles. The first is the default.

    Args:
        dtype: Dtype of the factors.
        capability: Compute capability; None for the interpreter.
        two_sums: True if a program holds two float32 tiles.
        square: True for tiles with as many rows as columns, small enough for two per program.
        by_pointer: True if tiles are not copied by descriptor.
    """
    if capability is None:
        return _INTERPRETER
    if dtype == torch.float32:
        return _FULL_PRECISION
    has_room = capability[0] in (9, 10)  # 227 KiB of shared memory per program
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
"""The time of each candidate in milliseconds, for the problems that were timed."""

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
    """Runs with the best tile for `key`. If `run` may be called repeatedly, timing finds that tile first.

    Tiles of equal depth add in the same order, so the choice does not change a result's bits. Torch's
    deterministic mode uses the default nevertheless.

    Args:
        key: Identifies the problem.
        candidates: The tiles; the first is the default.
        run: Computes the result with a tile.
        repeatable: True if `run` may be called repeatedly.
        device: The device that is timed.
        restore: Undoes the effect of the timed runs, if repeated runs change their output.

    Returns:
        The result of `run`.
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
    """Returns the median time of each candidate, infinite for one that exceeds the device's resources.

    The candidates run in turn, so a change of the GPU's clock affects all of them.
    """
    times: dict[Tile, list[float]] = {tile: [] for tile in candidates}
    with torch.cuda.device(device):
        for tile in candidates:
            try:
                run(tile)  # the first run compiles
            except OutOfResources:
                del times[tile]
        end = time.monotonic() + _WARM_UP_SECONDS
        while time.monotonic() < end:  # an idle GPU needs this long to reach its clock
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
