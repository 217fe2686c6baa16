"""BABILong's tasks qa1 to qa5.

The facts of a story are scattered in order among the sentences of a text, and the question follows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from ..prompt import Count, Draft, Puzzle, Task
from .filler import Filler
from .stories import KINDS, Kind, Story

_TEMPLATE = (
    "{hint} Facts of this kind are told in a text, one sentence each, in the order in which they became "
    "true, between sentences that have "
    "nothing to do with them. Answer the question after the text with one word.\n\n{examples}{text}"
)
_TEXT = "Text: {context}\nQuestion: {question}"
_PREFIX = "\nAnswer:"
_EXAMPLES = 2
_BUDGET = 20
_SENTENCE_END = re.compile(r"[.!?\n]")


@dataclass(frozen=True)
class BabiTask(Task):
    """A task whose score is 1 if the answer's first sentence has the right option and no other."""

    def score(self, prediction: str, answers: Sequence[str], options: Sequence[str]) -> float:
        first = _SENTENCE_END.split(prediction.strip().lower(), maxsplit=1)[0]
        named = {option for option in options if option.lower() in re.findall(r"\w+", first)}
        return float(named == {*answers})

    def made_of(self, material: Filler) -> dict[str, str]:
        return {"text": material.digest}


def puzzle(kind: Kind, random: Random, material: Filler, length: int, index: int, count: Count) -> Puzzle:
    """Makes a puzzle of a story, after two solved stories without other text.

    Its size is the number of words of the text. The text begins at a random place.
    """
    solved = [kind.story(random, kind.example) for _ in range(_EXAMPLES)]
    story = kind.story(random, kind.facts)
    shown = [
        f"{_TEXT.format(context=' '.join(e.facts), question=e.question)}{_PREFIX} {e.answer}\n\n"
        for e in solved
    ]
    guesses = _guesses(story)
    start, depths = random.random(), sorted(random.random() for _ in story.facts)

    def draft(size: int) -> Draft:
        context = " ".join(_scattered(story.facts, depths, material.sentences_from(start, size)))
        text = _TEXT.format(context=context, question=story.question)
        prompt = _TEMPLATE.format(hint=kind.hint, examples="".join(shown), text=text)
        return Draft(prompt, _PREFIX, (story.answer,), story.options, guesses)

    return Puzzle(0, 10 * length, draft)


def _guesses(story: Story) -> tuple[str, ...]:
    """Returns the option that the story states first, last, and most often."""
    told = [word for fact in story.facts for word in re.findall(r"\w+", fact) if word in story.options]
    return told[0], told[-1], Counter(told).most_common(1)[0][0]


def _scattered(facts: Sequence[str], depths: Sequence[float], sentences: Sequence[str]) -> list[str]:
    """Returns the sentences with each fact before the sentence at its depth (0 to 1).

    No fact follows the last sentence, which may be cut off.
    """
    pieces, last = [], 0
    for fact, depth in zip(facts, depths, strict=True):
        place = int(depth * len(sentences))
        pieces += [*sentences[last:place], fact]
        last = place
    return [*pieces, *sentences[last:]]


TASKS = {name: BabiTask(name, _BUDGET, partial(puzzle, kind), in_text=True) for name, kind in KINDS.items()}
"""The tasks by name."""
