"""Variable tracking: a chain of assignments in noise. The question asks for all variables of a value."""

from __future__ import annotations

import string
from itertools import pairwise
from random import Random

from ..prompt import Count, Draft, Puzzle
from .material import Material
from .niah import noise

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {value}, "
    "they are: "
)
_HOPS = 4
_EXAMPLE_TOKENS = 500
_LEAST = 5 * (_HOPS + 1)


def puzzle(random: Random, material: Material, length: int, index: int, count: Count) -> Puzzle:
    """Makes a puzzle with one chain of 4 hops, after a solved example of 500 tokens with shorter names.

    The size is in sentences of noise.
    """
    taken: set[str] = set()
    shown, names = _names(random, 3, taken), _names(random, 5, taken)
    shown_value, value = random.sample(range(10000, 100000), 2)
    example = _example(shown, shown_value, Random(random.random()), count)
    solved = f"{example.prompt}{example.answer_prefix} {' '.join(shown)}\n\n"
    places = Random(random.random())
    state = places.getstate()

    def draft(size: int) -> Draft:
        places.setstate(state)
        question = _question(noise(size), names, value, places)
        return Draft(f"{solved}{question.prompt}", question.answer_prefix, question.answers)

    return Puzzle(_LEAST, 10 * length, draft)


def _example(names: tuple[str, ...], value: int, places: Random, count: Count) -> Draft:
    """Returns the longest question of complete lines within `_EXAMPLE_TOKENS`."""
    state, example = places.getstate(), None
    for size in range(_LEAST, 10 * _EXAMPLE_TOKENS, 5):
        places.setstate(state)
        longer = _question(noise(size), names, value, places)
        if example is not None and count(longer.prompt + longer.answer_prefix) > _EXAMPLE_TOKENS:
            break
        example = longer
    assert example is not None
    return example


def _names(random: Random, letters: int, taken: set[str]) -> tuple[str, ...]:
    """Returns the variables of a chain, none of which is in `taken`."""
    names: list[str] = []
    while len(names) <= _HOPS:
        name = "".join(random.choices(string.ascii_uppercase, k=letters))
        if name not in taken:
            taken.add(name)
            names.append(name)
    return tuple(names)


def _question(lines: list[str], names: tuple[str, ...], value: int, random: Random) -> Draft:
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {later} = VAR {earlier} " for earlier, later in pairwise(names)]
    lines = list(lines)
    places = sorted(random.sample(range(len(lines)), len(chain)))
    for done, (place, assignment) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + done, assignment)
    context = "\n".join(lines)
    return Draft(
        _TEMPLATE.format(context=context, value=value), _PREFIX.format(count=len(names), value=value), names
    )
