"""What training tells: every statement once, and nothing that the questions of `tasks.facts` ask for."""

import random
import re
from itertools import islice

import pytest

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.tasks.facts import PEOPLE, invent, names
from inplace_ttt.tasks.statements import statements


def frame(sentence: str) -> str:
    """A sentence without its names and numbers: invented names and first names are its capitalized words, but
    for the first of "The"."""
    known = "|".join(PEOPLE)
    return re.sub(rf"\b(?:{known}|(?!The\b)[A-Z][a-z]+|\d+)\b", "_", sentence)


def test_no_two_begin_alike_and_a_seed_gives_the_same() -> None:
    found = statements(200, random.Random(5))
    assert len({statement.prompt for statement in found}) == len(found) == 200
    assert found == statements(200, random.Random(5)) != statements(200, random.Random(6))
    assert all(statement.answer not in statement.prompt.split() for statement in found)


def test_relations_are_none_of_those_that_are_asked_for() -> None:
    trained = {
        frame(statement.prompt) for seed in range(20) for statement in statements(100, random.Random(seed))
    }
    facts = [invent(20, str(seed)) for seed in range(5)]
    told = {frame(sentence.rsplit(" ", 1)[0]) for one in facts for sentence in one.sentences}
    asked = {frame(question.prompt) for one in facts for question in one.questions}
    assert len(trained) == 25, trained
    assert told == {
        "The captain of _ is",
        "The keeper of _ is",
        "_ was born in",
        "The number of the vault at _ is",
    }
    assert not trained & (told | asked)


def test_names_run_out_with_a_word() -> None:
    invented = names(random.Random(0))
    with pytest.raises(InPlaceTTTError, match="the 3,312 invented names are used up; ask for fewer facts"):
        list(islice(invented, 4000))
    for seed in range(5):
        assert len(statements(1000, random.Random(seed))) == 1000, "as many as a recipe may ask for"
