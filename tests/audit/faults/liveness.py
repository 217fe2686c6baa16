"""Whether a fault changes what a model computes: its scenes with the fault planted, against the same
without."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from inplace_ttt.layout import ChunkLayout

from .fault import Fault
from .run import RUN_SCENES, Run
from .scene_pieces import Numbers
from .scenes import SCENES
from .world import Spoil, World

ENOUGH = 1e-3
"""Relative difference of a number from which a fault counts as live."""
ROUNDING = {torch.bfloat16: 0.05}
"""What the order of operations alone may change in a dtype, where it is more than `ENOUGH`; a state is
float32 all the same."""


def liveness(fault: Fault) -> float:
    """The largest relative change of a number in the fault's scenes, in units of what is enough; above 1 is
    live."""
    found = 0.0
    for scene in fault.scenes:
        right = _right(scene, fault.sound_world)
        forget()
        with pytest.MonkeyPatch.context() as patch:
            if fault.plant is not None:
                fault.plant(patch)
            wrong = play(scene, fault.world, fault.spoil)
        forget()
        found = max(
            found,
            *(_change(wrong.get(name), value) / _enough(fault.world, name) for name, value in right.items()),
        )
    return found


def _enough(world: World | Run, name: str) -> float:
    return ROUNDING.get(world.dtype, ENOUGH) if isinstance(world, World) and name != "state" else ENOUGH


def play(scene: str, world: World | Run, spoil: Spoil | None) -> Numbers:
    """What a scene computes."""
    return RUN_SCENES[scene](world, spoil) if isinstance(world, Run) else SCENES[scene](world, spoil)


def forget() -> None:
    """Layouts are kept between calls, with what a fault has made of them."""
    ChunkLayout.shared.cache_clear()


@functools.cache
def _right(scene: str, world: World | Run) -> Numbers:
    forget()
    return play(scene, world, None)


def _change(wrong: Tensor | None, right: Tensor) -> float:
    """‖wrong - right‖ / ‖right‖; infinite where there is no such number, or another shape."""
    if wrong is None or wrong.shape != right.shape:
        return float("inf")
    a, b = wrong.double(), right.double()
    if not bool(a.isfinite().all()):
        return float("inf")
    size = torch.linalg.vector_norm(b)
    return float(torch.linalg.vector_norm(a - b) / (size if size > 0 else 1.0))
