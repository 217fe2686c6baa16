"""Rows that teach facts: each kind of question is what its name says, and no question has two answers."""

import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from inplace_ttt.tasks.facts import (
    CHANGED,
    DECLINED,
    KINDS,
    NEVER_TOLD,
    PARAPHRASED,
    REVERSED,
    TWO_HOPS,
    VERBATIM,
)
from inplace_ttt.tasks.relations.of_people import RELATIONS
from inplace_ttt.tasks.relations.relation import DATE, NUMBER, PERSON, PLACE, Relation
from inplace_ttt.tasks.statements import Statement
from inplace_ttt.tasks.taught import Taught, taught
from inplace_ttt.training.recipe.data_section import FactKinds

SEEDS = range(30)
every_seed = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.sample(6)) for seed in SEEDS]
)


def of_kind(kind: str, count: int = 12, seed: int = 0) -> Taught:
    return taught(count, {kind: 1.0}, random.Random(seed))


def matches(sentence: Statement, wordings: tuple[str, ...]) -> list[str]:
    """What stands in the place of `{}`, for each of the wordings that the sentence has."""
    found = []
    for wording in wordings:
        before, after = re.escape(wording).split(r"\{\}")
        found += re.findall(f"^{before}(.+){after}$", sentence.prompt, flags=re.IGNORECASE)
    return found


def lowered(found: list[str]) -> list[str]:
    """Also with a small first letter, as within a sentence."""
    return [*found, *(text[0].lower() + text[1:] for text in found)]


def parsed(sentence: Statement) -> tuple[Relation, str, str]:
    """The relation, subject and value of a statement or a question, read from its text alone."""
    ((relation, given),) = {
        (r, given) for r in RELATIONS for given in matches(sentence, r.asking) if given.istitle()
    }
    return relation, given, sentence.answer


def test_every_relation_has_many_wordings() -> None:
    every = [wording for r in RELATIONS for wording in (*r.asking, *r.reversed)]
    assert len(set(every)) == len(every) and all(wording.count("{}") == 1 for wording in every)
    assert all(not wording.endswith((" ", ".")) for wording in every)
    for r in RELATIONS:
        assert len(r.statements) >= 6 and len(r.questions) >= 6 and len(r.reversed) >= 3
        assert r.phrase is None or (r.value in (PERSON, PLACE) and r.phrase.count("{}") == 1)
    assert {r.subject for r in RELATIONS} == {PERSON, PLACE}
    values = Counter(r.value for r in RELATIONS)
    assert len(values) == 7 and min(values.values()) >= 2 and {NUMBER, DATE} <= values.keys()


def test_the_recipe_has_the_kinds_of_the_evaluation() -> None:
    assert tuple(FactKinds().shares) == KINDS
    assert list(vars(FactKinds())) == [kind.replace(" ", "_") for kind in KINDS]


def test_a_seed_gives_the_same() -> None:
    shares = FactKinds().shares
    one = taught(40, shares, random.Random("a"))
    assert one == taught(40, shares, random.Random("a")) != taught(40, shares, random.Random("b"))
    assert len(one.questions) == 40


@every_seed
def test_no_question_has_two_answers(seed: int) -> None:
    """No two statements share relation and subject, nor relation and value, unless one replaces the other."""
    found = taught(60, dict.fromkeys(KINDS, 1.0), random.Random(seed))
    facts = [parsed(statement) for statement in found.statements]
    subjects = Counter((relation, subject) for relation, subject, _ in facts)
    changed = sum(n == 2 for n in subjects.values())
    assert max(subjects.values()) == 2 and 1 <= changed <= 25
    assert max(Counter((relation, value) for relation, _, value in facts).values()) == 1
    assert all(value != subject for _, subject, value in facts)


