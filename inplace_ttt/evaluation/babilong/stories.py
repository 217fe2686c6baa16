"""Stories with a question, as in bAbI's first five tasks.

A story is a list of facts in order; one word that follows from them answers the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from .world import OPPOSITE, PEOPLE, ROOMS, THINGS, live

_Asked = list[tuple[str, str]]
"""Questions with their answers."""

_OF_A_GIFT = (
    ("Who gave the {1} to {2}?", 0),
    ("Who gave the {1}?", 0),
    ("What did {0} give to {2}?", 1),
    ("Who did {0} give the {1} to?", 2),
    ("Who received the {1}?", 2),
)
"""Questions about (giver, thing, receiver), with the index of the answer."""


@dataclass(frozen=True)
class Story:
    """A story with a question.

    Attributes:
        facts: the sentences, in order.
        question: the question.
        answer: the answer, one word.
        options: words of the answer's kind that occur in the facts but not in the question. One of them
            is the answer.
    """

    facts: tuple[str, ...]
    question: str
    answer: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One of bAbI's tasks.

    Attributes:
        hint: explanation for the reader.
        facts: number of facts of a story.
        example: number of facts of a solved example.
        make: makes the facts and all questions with their answers.
    """

    hint: str
    facts: int
    example: int
    make: Callable[[Random, int], tuple[Sequence[str], _Asked]]

    def story(self, random: Random, facts: int) -> Story:
        """Returns a story of `facts` facts, with a question that has two or more options."""
        while True:
            told, asked = self.make(random, facts)
            known = set(_words(" ".join(told)))
            stories = [
                Story(tuple(told), question, answer, _options(known, question, answer))
                for question, answer in asked
            ]
            if possible := [story for story in stories if len(story.options) > 1]:
                return random.choice(possible)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _options(told: set[str], question: str, answer: str) -> tuple[str, ...]:
    kind = next(kind for kind in (PEOPLE, ROOMS, THINGS) if answer in kind)
    return tuple(word for word in kind if word in told and word not in _words(question))


def _where_is_somebody(random: Random, facts: int) -> tuple[Sequence[str], _Asked]:
    world = live(random, ["move"], facts)
    return world.sentences, [(f"Where is {person}?", room) for person, room in world.places.items()]


def _where_is_a_thing(random: Random, facts: int) -> tuple[Sequence[str], _Asked]:
    world = live(random, ["move", "take", "drop"], facts)
    return world.sentences, [(f"Where is the {thing}?", trail[-1]) for thing, trail in world.trails.items()]


def _where_was_a_thing(random: Random, facts: int) -> tuple[Sequence[str], _Asked]:
    """Makes questions about the room before a room that the thing entered exactly once."""
    world = live(random, ["move", "take", "drop"], facts)
    asked = [
        (f"Where was the {thing} before the {room}?", before)
        for thing, trail in world.trails.items()
        for before, room in pairwise(trail)
        if trail.count(room) == 1
    ]
    return world.sentences, asked


def _what_lies_where(random: Random, facts: int) -> tuple[Sequence[str], _Asked]:
    """Makes rooms on different sides of a middle room.

    Each question names the middle room, so no answer depends on a room beyond another one.
    """
    middle, *around = random.sample(ROOMS, facts + 1)
    told: list[str] = []
    asked: _Asked = []
    for room, side in zip(around, random.sample(list(OPPOSITE), facts), strict=True):
        ways = f"The {room} is {side} of the {middle}.", f"The {middle} is {OPPOSITE[side]} of the {room}."
        told.append(random.choice(ways))
        asked += [
            (f"What is {side} of the {middle}?", room),
            (f"What is the {middle} {OPPOSITE[side]} of?", room),
        ]
    return told, asked


def _who_gave_what(random: Random, facts: int) -> tuple[Sequence[str], _Asked]:
    """Makes questions that have only one answer, even if several gifts fit."""
    world = live(random, ["move", "take", "drop", "give"], facts)
    answers: dict[str, set[str]] = {}
    for gift in world.gifts:
        for question, place in _OF_A_GIFT:
            answers.setdefault(question.format(*gift), set()).add(gift[place])
    return world.sentences, [
        (question, right.pop()) for question, right in answers.items() if len(right) == 1
    ]


_CARRIED = (
    "People walk between rooms. A thing that somebody took goes where they go, and stays where they "
    "put it down."
)
KINDS = {
    "babilong_qa1": Kind(
        "People walk between rooms, and everybody is where they went last.", 10, 4, _where_is_somebody
    ),
    "babilong_qa2": Kind(_CARRIED, 12, 5, _where_is_a_thing),
    "babilong_qa3": Kind(_CARRIED, 16, 7, _where_was_a_thing),
    "babilong_qa4": Kind("Rooms lie north, south, east or west of each other.", 2, 2, _what_lies_where),
    "babilong_qa5": Kind(
        "People walk between rooms, take things and give them to each other.", 12, 7, _who_gave_what
    ),
}
"""bAbI's tasks by name.

The first three need one, two and three supporting facts; relations in the last two have two and three
arguments.
"""
