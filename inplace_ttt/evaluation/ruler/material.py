"""Texts that the tasks are made of: noise, words, a haystack, and questions with their documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any

from ...errors import InPlaceTTTError, how_to_install, one_line
from ...files.json_files import parse_json
from ...files.text import read_text
from ...texts.documents import documents_in

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


@dataclass(frozen=True)
class Question:
    """A question with its documents.

    Attributes:
        question: text of the question.
        answers: right answers; each suffices alone.
        documents: texts that hold the answer.
        related: other texts of the same article.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionBook:
    """The questions of one file.

    Attributes:
        name: path of the file.
        digest: SHA-256 of the file.
        questions: the questions.
        documents: every document of the file, without duplicates.
    """

    name: str
    digest: str
    questions: tuple[Question, ...]
    documents: tuple[str, ...]


class Material:
    """Texts of a run.

    Args:
        texts: files or folders with the text to hide needles in.
        questions: paths of JSON files, as in `read_questions`.
        text_field: field of a record that holds its text.

    Raises:
        InPlaceTTTError: if a file cannot be read, or the texts are empty.
    """

    def __init__(
        self, texts: Sequence[str] = (), questions: Sequence[str] = (), text_field: str | None = None
    ) -> None:
        documents = documents_in(texts, "--text", text_field) if texts else []
        self._haystack = " ".join(" ".join(document.text().split()) for document in documents)
        if texts and not self._haystack:
            raise InPlaceTTTError(f"{texts[0]} holds no text; give a long UTF-8 text.")
        self.questions = [read_questions(path) for path in questions]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the haystack."""
        return hashlib.sha256(self._haystack.encode()).hexdigest()

    @cached_property
    def _essay(self) -> list[str]:
        return self._haystack.split(" ")

    def essay(self, words: int) -> str:
        """Returns the first words of the haystack, which is repeated if it is too short."""
        return " ".join(islice(cycle(self._essay), words))

    def mentions(self, text: str) -> bool:
        """Returns True if the haystack contains the text."""
        return text in self._haystack

    @cached_property
    def nouns(self) -> list[str]:
        return _listed("noun")

    @cached_property
    def adjectives(self) -> list[str]:
        return _listed("adjective")

    @cached_property
    def words(self) -> list[str]:
        """Nouns, adjectives and verbs, without duplicates."""
        return sorted({*self.nouns, *self.adjectives, *_listed("verb")})

    @cached_property
    def further_words(self) -> list[str]:
        """Words of the haystack that are not in `words`."""
        return sorted({*re.findall(r"\b[a-z]{3,}\b", self._haystack)}.difference(self.words))


def _listed(category: str) -> list[str]:
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise InPlaceTTTError(
            "RULER's words come from the package wonderwords, which is not installed; "
            f"{how_to_install('eval')}."
        ) from None
    return sorted(set(RandomWord().filter(include_categories=[category])))


def read_questions(path: str) -> QuestionBook:
    """Reads questions from a JSON file.

    Three formats are accepted: those of SQuAD and HotpotQA, and {"question", "answers", "documents"} as
    JSON or JSON lines.

    Raises:
        InPlaceTTTError: if the file cannot be read, or a question lacks answers or documents.
    """
    text = read_text(path)
    try:
        values = (
            [parse_json(line) for line in text.split("\n") if line.strip()]
            if path.endswith(".jsonl")
            else parse_json(text)
        )
    except ValueError as error:
        raise InPlaceTTTError(
            f"{path} is not JSON ({one_line(error)}); name a file of JSON lines .jsonl."
        ) from None
    try:
        questions, documents = _squad(values) if isinstance(values, dict) else _listed_questions(values)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InPlaceTTTError(
            f"{path} does not hold questions in a format of docs/evaluate.md: {type(error).__name__} at "
            f"{one_line(error)!r}."
        ) from None
    for question in questions:
        if (
            not question.answers
            or not all(answer.strip() for answer in question.answers)
            or not question.documents
        ):
            raise InPlaceTTTError(
                f"{path} lacks an answer or a document for the question {question.question!r}; give both "
                "or leave it out."
            )
    if not questions:
        raise InPlaceTTTError(f"{path} holds no questions.")
    return QuestionBook(
        path, hashlib.sha256(text.encode()).hexdigest(), tuple(questions), tuple(dict.fromkeys(documents))
    )


def _squad(values: dict[str, Any]) -> tuple[list[Question], list[str]]:
    """Returns every answerable question with its paragraph and the others of its article."""
    questions: list[Question] = []
    documents: list[str] = []
    for article in values["data"]:
        own = tuple(paragraph["context"] for paragraph in article["paragraphs"])
        documents += own
        for paragraph, context in zip(article["paragraphs"], own, strict=True):
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    questions.append(
                        Question(
                            qa["question"],
                            answers,
                            (context,),
                            tuple(text for text in own if text != context),
                        )
                    )
    return questions, documents


def _listed_questions(values: Sequence[dict[str, Any]]) -> tuple[list[Question], list[str]]:
    """Returns HotpotQA's questions with all ten paragraphs, as in RULER, or questions of our format."""
    questions = []
    for value in values:
        if "context" in value:
            documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in value["context"])
            answers: tuple[str, ...] = (value["answer"],)
        else:
            documents, answers = _texts(value["documents"]), _texts(value["answers"])
        questions.append(Question(_texts([value["question"]])[0], answers, documents))
    return questions, [text for question in questions for text in question.documents]


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{values!r}, which is not a list of texts")
    return tuple(values)
