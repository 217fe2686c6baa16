"""Invented statements for training. The model has to recall each when it occurs a second time.

Their subjects and answers are of the kinds of `tasks.facts`: places and towns of random syllables, first
names, numbers, and some common words. Their relations are different, so that no training sentence holds a
fact that `tasks.facts` asks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .facts import PEOPLE, names

_COLORS = (
    "red",
    "green",
    "blue",
    "white",
    "black",
    "yellow",
    "grey",
    "brown",
    "purple",
    "orange",
    "pink",
    "golden",
)
_GOODS = (
    "wool",
    "salt",
    "honey",
    "wine",
    "cheese",
    "iron",
    "timber",
    "corn",
    "silk",
    "leather",
    "glass",
    "butter",
    "paper",
    "cloth",
    "apples",
    "fish",
)
_PERSON, _TOWN, _NUMBER, _COLOR, _GOOD = range(5)
_OF_PLACES = {
    _PERSON: (
        "The miller of {} is",
        "The bell of {} was cast by",
        "The mayor of {} is called",
        "The bridge at {} was built by",
        "The doctor in {} is",
        "The school of {} was founded by",
    ),
    _TOWN: (
        "The road from {} leads to",
        "The river at {} is called the",
        "The nearest village to {} is",
        "The ship that was built in {} is called the",
    ),
    _NUMBER: ("The number of houses in {} is", "The bridge at {} has a length of", "A horse in {} costs"),
    _COLOR: ("The gate of {} is painted", "The flag of {} is", "The walls of {} are"),
    _GOOD: ("The market of {} sells", "The people of {} live from"),
}
_OF_PEOPLE = {
    _PERSON: ("The best friend of {} is",),
    _TOWN: ("{} was married in", "{} went to school in", "{} was buried at", "The horse of {} is called"),
    _NUMBER: ("The lucky number of {} is",),
    _GOOD: ("{} sells",),
}
_RELATIONS = [
    (sentence, of_place, kind)
    for of_place, of in ((True, _OF_PLACES), (False, _OF_PEOPLE))
    for kind, sentences in of.items()
    for sentence in sentences
]


@dataclass(frozen=True)
class Statement:
    """A sentence that ends with its answer.

    Attributes:
        prompt: text up to the space before the answer.
        answer: the answer.
    """

    prompt: str
    answer: str


def statements(number: int, generator: random.Random) -> list[Statement]:
    """Returns `number` statements with different prompts."""
    invented = names(generator)
    found: dict[str, str] = {}
    while len(found) < number:
        sentence, of_place, kind = generator.choice(_RELATIONS)
        subject = next(invented) if of_place else generator.choice(PEOPLE)
        prompt, answer = sentence.format(subject), _answer(kind, generator, invented)
        if answer != subject:
            found.setdefault(prompt, answer)
    return [Statement(prompt, answer) for prompt, answer in found.items()]


def _answer(kind: int, generator: random.Random, invented: Iterator[str]) -> str:
    if kind == _TOWN:
        return next(invented)
    if kind == _NUMBER:
        return str(generator.randrange(100, 1000))
    return generator.choice({_PERSON: PEOPLE, _COLOR: _COLORS, _GOOD: _GOODS}[kind])
