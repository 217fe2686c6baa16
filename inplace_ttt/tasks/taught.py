"""Facts for training rows, stated in one wording, and several kinds of later questions in other wordings.

The kinds are those of `tasks.facts`. Relations and wordings differ from all that an evaluation asks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .facts import CHANGED, DECLINED, NEVER_TOLD, REVERSED, TWO_HOPS, VERBATIM, names
from .relations.of_people import RELATIONS
from .relations.relation import Relation, drawn
from .statements import Statement, statements


@dataclass(frozen=True)
class Taught:
    """Sentences of a training row.

    Attributes:
        statements: sentences that state facts, in their order in the row.
        questions: sentences that ask for them later, in any order.
    """

    statements: list[Statement]
    questions: list[Statement]


def repeated(count: int, generator: random.Random) -> Taught:
    """Returns `count` facts in one wording per relation, asked for by repeating the statement."""
    found = statements(count, generator)
    return Taught(found, found)


def taught(count: int, shares: Mapping[str, float], generator: random.Random) -> Taught:
    """Returns `count` questions of random kinds, with the statements that answer them.

    A two-hop question and one about a changed fact have two statements. A question about an unstated
    fact has none, and its answer is `DECLINED`.

    Args:
        count: number of questions.
        shares: weight of each kind of `tasks.facts`.
        generator: draws kinds, facts and wordings.

    Raises:
        InPlaceTTTError: if the invented names are used up.
    """
    row, told, questions = _Facts(generator), list[tuple[float, Statement]](), []
    for kind in generator.choices(list(shares), list(shares.values()), k=count):
        its, question = row.asked(kind)
        places = sorted(generator.random() for _ in its)  # in order, so that the later of two values holds
        told += zip(places, its, strict=True)
        questions.append(question)
    return Taught([statement for _, statement in sorted(told, key=lambda one: one[0])], questions)


@dataclass(frozen=True)
class _Fact:
    relation: Relation
    subject: str
    value: str


@dataclass
class _Facts:
    """Facts of a row. No two share relation and subject, or relation and value, so each has one answer."""

    generator: random.Random
    invented: Iterator[str] = field(init=False)
    taken: set[tuple[Relation, str, str | None]] = field(default_factory=set)
    subjects: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.invented = names(self.generator)

    def asked(self, kind: str) -> tuple[list[Statement], Statement]:
        """Returns the statements of a new fact, and a question of this kind."""
        choice = self.generator.choice
        if kind == NEVER_TOLD:
            relation, subject = self._unstated()
            return [], _sentence(choice(relation.asking), subject, DECLINED)
        if kind == TWO_HOPS:
            first, second = facts = self._chain()
            assert first.relation.phrase is not None
            question = _sentence(
                choice(second.relation.asking), first.relation.phrase.format(first.subject), second.value
            )
            return self.generator.sample([self._stated(fact) for fact in facts], 2), question
        fact, *later = self._new(values=2 if kind == CHANGED else 1)
        relation, stated = fact.relation, self._stated(fact)
        if kind == VERBATIM:
            return [stated], stated
        if kind == REVERSED:
            return [stated], _sentence(choice(relation.reversed), fact.value, fact.subject)
        if later:
            question = _sentence(choice(relation.asking), fact.subject, later[0].value)
            return [stated, self._stated(later[0])], question
        others = (_sentence(wording, fact.subject, fact.value) for wording in relation.asking)
        return [stated], choice([other for other in others if other != stated])

    def _stated(self, fact: _Fact) -> Statement:
        return _sentence(self.generator.choice(fact.relation.statements), fact.subject, fact.value)

    def _new(self, values: int) -> list[_Fact]:
        """Returns new facts of one relation and one subject, each with another value."""
        while True:
            relation = self.generator.choice(RELATIONS)
            subject, *its = (
                drawn(kind, self.generator) for kind in (relation.subject, *[relation.value] * values)
            )
            if _differ(subject, *its) and all(self._free(relation, subject, value) for value in its):
                subject = subject or next(self.invented)
                return [self._add(relation, subject, value) for value in its]

    def _chain(self) -> tuple[_Fact, _Fact]:
        """Returns two facts, where the value of the first is the subject of the second."""
        while True:
            first = self.generator.choice([relation for relation in RELATIONS if relation.phrase])
            second = self.generator.choice(
                [relation for relation in RELATIONS if relation.subject == first.value]
            )
            subject, middle, value = (
                drawn(kind, self.generator) for kind in (first.subject, first.value, second.value)
            )
            if (
                _differ(subject, middle, value)
                and self._free(first, subject, middle)
                and self._free(second, middle, value)
            ):
                one = self._add(first, subject, middle)
                return one, self._add(second, one.value, value)

    def _unstated(self) -> tuple[Relation, str]:
        """Returns a relation and a subject without a fact.

        Every second subject has facts of other relations.
        """
        while True:
            relation = self.generator.choice(RELATIONS)
            known = [name for kind, name in self.subjects if kind == relation.subject]
            subject = (
                self.generator.choice(known)
                if known and self.generator.random() < 0.5
                else drawn(relation.subject, self.generator)
            )
            if self._free(relation, subject, None):
                subject = subject or next(self.invented)
                self.taken.add((relation, "subject", subject))
                return relation, subject

    def _free(self, relation: Relation, subject: str | None, value: str | None) -> bool:
        return not {(relation, "subject", subject), (relation, "value", value)} & self.taken

    def _add(self, relation: Relation, subject: str | None, value: str | None) -> _Fact:
        """Returns a fact, with new names for the entities that are None. Later facts must differ from it."""
        fact = _Fact(relation, subject or next(self.invented), value or next(self.invented))
        self.taken |= {(relation, "subject", fact.subject), (relation, "value", fact.value)}
        self.subjects.append((relation.subject, fact.subject))
        return fact


def _differ(*entities: str | None) -> bool:
    """Returns True if no entity occurs twice; None stands for a new one."""
    known = [entity for entity in entities if entity is not None]
    return len(set(known)) == len(known)


def _sentence(wording: str, given: str, answer: str) -> Statement:
    prompt = wording.format(given)
    return Statement(prompt[0].upper() + prompt[1:], answer)
