"""Turns a puzzle into a prompt of a given length, in the model's own tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from ..errors import InPlaceTTTError
from ..files.text import begins_of, ids_within, refuse_beyond, with_one_beginning

SHORTFALL = 0.02
"""Largest fraction by which prompt and answer may stay below the length; they never exceed it."""

_CLOSE = 0.005
_TRIES = 40


Count = Callable[[str], int]
"""Returns the number of tokens of a text."""


@dataclass(frozen=True)
class Draft:
    """A prompt with its answer.

    Attributes:
        prompt: text of the prompt.
        answer_prefix: beginning of the answer, which the model is given.
        answers: right continuations.
        options: all possible answers, if the answer is one of a few words.
        guesses: answers of simple rules that ignore the meaning, one per rule.
    """

    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    options: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Puzzle:
    """One question in a text of variable size.

    Attributes:
        least: smallest size.
        most: largest size.
        draft: returns the draft of a size; larger sizes give longer prompts.
        short: reason why the size is limited.
    """

    least: int
    most: int
    draft: Callable[[int], Draft]
    short: str = ""


@dataclass(frozen=True)
class Task(ABC):
    """One task of a benchmark.

    Attributes:
        name: name of the task.
        budget: largest number of tokens of an answer.
        puzzle: makes a puzzle from random numbers, material, length in tokens, number of the sample, and
            `Count`.
        in_text: the task hides its facts in the user's text.
        questions: index of the question file that the task needs, or None.
    """

    name: str
    budget: int
    puzzle: Callable[[Random, Any, int, int, Count], Puzzle]
    in_text: bool = False
    questions: int | None = None

    @abstractmethod
    def score(self, prediction: str, answers: Sequence[str], options: Sequence[str]) -> float:
        """Returns the score of a prediction, 0 to 1, for a draft with these answers and options."""

    @abstractmethod
    def made_of(self, material: Any) -> dict[str, str]:
        """Returns digests of the texts that samples are made of, by the names used in a result."""


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        task: name of the task.
        length: length of prompt and answer in tokens, at most.
        index: number of the sample.
        draft: prompt and answer.
        ids: token ids of the prompt, with the answer's prefix.
    """

    task: str
    length: int
    index: int
    draft: Draft
    ids: list[int]


class Prompter:
    """Turns drafts into token ids: as plain text, or as a user's turn in the chat template.

    Args:
        tokenizer: the model's tokenizer.
        chat: use the chat template.

    Raises:
        InPlaceTTTError: if the chat template is missing, or the tokenizer cannot write the answers.
    """

    def __init__(self, tokenizer: Any, chat: bool = False) -> None:
        self.tokenizer, self.chat, self._begins = tokenizer, chat, begins_of(tokenizer)
        if chat and not getattr(tokenizer, "chat_template", None):
            raise InPlaceTTTError("the tokenizer lacks a chat template; leave --chat out.")
        probe = "grass 0123456789 abcdef-ABCDEF"
        written = tokenizer.decode(tokenizer(probe).input_ids, skip_special_tokens=True)
        if "".join(written.split()) != "".join(probe.split()):
            raise InPlaceTTTError(
                f"the tokenizer turns {probe!r} into {written!r}, so it cannot write the answers; use the "
                "model's own."
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokenizer and, if used, of the chat template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        how = self.tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
        # settings that the last call left behind
        how = {key: value for key, value in how.items() if key not in ("padding", "truncation")}
        parts = [how, self._begins, self.tokenizer.chat_template if self.chat else None]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text, without special tokens."""
        return len(ids_within(self.tokenizer, text))

    def text(self, draft: Draft) -> str:
        """Returns the text of a draft: its prompt with the answer's prefix."""
        if not self.chat:
            return draft.prompt + draft.answer_prefix
        turn = [{"role": "user", "content": draft.prompt}]
        opened = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return opened + draft.answer_prefix.lstrip()

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of a prompt's text."""
        begins = [] if self.chat else self._begins  # no end-of-text token, because the answer follows
        ids = with_one_beginning([*begins, *ids_within(self.tokenizer, text)], self._begins)
        return refuse_beyond(ids, self.tokenizer, "the text of a task")


def samples(
    task: Task, length: int, count: int, seed: int, material: Any, prompter: Prompter
) -> Iterator[Sample]:
    """Yields the first `count` samples of a task.

    They depend only on seed, texts and tokenizer. A larger count yields the same first samples.

    Args:
        task: the task.
        length: length of prompt and answer, in tokens.
        count: number of samples.
        seed: seed of the samples.
        material: texts that samples are made of.
        prompter: turns drafts into token ids.

    Raises:
        InPlaceTTTError: if no prompt with its answer's budget fills between 98 and 100 % of `length` tokens.
    """
    guess = None
    for index in range(count):
        puzzle = task.puzzle(
            Random(f"{seed}/{task.name}/{length}/{index}"), material, length, index, prompter.count
        )
        size, draft, ids = _fit(puzzle, prompter, length - task.budget, task, length, guess)
        guess = size if guess is None else guess
        yield Sample(task.name, length, index, draft, ids)


def check(task: Task, length: int, count: int, seed: int, material: Any, prompter: Prompter) -> None:
    """Raises InPlaceTTTError if the first sample cannot be made, or there are fewer than `count`."""
    next(samples(task, length, 1, seed, material, prompter))
    task.puzzle(Random(0), material, length, count - 1, prompter.count)


def _fit(
    puzzle: Puzzle, prompter: Prompter, room: int, task: Task, length: int, guess: int | None
) -> tuple[int, Draft, list[int]]:
    """Returns the size whose prompt fills `room` tokens best without exceeding it.

    The search takes secant steps inside a shrinking bracket.
    """
    first = puzzle.draft(puzzle.least)
    best = puzzle.least, first, prompter.ids(prompter.text(first))
    tokens = least_tokens = len(best[2])
    if tokens > room:
        raise InPlaceTTTError(
            f"{task.name} needs at least {tokens + task.budget} tokens with this tokenizer, {task.budget} "
            "of them for the answer, "
            f"but must fit {length}; raise --lengths or leave it out of --tasks."
        )
    low, high = puzzle.least, puzzle.most + 1
    size = min(2 * puzzle.least + 50, puzzle.most) if guess is None else guess
    for _ in range(_TRIES):
        if high - low <= 1 or room - tokens <= _CLOSE * room:
            break
        size = min(max(size, low + 1), high - 1)
        draft = puzzle.draft(size)
        ids = prompter.ids(prompter.text(draft))
        rate = max((len(ids) - least_tokens) / (size - puzzle.least), 1e-3)
        if len(ids) > room:
            high = size
        else:
            low, tokens, best = size, len(ids), (size, draft, ids)
        size += int((room * (1 - _CLOSE / 2) - len(ids)) / rate)
    filled = tokens + task.budget
    if filled < (1 - SHORTFALL) * length:
        if low == puzzle.most:
            raise InPlaceTTTError(
                f"{puzzle.short}, which makes {task.name} {filled} tokens long, not {length}."
            )
        raise InPlaceTTTError(
            f"{task.name} comes no closer to {length} tokens than {filled} with this tokenizer, since one "
            "piece of its text is longer than 2 % of that length; raise --lengths or leave it out of --tasks."
        )
    return best
