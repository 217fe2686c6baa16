"""Questions among documents: the ones that hold the answer, and others to hide them."""

from __future__ import annotations

from itertools import cycle
from random import Random

from ...errors import InPlaceTTTError
from ..long_context.prompt import Count, Draft, Puzzle
from .material import Material

_TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\n"
    "Question: {question}"
)
_PREFIX = " Answer:"


def puzzle(number: int, random: Random, material: Material, length: int, index: int, count: Count) -> Puzzle:
    """Question `index` of a file, its documents whole; then the rest of their article, then others, again and
    again where they end.

    Sizes: words of other documents; the last of these may be cut off.
    """
    book = material.questions[number]
    if index >= len(book.questions):
        raise InPlaceTTTError(
            f"{book.name} has {len(book.questions)} questions, --samples asks for more; lower it."
        )
    question = book.questions[index]
    own, related = set(question.documents), set(question.related)
    beside = [text for text in question.related if text not in own]
    foreign = [text for text in book.documents if text not in own | related]
    others = random.sample(beside, len(beside)) + random.sample(foreign, len(foreign))
    if not others:
        raise InPlaceTTTError(
            f"{book.name} has no document but those of question {index + 1} to hide them among; give more "
            "questions."
        )
    lengths = [len(text.split()) for text in others]
    order = random.random()

    def draft(size: int) -> Draft:
        documents, left = list(question.documents), size
        for text, words in cycle(zip(others, lengths, strict=True)):
            if left <= 0:
                break
            documents.append(text if words <= left else " ".join(text.split()[:left]))
            left -= words
        Random(order).shuffle(documents)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(documents, 1))
        return Draft(_TEMPLATE.format(context=context, question=question.question), _PREFIX, question.answers)

    return Puzzle(0, 10 * length, draft)
