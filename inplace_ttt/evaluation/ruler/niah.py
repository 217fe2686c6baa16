"""Needles in a haystack: sentences with a magic value each.

They are hidden in noise, in a text, or among other such sentences.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from random import Random
from typing import Literal

from ..prompt import Count, Draft, Puzzle
from .material import NOISE, Material

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind} "
    "afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?"
)
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} "
    "afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
)
_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {be}"
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Positions of needles in a text, in percent of its sentences."""


@dataclass(frozen=True)
class Needles:
    """A kind of needle task.

    Attributes:
        haystack: the text around the needles.
        key: kind of the keys.
        value: kind of the values.
        keys: number of keys.
        values: number of values per key.
        queries: number of keys that are asked for, with all their values.
    """

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def puzzle(self, random: Random, material: Material, length: int, index: int, count: Count) -> Puzzle:
        """Makes a puzzle whose size is in sentences of noise, words of text, or other needles."""
        draw = _Draw(random, material, avoid_text=self.haystack == "essay")
        told = {
            draw.new(self.key): [draw.new(self.value) for _ in range(self.values)] for _ in range(self.keys)
        }
        needles = [
            _NEEDLE.format(kind=self.value, key=key, value=value)
            for key, values in told.items()
            for value in values
        ]
        random.shuffle(needles)
        asked = random.sample(list(told), self.queries)
        answers = tuple(value for key in asked for value in told[key])
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        many = len(answers) > 1
        kind = self.value if many else self.value.removesuffix("s")
        template, prefix = (
            _MANY if many else _ONE,
            _PREFIX.format(kind=kind, query=query, be="are" if many else "is"),
        )
        places = [random.random() for _ in needles]
        depths = sorted(random.sample(_DEPTHS, len(needles)))
        others: list[str] = []

        def draft(size: int) -> Draft:
            if self.haystack == "essay":
                context = _in_text(material.essay(size), needles, depths)
            else:
                while self.haystack == "needles" and len(others) < size:
                    others.append(
                        _NEEDLE.format(kind=self.value, key=draw.new(self.key), value=draw.new(self.value))
                    )
                context = "\n".join(
                    _among(noise(size) if self.haystack == "noise" else others[:size], needles, places)
                )
            return Draft(template.format(kind=kind, context=context, query=query), prefix, answers)

        return Puzzle(1, 10 * length, draft)


class _Draw:
    """Draws keys and values without duplicates, and none that occurs in the text around them."""

    def __init__(self, random: Random, material: Material, avoid_text: bool) -> None:
        self.random, self.material, self.avoid_text, self.drawn = random, material, avoid_text, set[str]()

    def new(self, kind: str) -> str:
        while (drawn := self._any(kind)) in self.drawn or (self.avoid_text and self.material.mentions(drawn)):
            pass
        self.drawn.add(drawn)
        return drawn

    def _any(self, kind: str) -> str:
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=self.random.getrandbits(128), version=4))
        return f"{self.random.choice(self.material.adjectives)}-{self.random.choice(self.material.nouns)}"


def noise(sentences: int) -> list[str]:
    """Returns lines of RULER's noise; the last line may be incomplete."""
    lines = [" ".join(NOISE)] * (sentences // len(NOISE))
    rest = sentences % len(NOISE)
    return [*lines, " ".join(NOISE[:rest])] if rest else lines


def _among(lines: list[str], needles: list[str], places: list[float]) -> list[str]:
    """Returns the lines with each needle at its place, from 0 (before all lines) to 1."""
    lines = list(lines)
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        lines.insert(int(place * (len(lines) + 1)), needle)
    return lines


def _in_text(text: str, needles: list[str], depths: list[int]) -> str:
    """Returns the text with each needle after the sentence at its depth."""
    sentences = _SENTENCE.split(text)
    pieces, last = [], 0
    for depth, needle in zip(depths, needles, strict=True):
        stop = len(sentences) * depth // 100
        pieces += [*sentences[last:stop], needle]
        last = stop
    return " ".join([*pieces, *sentences[last:]])
