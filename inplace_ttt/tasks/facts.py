"""Invented facts, which occur in no other text, and questions about them.

A record is about a place with a name of random syllables. Five sentences state it: its keeper, the keeper's
place of birth, the number of its vault, and its captain twice. The later captain is the right one. Keepers
and captains have common first names; all are different within a document.

A question repeats a sentence's words, paraphrases it, reverses it (from the answer to its subject), combines
two sentences, or asks for the changed captain. One further question per record asks about a place that the
document does not mention.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import InPlaceTTTError

VERBATIM, PARAPHRASED, REVERSED, TWO_HOPS, CHANGED, NEVER_TOLD = KINDS = (
    "verbatim",
    "paraphrased",
    "reversed",
    "two hops",
    "changed",
    "never told",
)
DECLINED = "not stated"
"""The answer that training teaches for questions about unstated facts."""
_FIRST_NAMES = (
    "Adam Agnes Albert Alice Amos Anna Arthur Barbara Benjamin Bernard Caroline Catherine Charles Clara "
    "Conrad Daniel David "
    "Dorothy Edith Edmund Edward Eleanor Ellen Emily Ernest Esther Felix Florence Francis George Gilbert "
    "Grace Hannah Harold "
    "Helen Henry Hugh Ida Isaac Jacob Jane Joseph Julia Laura Leonard Lewis Louis Lucy Margaret Martha "
    "Martin Matthew Miriam "
    "Nathan Oliver Oscar Paul Peter Philip Rachel Ralph Rebecca Richard Robert Rose Samuel Sarah Simon "
    "Stephen Susan Theodore "
    "Thomas Victor Walter William"
)
PEOPLE = tuple(_FIRST_NAMES.split())
"""First names.

Each is one token in most vocabularies, so that an answer does not depend on spelling.
"""
MOST = len(PEOPLE) // 3
"""Largest number of records of a document. Each record uses three people."""
_BEGIN = (
    "B",
    "Br",
    "D",
    "Dr",
    "F",
    "G",
    "Gr",
    "H",
    "K",
    "Kr",
    "L",
    "M",
    "N",
    "P",
    "Pr",
    "R",
    "S",
    "St",
    "T",
    "Tr",
    "V",
    "W",
    "Z",
)
_VOWEL = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_END = ("b", "ck", "d", "l", "lm", "ld", "m", "n", "nd", "r", "rk", "rt", "s", "sk", "st", "t", "v", "x")
_SYLLABLES = frozenset(map("".join, itertools.product(_BEGIN, _VOWEL, _END)))

Encode = Callable[[str], list[int]]
"""Returns the token ids of a text inside another, without special tokens."""


def apart(sentence: str, *, closed: bool = False) -> str:
    """Returns a sentence with a blank line before it and, if `closed`, after it."""
    return f"\n\n{sentence}\n\n" if closed else f"\n\n{sentence}"


@dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        kind: one of `KINDS`.
        prompt: text up to the space before the answer.
        answer: the right answer; None if the document states none.
        options: all stated values that an answer could be, the right one included.
        earlier: an outdated answer, or None.
    """

    kind: str
    prompt: str
    answer: str | None
    options: tuple[str, ...]
    earlier: str | None = None

    @property
    def compared(self) -> tuple[str, ...]:
        """The options and, if the document states no answer, also `DECLINED`."""
        return self.options if self.answer is not None else (*self.options, DECLINED)


@dataclass(frozen=True)
class Facts:
    """Facts of a document.

    Attributes:
        sentences: the sentences, in the order in which they are stated.
        questions: the questions.
    """

    sentences: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Record:
    place: str
    keeper: str
    town: str
    number: str
    captains: tuple[str, str]


def invent(records: int, seed: str) -> Facts:
    """Invents facts about places, with questions. The same seed gives the same facts.

    Args:
        records: number of places, at most `MOST`.
        seed: seed of the facts.
    """
    generator = random.Random(f"facts {seed}")
    towns, numbers, people = (
        names(generator),
        generator.sample(range(100, 1000), records),
        generator.sample(PEOPLE, 3 * records),
    )
    told = [
        _Record(next(towns), keeper, next(towns), str(number), (one, other))
        for number, keeper, one, other in zip(numbers, people[::3], people[1::3], people[2::3], strict=True)
    ]
    early, late = (generator.sample(told, records) for _ in range(2))
    sentences = [f"The captain of {record.place} is {record.captains[0]}." for record in early]
    for record in late:
        sentences += [
            f"The keeper of {record.place} is {record.keeper}.",
            f"{record.keeper} was born in {record.town}.",
            f"The number of the vault at {record.place} is {record.number}.",
            f"The captain of {record.place} is {record.captains[1]}.",
        ]
    return Facts(tuple(sentences), tuple(_questions(told, [next(towns) for _ in told])))


def _questions(told: list[_Record], others: list[str]) -> Iterator[Question]:
    places, keepers, towns, numbers = (
        tuple(getattr(r, name) for r in told) for name in ("place", "keeper", "town", "number")
    )
    captains = tuple(captain for record in told for captain in record.captains)
    for r, other in zip(told, others, strict=True):
        yield Question(VERBATIM, f"The keeper of {r.place} is", r.keeper, keepers)
        yield Question(VERBATIM, f"{r.keeper} was born in", r.town, towns)
        yield Question(VERBATIM, f"The number of the vault at {r.place} is", r.number, numbers)
        yield Question(PARAPHRASED, f"In {r.place}, the office of keeper is held by", r.keeper, keepers)
        yield Question(PARAPHRASED, f"The birthplace of {r.keeper} is", r.town, towns)
        yield Question(
            PARAPHRASED, f"Whoever opens the vault at {r.place} must know the number", r.number, numbers
        )
        yield Question(REVERSED, f"{r.keeper} is the keeper of", r.place, places)
        yield Question(REVERSED, f"The town of {r.town} is the birthplace of", r.keeper, keepers)
        yield Question(REVERSED, f"{r.number} is the number of the vault at", r.place, places)
        yield Question(TWO_HOPS, f"The keeper of {r.place} was born in", r.town, towns)
        yield Question(
            CHANGED, f"The captain of {r.place} is", r.captains[1], captains, earlier=r.captains[0]
        )
        yield Question(NEVER_TOLD, f"The keeper of {other} is", None, keepers)


def names(generator: random.Random) -> Iterator[str]:
    """Yields words of two syllables with different first syllables.

    A word's beginning therefore identifies it.

    Raises:
        InPlaceTTTError: if the names are used up.
    """
    known: set[str] = set()
    while len(known) < len(_SYLLABLES):
        first = generator.choice(_BEGIN) + generator.choice(_VOWEL) + generator.choice(_END)
        if first not in known:
            known.add(first)
            yield first + generator.choice(_VOWEL) + generator.choice(_END)
    raise InPlaceTTTError(f"the {len(known):,} invented names are used up; ask for fewer facts.")
