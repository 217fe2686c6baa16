"""BABILong's samples: an independent reading of the prompts' text gives the answers; lengths, places, filler;
the scores."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTError
from inplace_ttt.evaluation.babilong.filler import Filler
from inplace_ttt.evaluation.babilong.stories import KINDS, Story
from inplace_ttt.evaluation.babilong.tasks import TASKS, _guesses
from inplace_ttt.evaluation.prompt import Prompter, Sample, samples

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / ".cache" / "smollm2-135m"
WHALES = ROOT / ".cache" / "text" / "moby-dick.txt"
PEOPLE = {"Daniel", "John", "Mary", "Sandra"}
ROOMS = {"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"}
THINGS = {"apple", "football", "milk"}
FACT = re.compile(
    r"(?P<who>[A-Z]\w+) (?:(?:went|walked|moved) to the (?P<room>\w+)|(?:took|picked up) the (?P<taken>\w+)"
    r"|(?:put down|dropped) the (?P<dropped>\w+)|(?:gave|handed) the (?P<given>\w+) to (?P<whom>\w+))\."
    r"|The (?P<one>\w+) is (?P<side>north|south|east|west) of the (?P<other>\w+)\."
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluate.md").read_text()


@pytest.fixture(scope="module")
def filler() -> Filler:
    return Filler([str(WHALES)])


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(AutoTokenizer.from_pretrained(SMOLLM2))


def made(
    name: str, length: int, filler: Filler, prompter: Prompter, count: int = 3, seed: int = 0
) -> list[Sample]:
    return list(samples(TASKS[name], length, count, seed, filler, prompter))


def passages(prompt: str) -> list[tuple[str, str, str | None]]:
    """(text, question, answer) of each example, and of what is asked at last."""
    parts = re.findall(r"Text: (.*)\nQuestion: (.*)(?:\nAnswer: (\w+)\n)?", prompt)
    assert len(parts) == 3
    return [(text, question, answer or None) for text, question, answer in parts]


def replayed(text: str, question: str) -> set[str]:
    """Every answer that the facts standing in a text allow: read sentence by sentence, knowing nothing of how
    they were made."""
    place: dict[str, str] = {}
    holder: dict[str, str] = {}
    been: dict[str, list[str]] = {}
    gifts, beside = [], set()
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    for fact in FACT.finditer(text):
        who = fact["who"]
        if fact["room"]:
            assert place.get(who) != fact["room"], "somebody goes where they are"
            place[who] = fact["room"]
            for thing in [thing for thing, person in holder.items() if person == who]:
                been[thing] = [*been[thing], fact["room"]]
        elif fact["taken"]:
            assert fact["taken"] not in holder, "what somebody holds is taken"
            been.setdefault(fact["taken"], [place.get(who, "")])  # of a part of the facts
            assert been[fact["taken"]][-1] == place.get(who, ""), "a thing is taken where it is not"
            holder[fact["taken"]] = who
        elif fact["dropped"]:
            assert holder.pop(fact["dropped"]) == who, "somebody puts down what another holds"
        elif fact["given"]:
            assert holder[fact["given"]] == who and place[who] == place[fact["whom"]] and who != fact["whom"]
            holder[fact["given"]] = fact["whom"]
            gifts.append((who, fact["given"], fact["whom"]))
        else:
            beside |= {
                (fact["one"], fact["side"], fact["other"]),
                (fact["other"], opposite[fact["side"]], fact["one"]),
            }

    def asked(pattern: str) -> tuple[str, ...] | None:
        found = re.fullmatch(pattern, question)
        return None if found is None else found.groups()

    if given := asked(r"Where is the (\w+)\?"):
        return {been[given[0]][-1] if given[0] not in holder else place[holder[given[0]]]}
    if given := asked(r"Where is (\w+)\?"):
        return {place[given[0]]}
    if given := asked(r"Where was the (\w+) before the (\w+)\?"):
        trail = been[given[0]]
        return {trail[i - 1] for i in range(1, len(trail)) if trail[i] == given[1]}
    if given := asked(r"What is (\w+) of the (\w+)\?"):
        return {one for one, side, other in beside if (side, other) == given}
    if given := asked(r"What is the (\w+) (\w+) of\?"):
        return {other for one, side, other in beside if (one, side) == given}
    if given := asked(r"Who gave the (\w+) to (\w+)\?"):
        return {giver for giver, thing, receiver in gifts if (thing, receiver) == given}
    if given := asked(r"Who gave the (\w+)\?"):
        return {giver for giver, thing, _ in gifts if (thing,) == given}
    if given := asked(r"What did (\w+) give to (\w+)\?"):
        return {thing for giver, thing, receiver in gifts if (giver, receiver) == given}
    if given := asked(r"Who did (\w+) give the (\w+) to\?"):
        return {receiver for giver, thing, receiver in gifts if (giver, thing) == given}
    given = asked(r"Who received the (\w+)\?")
    assert given is not None, question
    return {receiver for _, thing, receiver in gifts if (thing,) == given}


@pytest.mark.parametrize("name", TASKS)
def test_the_text_alone_gives_the_answer(name: str, filler: Filler, prompter: Prompter) -> None:
    for length in (700, 2048):
        for sample in made(name, length, filler, prompter, 25):
            *examples, (text, question, answer) = passages(sample.draft.prompt)
            assert answer is None and replayed(text, question) == {*sample.draft.answers}
            assert len(list(FACT.finditer(text))) == KINDS[name].facts
            assert all(replayed(shown, asked) == {right} for shown, asked, right in examples)


@pytest.mark.parametrize("name", TASKS)
def test_a_thousand_stories(name: str) -> None:
    """Their answers are those of a replay, every answer and form of question comes up, and there is always
    something to confuse it with."""
    stories = [KINDS[name].story(Random(f"story {i}"), KINDS[name].facts) for i in range(1000)]
    for story in stories:
        facts = " ".join(story.facts)
        assert replayed(facts, story.question) == {story.answer}
        kind = next(kind for kind in (PEOPLE, ROOMS, THINGS) if story.answer in kind)
        assert set(story.options) == {
            word
            for word in kind & set(re.findall(r"\w+", facts))
            if not re.search(rf"\b{word}\b", story.question)
        }
        assert story.answer in story.options and len(story.options) >= 2
    assert {story.answer for story in stories} == (PEOPLE | THINGS if name == "babilong_qa5" else ROOMS)
    forms = {
        re.sub("|".join(PEOPLE | ROOMS | THINGS | {"north", "south", "east", "west"}), "_", story.question)
        for story in stories
    }
    assert (
        len(forms)
        == {"babilong_qa1": 1, "babilong_qa2": 1, "babilong_qa3": 1, "babilong_qa4": 2, "babilong_qa5": 5}[
            name
        ]
    )


@pytest.mark.parametrize(("name", "facts"), [("babilong_qa1", 1), ("babilong_qa2", 2), ("babilong_qa3", 3)])
def test_a_question_takes_so_many_facts(name: str, facts: int) -> None:
    """Of every story so many of its facts give the answer by themselves, and no fewer do."""
    for i in range(60):
        story = KINDS[name].story(Random(f"{i}"), KINDS[name].example)
        assert any(answered(story, part) for part in combinations(story.facts, facts))
        assert not any(answered(story, part) for part in combinations(story.facts, facts - 1))


def answered(story: Story, part: tuple[str, ...]) -> bool:
    try:
        return replayed(" ".join(part), story.question) == {story.answer}
    except (AssertionError, KeyError):
        return False


@pytest.mark.parametrize("chat", [False, True], ids=["base", "chat"])
@pytest.mark.parametrize("length", [512, 4096, 7001])
@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_fill_the_length(
    name: str, length: int, chat: bool, filler: Filler, prompter: Prompter
) -> None:
    for sample in made(name, length, filler, Prompter(prompter.tokenizer, chat)):
        assert 0.98 * length <= len(sample.ids) + TASKS[name].budget <= length
        text = prompter.tokenizer.decode(sample.ids)
        assert (
            sample.draft.prompt in text
            and text.endswith("Answer:")
            and text.startswith("<|im_start|>") == chat
        )


@pytest.mark.parametrize("name", TASKS)
def test_facts_are_scattered_in_order_among_whole_sentences(
    name: str, filler: Filler, prompter: Prompter
) -> None:
    """Without the facts, the text is a passage of the user's, and all its sentences but the last are
    whole."""
    places: list[float] = []
    for sample in made(name, 4096, filler, prompter, 30):
        text = passages(sample.draft.prompt)[-1][0]
        found = list(FACT.finditer(text))
        places += [fact.start() / len(text) for fact in found]
        sentences = [sentence for sentence in around(text, found) if sentence]
        assert found[-1].end() < len(text), "nothing is said after the last fact"
        story = told(name, sample)
        assert tuple(fact[0] for fact in found) == story.facts and sample.draft.answers == (story.answer,)
        assert all(piece[-1] in ".!?\"'”’)" for piece in sentences[:-1]), "a sentence is cut by a fact"
        book = " ".join(filler.sentences) + " " + " ".join(filler.sentences)
        assert " ".join(sentences) in book
    assert min(places) < 0.1 and max(places) > 0.9 and 0.4 < sum(places) / len(places) < 0.6


def around(text: str, facts: list[re.Match[str]]) -> Iterator[str]:
    """What stands between the facts."""
    last = 0
    for fact in facts:
        yield text[last : fact.start()].strip()
        last = fact.end()
    yield text[last:].strip()


def told(name: str, sample: Sample) -> Story:
    """The story of a sample: the third that its random numbers give."""
    random, kind = Random(f"0/{name}/{sample.length}/{sample.index}"), KINDS[name]
    for _ in range(2):
        kind.story(random, kind.example)
    return kind.story(random, kind.facts)


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_those_of_the_seed(name: str, filler: Filler, prompter: Prompter) -> None:
    few, more = made(name, 1024, filler, prompter, 2), made(name, 1024, filler, prompter, 4)
    assert few == more[:2]
    everything = [
        *more,
        *made(name, 1024, filler, prompter, 2, seed=1),
        *made(name, 1500, filler, prompter, 2),
    ]
    for part in (0, 1):
        assert len({passages(sample.draft.prompt)[-1][0][part * 100 :] for sample in everything}) == len(
            everything
        )


def test_samples_are_the_same_in_another_process(filler: Filler, prompter: Prompter) -> None:
    """Nothing hangs on the order of sets, which changes from process to process."""
    code = """
