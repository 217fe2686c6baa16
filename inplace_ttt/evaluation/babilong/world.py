"""A world of people who walk between rooms, take things, put them down and hand them over; each event is told
in one sentence.

Where somebody is known only once it was told. A thing that is first taken lay in the room of whoever takes
it; from then on it is where its holder is, or where it was put down.
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
    """What holds after the events so far.

    places: who is in which room; holders: which thing is held by whom; trails: the rooms a thing was in since
        it was first taken, the
    last one being where it is; gifts: (giver, thing, receiver); told: the sentences.
    """

    places: dict[str, str] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    trails: dict[str, list[str]] = field(default_factory=dict)
    gifts: list[tuple[str, str, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def moves(self) -> Iterator[tuple[str, ...]]:
        yield from ((person, room) for person in PEOPLE for room in ROOMS if self.places.get(person) != room)

    def takes(self) -> Iterator[tuple[str, ...]]:
        free = [thing for thing in THINGS if thing not in self.holders]
        for person, room in self.places.items():
            yield from (
                (person, thing)
                for thing in free
                if thing not in self.trails or self.trails[thing][-1] == room
            )

    def drops(self) -> Iterator[tuple[str, ...]]:
        yield from ((person, thing) for thing, person in self.holders.items())

    def gives(self) -> Iterator[tuple[str, ...]]:
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
    """A world in which so many events of these kinds ("move" among them) have happened, each kind as likely
    as any that can happen."""
    world = World()
    while len(world.told) < events:
        possible = {kind: acts for kind in kinds if (acts := list(_KINDS[kind][0](world)))}
        kind = random.choice(list(possible))
        act = random.choice(possible[kind])
        _, do, sentences = _KINDS[kind]
        do(world, *act)
        world.told.append(random.choice(sentences).format(*act))
    return world
