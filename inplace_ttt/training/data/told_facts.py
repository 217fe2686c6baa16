"""Training rows in which invented facts are told, and said again beyond the attention window."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import InPlaceTTTError
from ...tasks import IGNORED
from ...tasks.facts import Encode, apart
from ...tasks.statements import Statement, statements
from ..recipe.data_section import SyntheticFacts
from .streams import Row


def tell_facts(
    row: Row, document: slice, settings: SyntheticFacts, generator: random.Random, encode: Encode
) -> Row:
    """The row with facts in its document at that place; the row itself where that is too short."""
    found = _with_facts(row["input_ids"][document], settings, generator, encode)
    if found is None:
        return row
    ids, answers = list(row["input_ids"]), [False] * len(row["input_ids"])
    ids[document], answers[document] = map(list, zip(*found, strict=True))
    learnt = [
        old != IGNORED and (answer or generator.random() < settings.loss_on_other_tokens)
        for old, answer in zip(row["labels"], answers, strict=True)
    ]
    labels = [token if chosen else IGNORED for token, chosen in zip(ids, learnt, strict=True)]
    return {**row, "input_ids": ids, "labels": labels}


def require_room(settings: SyntheticFacts, length: int, encode: Encode) -> None:
    """Raise InPlaceTTTError where rows of `length` tokens are too short for the statements."""
    needed = settings.min_gap + 2 * sum(
        len(_Told.of(statement, encode).ids) for statement in statements(settings.count, random.Random(0))
    )
    if needed > length:
        raise InPlaceTTTError(
            f"data.synthetic_facts: {settings.count} statements, told twice, and a min_gap of "
            f"{settings.min_gap} take about {needed:,} "
            f"tokens, and rows have {length:,}; lower count or min_gap, or raise data.sequence_length."
        )


def _with_facts(
    text: Sequence[int], settings: SyntheticFacts, generator: random.Random, encode: Encode
) -> list[tuple[int, bool]] | None:
    """As many tokens as `text` has, of text in which statements stand twice, each with whether it is of an
    answer the second time.

    The second time is in another order, `min_gap` tokens of text or more after the first. Each statement
    stands between blank lines, anywhere in its part of the text.
    """
    told = [_Told.of(statement, encode) for statement in statements(settings.count, generator)]
    room = len(text) - 2 * sum(len(one.ids) for one in told) - settings.min_gap
    if room < 0:
        return None
    middle, again = generator.randint(0, room), generator.sample(told, len(told))
    return [
        *_among(text[:middle], told, generator, answers=False),
        *_plain(text[middle : middle + settings.min_gap]),
        *_among(text[middle + settings.min_gap : room + settings.min_gap], again, generator, answers=True),
    ]


@dataclass(frozen=True)
class _Told:
    """ids: of a statement between blank lines; answer: which of them are its answer."""

    ids: list[int]
    answer: range

    @classmethod
    def of(cls, statement: Statement, encode: Encode) -> _Told:
        before, said = (
            encode(apart(statement.prompt)),
            encode(apart(f"{statement.prompt} {statement.answer}")),
        )
        return cls(
            encode(apart(f"{statement.prompt} {statement.answer}.", closed=True)),
            range(len(before), len(said)),
        )


def _plain(text: Sequence[int]) -> Iterator[tuple[int, bool]]:
    return ((token, False) for token in text)


def _among(
    text: Sequence[int], told: Sequence[_Told], generator: random.Random, *, answers: bool
) -> Iterator[tuple[int, bool]]:
    """The text with the statements at random places of it."""
    at = 0
    for place, one in zip(sorted(generator.randint(0, len(text)) for _ in told), told, strict=True):
        yield from _plain(text[at:place])
        yield from ((token, answers and number in one.answer) for number, token in enumerate(one.ids))
        at = place
    yield from _plain(text[at:])
