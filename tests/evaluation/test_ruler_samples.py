"""RULER's samples: what the tasks say of them holds, read back from the prompts alone; the scores."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTError
from inplace_ttt.evaluation.prompt import Prompter, Sample, samples
from inplace_ttt.evaluation.ruler.material import Material, read_questions
from inplace_ttt.evaluation.ruler.niah import noise
from inplace_ttt.evaluation.ruler.scoring import score
from inplace_ttt.evaluation.ruler.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / ".cache" / "smollm2-135m"
NIAH = [name for name in TASKS if name.startswith("ruler_niah")]
LENGTHS = (4096, 7001)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "book.txt").write_text(tiny.text(16000), encoding="utf-8")
    questions = tiny.write_lines(folder / "questions.jsonl", tiny.questions(500))
    return Material([str(folder / "book.txt")], [str(questions), str(questions)])


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(AutoTokenizer.from_pretrained(SMOLLM2))


def made(
    name: str, length: int, material: Material, prompter: Prompter, count: int = 2, seed: int = 0
) -> list[Sample]:
    return list(samples(TASKS[name], length, count, seed, material, prompter))


@pytest.mark.parametrize("chat", [False, True], ids=["base", "chat"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_fill_the_length(
    name: str, length: int, chat: bool, material: Material, prompter: Prompter
) -> None:
    for sample in made(name, length, material, Prompter(prompter.tokenizer, chat)):
        assert 0.98 * length <= len(sample.ids) + TASKS[name].budget <= length
        text = prompter.tokenizer.decode(sample.ids)
        assert sample.draft.prompt in text and text.endswith(sample.draft.answer_prefix.lstrip())
        assert text.startswith("<|im_start|>") == chat


def test_budgets_are_those_of_the_benchmark() -> None:
    assert {name: task.budget for name, task in TASKS.items()} == dict.fromkeys(NIAH, 128) | {
        "ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50, "ruler_qa_1": 32, "ruler_qa_2": 32,
    }  # fmt: skip
    assert len(TASKS) == 13


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_those_of_the_seed(name: str, material: Material, prompter: Prompter) -> None:
    few, more = made(name, 4096, material, prompter, 2), made(name, 4096, material, prompter, 4)
    assert few == more[:2]
    everything = [
        *more,
        *made(name, 4096, material, prompter, 2, seed=1),
        *made(name, 5000, material, prompter, 2),
    ]
    prompts = {sample.draft.prompt for sample in everything}
    assert len(prompts) == len(everything)


def test_samples_are_the_same_in_another_process(material: Material) -> None:
    """Nothing hangs on the order of sets, which changes from process to process."""
    code = """
import hashlib, sys
from evaluation.test_ruler_samples import digests
from inplace_ttt.evaluation.ruler.material import Material
print(digests(Material([sys.argv[1]], [sys.argv[2]] * 2)))
"""
    arguments = [
        sys.executable,
        "-c",
        code,
        str(Path(material.questions[0].name).parent / "book.txt"),
        material.questions[0].name,
    ]
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        arguments, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[-2] == str(digests(material)), done.stderr


def digests(material: Material) -> list[str]:
    """One sample of each task, as SmolLM2's tokenizer has it."""
    tokens = Prompter(AutoTokenizer.from_pretrained(SMOLLM2))
    first = [next(samples(task, 4096, 1, 0, material, tokens)) for task in TASKS.values()]
    return [hashlib.sha256(repr(sample).encode()).hexdigest() for sample in first]


