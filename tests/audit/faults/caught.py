"""What the audit says of a model or a run in which a fault is planted."""

from __future__ import annotations

import functools

import pytest

from inplace_ttt.errors import InPlaceTTTError

from .fault import Fault
from .liveness import forget
from .run import Run
from .world import World

REFUSED = "(refused)"
"""Stands for the items where the audit itself ends in an error: something is seen, and nothing named."""


def caught(fault: Fault) -> list[str]:
    """The items that name a deviation with the fault and not without it; none where it is missed."""
    forget()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if fault.plant is not None:
                fault.plant(patch)
            named = fault.world.audited(fault.spoil).undeclared
    except InPlaceTTTError:
        named = [REFUSED]
    finally:
        forget()
    return [id for id in named if id not in _without(fault.sound_world)]


@functools.cache
def _without(world: World | Run) -> frozenset[str]:
    """What the audit names of a sound one, whose settings differ from the paper's."""
    return frozenset(world.audited().undeclared)
