"""One relation between two entities, its wordings, and the kinds of entities."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..facts import PEOPLE

PERSON, PLACE, NUMBER, DATE, COLOR, GOODS, OBJECT = (
    "person",
    "place",
    "number",
    "date",
    "color",
    "goods",
    "object",
)


def wordings(text: str, between: str = " | ") -> tuple[str, ...]:
    """Returns the wordings of a text, which ` | ` separates."""
    return tuple(text.split(between))


_MONTHS = wordings(
    "January February March April May June July August September October November December", " "
)
_COLORS = wordings(
    "red green blue white black yellow gray brown purple orange pink golden silver scarlet", " "
)
_GOODS = wordings(
    "wool salt honey wine cheese iron timber corn silk leather glass butter paper cloth fish pepper tea "
    "coal rope candles",
    " ",
)
_OBJECTS = wordings(
    "lion wheel ship crown sword bell tower rose hammer star boat horse tree lantern ladder mirror drum "
    "clock falcon spear",
    " ",
)


@dataclass(frozen=True, eq=False)
class Relation:
    """A relation between a subject and a value.

    `{}` in a wording is the place of the entity that is given. The other entity follows the wording.

    Attributes:
        subject: kind of the subject, `PERSON` or `PLACE`.
        value: kind of the value.
        statements: beginnings of sentences that give the subject and end in the value.
        questions: questions and other beginnings that give the subject and end in the value.
        reversed: beginnings of sentences that give the value and end in the subject.
        phrase: noun phrase for the value that gives the subject, so that another fact can be asked about it.
            None if the value has no facts of its own.
    """

    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    reversed: tuple[str, ...]
    phrase: str | None = None

    @property
    def asking(self) -> tuple[str, ...]:
        """All wordings that give the subject and end in the value."""
        return (*self.statements, *self.questions)


def drawn(kind: str, generator: random.Random) -> str | None:
    """Draws an entity of a kind; None for a place, whose name must be a new one."""
    if kind == PLACE:
        return None
    if kind == NUMBER:
        return str(generator.randrange(100, 1000))
    if kind == DATE:
        return f"{generator.randrange(1, 29)} {generator.choice(_MONTHS)} {generator.randrange(1500, 1900)}"
    return generator.choice({PERSON: PEOPLE, COLOR: _COLORS, GOODS: _GOODS, OBJECT: _OBJECTS}[kind])
