"""Inserts invented facts into training rows, and questions about them beyond the attention window."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import InPlaceTTTError
from ...tasks import IGNORED
from ...tasks.facts import Encode, apart
from ...tasks.statements import Statement
from ...tasks.taught import Taught, repeated, taught
from ..recipe.data_section import SyntheticFacts
from .streams import Row


def tell_facts(
    row: Row, document: slice, settings: SyntheticFacts, generator: random.Random, encode: Encode
) -> Row:
    """Returns the row with facts in one document; the row itself if the document is too short.

    Answers of the questions keep their labels. Of all other tokens, the fraction `loss_on_other_tokens`
    keeps its labels.

    Args:
        row: `input_ids`, `position_ids` and `labels` as lists of integers.
        document: position of the document in the row.
        settings: the recipe's `data.synthetic_facts`.
        generator: draws facts, places and labels.
        encode: returns the token ids of a text inside another.
    """
    found = _with_facts(row["input_ids"][document], settings, generator, encode)
    if found is None:
        return row
    ids, answers = list(row["input_ids"]), [False] * len(row["input_ids"])
    ids[document], answers[document] = map(list, zip(*found, strict=True))
    learned = [
        old != IGNORED and (answer or generator.random() < settings.loss_on_other_tokens)
        for old, answer in zip(row["labels"], answers, strict=True)
    ]
    labels = [token if chosen else IGNORED for token, chosen in zip(ids, learned, strict=True)]
    return {**row, "input_ids": ids, "labels": labels}


def require_room(settings: SyntheticFacts, length: int, encode: Encode) -> None:
    """Raises InPlaceTTTError if rows of `length` tokens are too short for the statements and questions."""
    facts = _invented(settings, random.Random(0))
    needed = settings.min_gap + sum(
        len(_Sentence.of(one, encode).ids) for one in (*facts.statements, *facts.questions)
    )
    if needed > length:
        raise InPlaceTTTError(
            f"data.synthetic_facts: {len(facts.statements)} statements, {len(facts.questions)} questions, "
            f"and a min_gap of {settings.min_gap} take about {needed:,} tokens, but rows have {length:,}; "
            "lower count or min_gap, or raise data.sequence_length."
        )


def _invented(settings: SyntheticFacts, generator: random.Random) -> Taught:
    if settings.kinds is None:
        return repeated(settings.count, generator)
    return taught(settings.count, settings.kinds.shares, generator)


def _with_facts(
    text: Sequence[int], settings: SyntheticFacts, generator: random.Random, encode: Encode
) -> list[tuple[int, bool]] | None:
    """Returns `text` with statements and questions inserted and its end cut off; None if it is too short.

    Each token comes with True if it belongs to an answer of a question. The questions are in random order,
    at least `min_gap` tokens of text after the statements. Each sentence has blank lines around it, and a
    random place in its part of the text.
    """
    facts = _invented(settings, generator)
    statements, questions = (
        [_Sentence.of(one, encode) for one in part] for part in (facts.statements, facts.questions)
    )
    room = len(text) - sum(len(one.ids) for one in (*statements, *questions)) - settings.min_gap
    if room < 0:
        return None
    middle, questions = generator.randint(0, room), generator.sample(questions, len(questions))
    return [
        *_among(text[:middle], statements, generator, answers=False),
        *_plain(text[middle : middle + settings.min_gap]),
        *_among(
            text[middle + settings.min_gap : room + settings.min_gap], questions, generator, answers=True
        ),
    ]


@dataclass(frozen=True)
class _Sentence:
    """Token ids of a sentence between blank lines, and the positions of its answer in them."""

    ids: list[int]
    answer: range

    @classmethod
    def of(cls, statement: Statement, encode: Encode) -> _Sentence:
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
    text: Sequence[int], sentences: Sequence[_Sentence], generator: random.Random, *, answers: bool
) -> Iterator[tuple[int, bool]]:
    """Yields the text with the sentences at random places."""
    at = 0
    for place, one in zip(sorted(generator.randint(0, len(text)) for _ in sentences), sentences, strict=True):
        yield from _plain(text[at:place])
        yield from ((token, answers and number in one.answer) for number, token in enumerate(one.ids))
        at = place
    yield from _plain(text[at:])
