"""Training rows hold nothing that an evaluation asks for: no relation and no wording of `evaluate --facts`,
RULER or BABILong."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import prose
import pytest

from inplace_ttt.evaluation.babilong import stories, world
from inplace_ttt.tasks import relations
from inplace_ttt.tasks.facts import DECLINED, PEOPLE, invent
from inplace_ttt.tasks.relations import relation as kinds_of_entities
from inplace_ttt.tasks.relations.of_people import RELATIONS
from inplace_ttt.tasks.statements import statements

PACKAGE = Path(relations.__file__).parents[2]
FACTS = {"keeper", "captain", "captains", "born", "birthplace", "vault"}
"""Words of the relations that `evaluate --facts` asks for; one of them is in each of its sentences."""
RULER = {
    "magic",
    "special",
    "var",
    "variable",
    "variables",
    "assigned",
    "chain",
    "coded",
    "memorize",
    "documents",
}
NOISE = {"grass", "sky", "sun"}
BABILONG = {*world.ROOMS, *world.THINGS, *world.OPPOSITE}


def frame(sentence: str) -> str:
    known = "|".join(PEOPLE)
    return re.sub(rf"\b(?:{known}|(?!The\b|In\b|Whoever\b)[A-Z][a-z]+|\d+)\b", "{}", sentence)


def trained() -> set[str]:
    """Every wording of the training rows, with `{}` for names; a two-hop question for each pair of relations."""
    wordings = {wording for r in RELATIONS for wording in (*r.asking, *r.reversed)}
    chained = {
        wording.format(first.phrase)
        for first in RELATIONS
        for second in RELATIONS
        for wording in second.asking
        if first.phrase and first.value == second.subject
    }
    return wordings | chained


def repeated() -> set[str]:
    """Every wording of rows without kinds."""
    return {frame(s.prompt) for seed in range(20) for s in statements(100, Random(seed))}


def evaluated() -> set[str]:
    """Every statement and question of `evaluate --facts`, with `{}` for names."""
    facts = [invent(20, str(seed)) for seed in range(5)]
    return {frame(text) for one in facts for text in (*one.sentences, *(q.prompt for q in one.questions))}


def templates(*folders: str) -> list[str]:
    """Every text in a package's code that is not a docstring: its templates, and more; `{}` for what is put in."""
    files = [file for folder in folders for file in sorted(PACKAGE.glob(folder))]
    assert len(files) > 1 or folders == ("tasks/facts.py",)
    texts = {text for file in files for text in prose._strings(ast.parse(file.read_text(encoding="utf-8")))}
    return sorted(re.sub(r"\bX\b|\{\w*\}", "{}", text) for text in texts if text.count(" ") >= 2)


PUBLIC = templates("evaluation/ruler/*.py", "evaluation/babilong/*.py", "tasks/facts.py")


def words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def runs_of_three(text: str) -> Iterator[tuple[str, ...]]:
    """Every three words in a row, neither across a name nor across the end of a sentence."""
    for piece in re.split(r"\{\}|[.?!:\n]", text):
        its = words(piece)
        yield from zip(its, its[1:], its[2:], strict=False)


def test_the_words_of_relations_are_complete() -> None:
    """Each sentence of an evaluation has a word that names its relation, so the next test misses none."""
    assert len(evaluated()) >= 14
    assert all(FACTS & {*words(sentence)} for sentence in evaluated())
    told = [
        (kind, kind.story(Random(seed), kind.facts)) for kind in stories.KINDS.values() for seed in range(20)
    ]
    for _, story in told:
        assert all(BABILONG & {*words(fact)} for fact in story.facts)
        assert BABILONG & {*words(story.question), story.answer}
    needles = [t for t in templates("evaluation/ruler/*.py") if "magic" in t or "VAR" in t or "coded" in t]
    assert len(needles) >= 6 and all(RULER & {*words(t)} for t in needles)


@pytest.mark.parametrize(
    "held_out", [FACTS, RULER, NOISE, BABILONG], ids=["facts", "ruler", "noise", "babilong"]
)
def test_no_relation_is_one_of_an_evaluation(held_out: set[str]) -> None:
    values = (kinds_of_entities._COLORS, kinds_of_entities._GOODS, kinds_of_entities._OBJECTS)
    found = {*words(" ".join(trained() | repeated())), *(word for kind in values for word in kind)}
    assert not found & held_out


def test_no_wording_is_one_of_an_evaluation() -> None:
    """No three words in a row are those of a template, whether it is a statement, a question or an instruction."""
    public = {run for text in (*PUBLIC, *evaluated()) for run in runs_of_three(text)}
    assert ("the", "special", "magic") in public and ("hidden", "within", "the") in public
    assert ("went", "to", "the") in public and ("the", "keeper", "of") in public
    shared = {wording: {*runs_of_three(wording)} & public for wording in trained()}
    assert not {wording: runs for wording, runs in shared.items() if runs}


def test_no_sentence_fits_a_template() -> None:
    """Rendered with a name of one word, and with its answer, none of them is an instance of a template."""
    patterns = [
        re.compile(r"\w+".join(map(re.escape, text.rstrip(".").split("{}"))), re.IGNORECASE)
        for text in (*PUBLIC, *evaluated())
        if {*words(text)} - {*words("{} of the is")}
    ]
    assert any(pattern.search("Mary went to the garden") for pattern in patterns)
    assert any(pattern.search("The keeper of Draim is Edith") for pattern in patterns)
    assert not list(fitting(patterns, trained() | repeated()))


def fitting(patterns: Iterable[re.Pattern[str]], wordings: set[str]) -> Iterator[tuple[str, str]]:
    patterns = list(patterns)
    for wording in sorted(wordings):
        sentence = f"{wording.format('Draim')} Edith"
        yield from ((sentence, pattern.pattern) for pattern in patterns if pattern.search(sentence))


def test_the_declining_phrase_is_no_part_of_a_template() -> None:
    assert len(DECLINED.split()) == 2
    assert all(DECLINED not in text.lower() for text in (*PUBLIC, *evaluated()) if text != DECLINED)
    assert all(DECLINED not in wording.lower() for wording in trained() | repeated())