from transformers import AutoTokenizer
from evaluation import test_babilong_samples as here
print(here.digests(here.Filler([str(here.WHALES)]), here.Prompter(AutoTokenizer.from_pretrained(here.SMOLLM2))))
"""
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[-2] == str(digests(filler, prompter)), done.stderr


def digests(filler: Filler, prompter: Prompter) -> list[str]:
    return [
        hashlib.sha256(repr(made(name, 1024, filler, prompter, 2)).encode()).hexdigest() for name in TASKS
    ]


def test_the_text_tells_no_facts_of_the_world(tmp_path: Path) -> None:
    """A sentence with two of its names is left out, and one that never ends; several files are one text."""
    (tmp_path / "a.txt").write_text(
        'Mary was in the kitchen. "Mary!" cried the\n captain. The garden of the office was wet? '
        + "word " * 250
    )
    (tmp_path / "b.txt").write_text("came last. Milk and an Apple. A Kitchener saw John. The end")
    assert Filler([str(tmp_path)]).sentences == [
        '"Mary!"',
        "cried the captain.",
        "A Kitchener saw John.",
        "The end",
    ]
    assert Filler([str(tmp_path / "b.txt")]).digest != Filler([str(tmp_path)]).digest
    (tmp_path / "c.txt").write_text("word " * 300)
    with pytest.raises(InPlaceTTTError, match=r"c.txt holds no sentences of up to 200 words"):
        Filler([str(tmp_path / "c.txt")])


def test_a_text_that_is_too_short_begins_again(tmp_path: Path, prompter: Prompter) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"Sentence {n} says little." for n in range(30)))
    for sample in made("babilong_qa2", 2048, Filler([str(tmp_path / "text.txt")]), prompter):
        assert sample.draft.prompt.count("Sentence 7 says") > 2


@pytest.mark.parametrize("name", TASKS)
def test_a_length_that_cannot_be(name: str, filler: Filler, prompter: Prompter) -> None:
    with pytest.raises(
        InPlaceTTTError,
        match=rf"{name} needs at least \d+ tokens with this tokenizer, 20 of them for the answer",
    ):
        made(name, 100, filler, prompter)


@pytest.mark.parametrize(
    ("says", "score"),
    [
        (" kitchen", 1),
        ("\n The KITCHEN, where Mary is.\nText: Mary went to the garden.", 1),
        ("kitchen\n\nQuestion: Where is the garden?", 1),
        ("The hallway is west of the kitchen.", 1),  # the question names the hallway, so it is no option
        ("the kitchen or the garden", 0),
        ("garden. kitchen", 0),
        ("kitchenette", 0),
        ("office", 0),
        ("", 0),
        (".", 0),
    ],
)
def test_scores(says: str, score: float) -> None:
    assert TASKS["babilong_qa4"].score(says, ("kitchen",), ("garden", "kitchen", "office")) == score


def test_a_name_is_found_whatever_its_case() -> None:
    assert TASKS["babilong_qa5"].score("mary did", ("Mary",), ("John", "Mary")) == 1


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("babilong_qa1", 0.39),
        ("babilong_qa2", 0.42),
        ("babilong_qa3", 0.53),
        ("babilong_qa4", 0.50),
        ("babilong_qa5", 0.63),
    ],
)
def test_what_rules_without_sense_get_is_what_the_page_says(name: str, share: float) -> None:
    stories = [KINDS[name].story(Random(f"{name} {i}"), KINDS[name].facts) for i in range(2000)]
    rules = [
        sum(_guesses(story)[rule] == story.answer for story in stories) / len(stories) for rule in range(3)
    ]
    assert max(rules) == pytest.approx(share, abs=0.04) and f"{share:.2f} for `{name}`" in " ".join(
        PAGE.split()
    )
