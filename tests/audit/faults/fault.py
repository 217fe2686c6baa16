"""A fault, and how faults are composed of kinds, conditions and sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .conditions import ALWAYS, When, planted
from .run import Run
from .under_way import Patch
from .world import USUAL, Spoil, World, world_of

Plant = Callable[[Patch], None]


@dataclass(frozen=True)
class Fault:
    """kind and place: what it is and where. owners: the items of the audit that may rightly name it.

    plant: done before the model is made. spoil: done to the model. scenes: where it is proved live.
    instead_of: what is sound, where settings are the fault and not the world's.
    """

    name: str
    kind: str
    place: str
    owners: frozenset[str]
    scenes: tuple[str, ...]
    plant: Plant | None = None
    spoil: Spoil | None = None
    world: World | Run = USUAL
    instead_of: World | Run | None = None

    @property
    def sound_world(self) -> World | Run:
        """The same model or run without the fault."""
        return self.instead_of or self.world


@dataclass(frozen=True)
class Kind:
    """A deviation that conditions and sizes make faults of.

    plant, spoil: size and condition -> how it is planted. sizes: 1 is the order of a whole write; one entry
        where it has no size.
    whens: conditions under which it can show. count: how many faults are drawn of them.
    scenes: where it shows, if that is not the condition's to say. world: the model it needs.
    """

    name: str
    place: str
    owners: frozenset[str]
    plant: Callable[[float, When], Plant] | None = None
    sizes: tuple[float, ...] = (1.0,)
    whens: tuple[When, ...] = (ALWAYS,)
    count: int = 3
    scenes: tuple[str, ...] = ()
    world: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[float, When], Spoil] | None = None

    def faults(self) -> Iterator[Fault]:
        """Pairs of condition and size drawn by the kind's name: no condition and no size twice before all
        were there."""
        draw = random.Random(self.name)
        whens, sizes = list(self.whens), list(self.sizes)
        draw.shuffle(whens)
        pairs = [
            (when, sizes[(i + turn) % len(sizes)])
            for turn in range(len(sizes))
            for i, when in enumerate(whens)
        ]
        for when, size in pairs[: self.count]:
            named = [self.name, when.name, f"{size:g}" if len(sizes) > 1 else ""]
            yield Fault(
                " · ".join(part for part in named if part),
                self.name,
                self.place,
                self.owners | when.owners,
                self.scenes or when.scenes,
                None if self.plant is None else planted(self.plant(size, when)),
                None if self.spoil is None else self.spoil(size, when),
                world_of({**when.world, **self.world}),
            )


def owned(ids: str) -> frozenset[str]:
    return frozenset(ids.split())
