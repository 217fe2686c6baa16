"""A world of people who walk between rooms and take, put down and hand over things.

One sentence states each event. A person's room is unknown until an event states it. A thing that is taken for
the first time was in the room of the person who takes it. From then on it is with its holder, or where it was
put down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

MOVE = ("{} went to the {}.", "{} walked to the {}.", "{} moved to the {}.")
TAKE = ("{} took the {}.", "{} picked up the {}.")
DROP = ("{} put down the {}.", "{} dropped the {}.")
GIVE = ("{} gave the {} to {}.", "{} handed the {} to {}.")


@dataclass
class World:
    """State of the world after the events so far.

    Attributes:
        places: room of each person.
        holders: person who holds each thing.
        trails: rooms a thing was in since it was first taken; the last is where it is.
        gifts: (giver, thing, receiver) of each gift.
        sentences: one sentence per event.
    """

    places: dict[str, str] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    trails: dict[str, list[str]] = field(default_factory=dict)
    gifts: list[tuple[str, str, str]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def moves(self) -> Iterator[tuple[str, ...]]:
        """Yields the possible moves: (person, room)."""
        yield from ((person, room) for person in PEOPLE for room in ROOMS if self.places.get(person) != room)

    def takes(self) -> Iterator[tuple[str, ...]]:
        """Yields the things that can be taken: (person, thing)."""
        free = [thing for thing in THINGS if thing not in self.holders]
        for person, room in self.places.items():
            yield from (
                (person, thing)
                for thing in free
                if thing not in self.trails or self.trails[thing][-1] == room
            )

    def drops(self) -> Iterator[tuple[str, ...]]:
        """Yields the things that can be put down: (person, thing)."""
        yield from ((person, thing) for thing, person in self.holders.items())

    def gives(self) -> Iterator[tuple[str, ...]]:
        """Yields the possible gifts: (giver, thing, receiver)."""
        for thing, giver in self.holders.items():
            beside = [
                person
                for person, room in self.places.items()
                if person != giver and room == self.places[giver]
            ]
            yield from ((giver, thing, person) for person in beside)

    def move(self, person: str, room: str) -> None:
        self.places[person] = room
        for thing, holder in self.holders.items():
            if holder == person:
                self.trails[thing].append(room)

    def take(self, person: str, thing: str) -> None:
        self.holders[thing] = person
        self.trails.setdefault(thing, [self.places[person]])

    def drop(self, person: str, thing: str) -> None:
        del self.holders[thing]

    def give(self, giver: str, thing: str, receiver: str) -> None:
        self.holders[thing] = receiver
        self.gifts.append((giver, thing, receiver))


_Acts = Callable[[World], Iterator[tuple[str, ...]]]
_KINDS: Mapping[str, tuple[_Acts, Callable[..., None], tuple[str, ...]]] = {
    "move": (World.moves, World.move, MOVE),
    "take": (World.takes, World.take, TAKE),
    "drop": (World.drops, World.drop, DROP),
    "give": (World.gives, World.give, GIVE),
}


def live(random: Random, kinds: Sequence[str], events: int) -> World:
    """Returns a world after a number of random events.

    Each possible kind of event is equally likely.

    Args:
        random: source of random numbers.
        kinds: kinds of events, "move" among them.
        events: number of events.
    """
    world = World()
    while len(world.sentences) < events:
        possible = {kind: acts for kind in kinds if (acts := list(_KINDS[kind][0](world)))}
        kind = random.choice(list(possible))
        act = random.choice(possible[kind])
        _, do, sentences = _KINDS[kind]
        do(world, *act)
        world.sentences.append(random.choice(sentences).format(*act))
    return world