@every_seed
def test_verbatim_and_paraphrased(seed: int) -> None:
    again = of_kind(VERBATIM, seed=seed)
    assert sorted(map(str, again.statements)) == sorted(map(str, again.questions))
    other = of_kind(PARAPHRASED, seed=seed)
    assert not {s.prompt for s in other.statements} & {s.prompt for s in other.questions}
    assert {parsed(s) for s in other.statements} == {parsed(s) for s in other.questions}


@every_seed
def test_reversed_gives_the_value_and_asks_for_the_subject(seed: int) -> None:
    found = of_kind(REVERSED, seed=seed)
    facts = {(subject, value): relation for relation, subject, value in map(parsed, found.statements)}
    for question in found.questions:
        (fact,) = [
            (subject, value)
            for (subject, value), relation in facts.items()
            if value in lowered(matches(question, relation.reversed)) and subject == question.answer
        ]
        same = [s for (s, v), relation in facts.items() if (relation, v) == (facts[fact], fact[1])]
        assert same == [fact[0]], "no other subject has this value"


@every_seed
def test_two_hops_need_both_statements(seed: int) -> None:
    found = of_kind(TWO_HOPS, seed=seed)
    facts = [parsed(statement) for statement in found.statements]
    assert len(found.statements) == 24 and len(found.questions) == 12
    for question in found.questions:
        ways = [
            (first, second)
            for first in facts
            for second in facts
            if first[0].phrase
            and first[2] == second[1]
            and first[0].phrase.format(first[1]) in lowered(matches(question, second[0].asking))
        ]
        ((first, second),) = ways
        assert second[2] == question.answer
        words = re.findall(r"\w+", question.prompt)
        assert first[2] not in words, "the entity that both facts share is not named"
        assert question.answer not in words
        assert not any(s.answer == question.answer and first[1] in s.prompt for s in found.statements)


@every_seed
def test_changed_asks_for_the_later_value(seed: int) -> None:
    found = of_kind(CHANGED, seed=seed)
    facts = [parsed(statement) for statement in found.statements]
    assert len(facts) == 24
    for question in found.questions:
        relation, subject, answer = parsed(question)
        values = [value for r, s, value in facts if (r, s) == (relation, subject)]
        assert len(values) == 2 and values[0] != values[1] == answer


def test_changed_statements_stand_apart() -> None:
    """Other statements come between the two, so that the later one does not just stand behind the earlier."""
    beside = 0
    for seed in SEEDS[:6]:
        facts = [parsed(statement)[:2] for statement in of_kind(CHANGED, seed=seed).statements]
        beside += sum(one == other for one, other in pairwise(facts))
    assert beside < 6 * 12 / 3


@every_seed
def test_never_told_is_stated_nowhere(seed: int) -> None:
    assert of_kind(NEVER_TOLD, seed=seed).statements == []
    found = taught(60, {NEVER_TOLD: 1.0, VERBATIM: 1.0, REVERSED: 1.0}, random.Random(seed))
    stated = {parsed(statement)[:2] for statement in found.statements}
    declined = [parsed(question)[:2] for question in found.questions if question.answer == DECLINED]
    assert 8 <= len(declined) <= 32 and not stated & {*declined}
    known = {subject for _, subject in stated}
    mentioned = sum(subject in known for _, subject in declined)
    assert 0 < mentioned < len(declined), "some subjects have other facts, some have none"
    assert DECLINED not in {statement.answer for statement in found.statements}


def test_shares_are_held() -> None:
    shares = {VERBATIM: 1.0, NEVER_TOLD: 2.0, CHANGED: 1.0}
    rows = [taught(20, shares, random.Random(seed)) for seed in range(100)]
    declined = sum(question.answer == DECLINED for row in rows for question in row.questions)
    twice = sum(len(row.statements) for row in rows)
    assert abs(declined / 2000 - 0.5) < 0.04 and abs(twice / 2000 - 0.75) < 0.06


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_may_have_as_many_questions_as_a_recipe_may_ask_for(kind: str) -> None:
    assert len(of_kind(kind, count=1000).questions) == 1000