@pytest.mark.parametrize("name", NIAH)
def test_needles(name: str, material: Material, prompter: Prompter) -> None:
    """The answers follow from the needles that stand in the prompt and the keys that it asks for; each value
    stands once."""
    counts = {"ruler_niah_multivalue": (1, 4), "ruler_niah_multiquery": (4, 1)}
    for sample in made(name, 4096, material, prompter, 5):
        draft = sample.draft
        found = re.findall(
            r"One of the special magic (number|uuid)s for ([\w-]+(?: hoc-[\w-]+)?) is: ([\w-]+)\.",
            draft.prompt,
        )
        told: dict[str, list[str]] = {}
        for _, key, value in found:
            told.setdefault(key, []).append(value)
        query = re.search(r"special magic \w+ for (.+) mentioned in the provided text\?$", draft.prompt)
        assert query is not None
        asked = re.split(r", and |, ", query[1])
        assert sorted(value for key in asked for value in told[key]) == sorted(draft.answers)
        assert (len(asked), len(draft.answers) // len(asked)) == counts.get(name, (1, 1))
        assert all(draft.prompt.count(answer) == 1 for answer in draft.answers)
        assert (
            draft.answer_prefix.strip()
            == f"The special magic {_kind(draft)} for {query[1]} mentioned in the provided text {_is(draft)}"
        )
    assert (len(told) > 20) == (name in ("ruler_niah_multikey_2", "ruler_niah_multikey_3"))


def _kind(draft: object) -> str:
    answers = draft.answers  # type: ignore[attr-defined]
    return ("uuid" if "-" in answers[0] else "number") + "s" * (len(answers) > 1)


def _is(draft: object) -> str:
    return "are" if len(draft.answers) > 1 else "is"  # type: ignore[attr-defined]


def test_needles_stand_anywhere(material: Material, prompter: Prompter) -> None:
    """Over samples, from the first tenth to the last."""
    for name in ("ruler_niah_single_1", "ruler_niah_single_2", "ruler_niah_multikey_2"):
        drafts = [sample.draft for sample in made(name, 4096, material, prompter, 60)]
        depths = [draft.prompt.index(draft.answers[0]) / len(draft.prompt) for draft in drafts]
        assert min(depths) < 0.12 and max(depths) > 0.88 and 0.35 < sum(depths) / 60 < 0.65


def test_variables(material: Material, prompter: Prompter) -> None:
    """Following the assignments of the last question's text from its value gives the answers; the example is
    solved."""
    for sample in made("ruler_vt", 4096, material, prompter, 5):
        example, _, question = sample.draft.prompt.rpartition("Memorize and track")
        value = re.search(r"assigned the value (\d+) in", question)
        assert value is not None
        assert (
            tuple(_follow(question, value[1])) == sample.draft.answers and len(set(sample.draft.answers)) == 5
        )
        shown = re.search(r"assigned the value (\d+) in.*they are:  ([A-Z ]+)\n\n$", example)
        assert shown is not None and _follow(example, shown[1]) == shown[2].split() and shown[1] != value[1]
        assert all(answer not in example for answer in sample.draft.answers)
        solved = example.rpartition("  ")[0] + " "
        assert 500 - 40 < prompter.count(solved) <= 500, "as many lines as 500 tokens hold"
        assert sample.draft.answer_prefix.endswith(
            f"5 variables are assigned the value {value[1]}, they are: "
        )
        lines = question.partition("\n\n")[2].split("\n")[:-1]
        assert {line for line in lines if not line.startswith("VAR ")} <= {
            *noise(5),
            *(noise(n)[0] for n in range(1, 5)),
        }
        assert [line.endswith(" ") for line in lines if line.startswith("VAR ")] == [
            False,
            True,
            True,
            True,
            True,
        ]


def _follow(text: str, value: str) -> list[str]:
    holders = re.findall(rf"VAR ([A-Z]+) = {value}", text)
    for name in holders:
        holders += re.findall(rf"VAR ([A-Z]+) = VAR {name}\b", text)
    return holders


@pytest.mark.parametrize("length", [1024, 4096])
def test_common_words(length: int, material: Material, prompter: Prompter) -> None:
    for sample in made("ruler_cwe", length, material, prompter, 3):
        example, question = (
            part.partition("\nQuestion")[0]
            for part in sample.draft.prompt.split("Below is a numbered list")[1:]
        )
        counts = Counter(re.findall(r"\d+\. (\D+?)(?= \d+\. |$)", question.partition("most often.\n")[2]))
        often, seldom = (30, 3) if length >= 4096 else (6, 1)
        assert {word for word, n in counts.items() if n == often} == set(sample.draft.answers)
        assert set(counts.values()) == {often, seldom}
        assert not any(f". {answer} " in example for answer in sample.draft.answers)


def test_frequent_words(material: Material, prompter: Prompter) -> None:
    for sample in made("ruler_fwe", 4096, material, prompter, 5):
        text = sample.draft.prompt.partition("coded words. ")[2].partition("\nQuestion")[0].split()
        first, *counts = Counter(text).most_common()
        assert first[0] == "..." and tuple(word for word, _ in counts[:3]) == sample.draft.answers
        assert counts[0][1] > counts[1][1] > counts[2][1] > counts[3][1]


def test_questions(material: Material, prompter: Prompter) -> None:
    asked = material.questions[0].questions
    for sample in made("ruler_qa_1", 4096, material, prompter, 5):
        question = asked[sample.index]
        assert (
            sample.draft.prompt.endswith(f"Question: {question.question}")
            and sample.draft.answers == question.answers
        )
        assert all(document in sample.draft.prompt for document in (*question.documents, *question.related))
        numbers = [int(number) for number in re.findall(r"Document (\d+):", sample.draft.prompt)]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 10


@pytest.mark.parametrize("name", TASKS)
def test_a_perfect_answer_scores_1_and_an_empty_one_0(
    name: str, material: Material, prompter: Prompter
) -> None:
    task = TASKS[name]
    for sample in made(name, 4096, material, prompter):
        answers = sample.draft.answers
        assert score(", ".join(answers).upper(), answers, task.any_answer) == 1
        assert score("", answers, task.any_answer) == score("\n", answers, task.any_answer) == 0
        assert score(answers[0], answers, task.any_answer) == (
            1 if task.any_answer else pytest.approx(1 / len(answers))
        )


def test_the_datasets_of_the_benchmark_are_read(tmp_path: Path) -> None:
    squad = {"data": [{"paragraphs": [{"context": "A b.", "qas": [
        {"question": "q", "answers": [{"text": "A"}, {"text": "A"}], "is_impossible": False},
        {"question": "r", "answers": [], "is_impossible": True},
    ]}, {"context": "C d.", "qas": []}]}]}  # fmt: skip
    hotpot = [
        {
            "question": "q",
            "answer": "yes",
            "context": [["T", ["A. ", "B."]], ["U", ["C."]]],
            "supporting_facts": [],
        }
    ]
    for name, value in (("squad", squad), ("hotpot", hotpot)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    one, two = (read_questions(str(tmp_path / f"{name}.json")) for name in ("squad", "hotpot"))
    assert [(q.question, q.answers, q.documents, q.related) for q in one.questions] == [
        ("q", ("A",), ("A b.",), ("C d.",))
    ]
    assert one.documents == ("A b.", "C d.")
    assert two.questions[0].documents == two.documents == ("T\nA. B.", "U\nC.") and two.questions[
        0
    ].answers == ("yes",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not JSON"),
        ("[]", "holds no questions"),
        ('[{"question": "q"}]', "in a format of docs/evaluate.md: KeyError"),
        ('[{"question": "q", "answers": "a", "documents": ["d"]}]', "not a list of texts"),
        ('[{"question": "q", "answers": [" "], "documents": ["d"]}]', "lacks an answer or a document"),
        ('{"data": 3}', "in a format of docs/evaluate.md: TypeError"),
        ("3", "in a format of docs/evaluate.md: TypeError"),
    ],
)
def test_files_that_hold_no_questions(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(content)
    with pytest.raises(InPlaceTTTError, match=says):
        read_questions(str(tmp_path / "q.json"))


@pytest.mark.parametrize(
    ("name", "length", "says"),
    [
        ("ruler_niah_single_1", 150, r"needs at least \d+ tokens with this tokenizer, 128 of them"),
        ("ruler_vt", 512, r"ruler_vt needs at least \d+ tokens"),
        ("ruler_niah_multikey_3", 1000, r"comes no closer to 1000 tokens than \d+"),
        ("ruler_cwe", 262144, r"there are 8,\d+ words to list"),
    ],
)
def test_lengths_that_cannot_be(
    name: str, length: int, says: str, material: Material, prompter: Prompter
) -> None:
    with pytest.raises(InPlaceTTTError, match=says):
        made(name, length, material, prompter)


@pytest.mark.parametrize("name", ["ruler_niah_single_2", "ruler_qa_1"])
def test_texts_that_are_too_short_begin_again(name: str, tmp_path: Path, prompter: Prompter) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"Sentence {n} says little." for n in range(80)))
    questions = [
        {"question": f"q{n}", "answers": [f"a{n}"], "documents": [f"Document of {n}: " + "word " * 40]}
        for n in range(3)
    ]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    short = Material([str(tmp_path / "text.txt")], [str(tmp_path / "questions.json")])
    for sample in made(name, 4096, short, prompter, 2):
        assert (
            sample.draft.prompt.count("Sentence 7 says" if name == "ruler_niah_single_2" else "Document of 2")
            > 1
        )
        assert 0.98 * 4096 <= len(sample.ids) + TASKS[name].budget <= 4096


def test_questions_without_other_documents_are_refused(tmp_path: Path, prompter: Prompter) -> None:
    (tmp_path / "q.json").write_text(json.dumps([{"question": "q", "answers": ["a"], "documents": ["d"]}]))
    with pytest.raises(InPlaceTTTError, match="only the documents of question 1, which must be hidden among"):
        made("ruler_qa_1", 1024, Material((), [str(tmp_path / "q.json")]), prompter)


def test_a_line_of_questions_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    """JSON strings may hold other characters that Python takes for ends of lines; and a file may begin with a
    mark."""
    asked = {"question": "Where\u2028is it?", "answers": ["there"], "documents": ["It is\x85there."]}
    (tmp_path / "q.jsonl").write_text(
        "\ufeff" + json.dumps(asked, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert [q.question for q in read_questions(str(tmp_path / "q.jsonl")).questions] == [asked["question"]]
