"""Questions about documents. Some documents contain the answer, and the others hide them."""

from __future__ import annotations

from itertools import cycle
from random import Random

from ...errors import InPlaceTTTError
from ..prompt import Count, Draft, Puzzle
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
    """Makes a puzzle of question `index` of a file.

    Its own documents are complete. They are followed by the rest of their article and then by others, which
    are repeated if needed. The size is the number of words of other documents. The last may be cut off.
    """
    book = material.questions[number]
    if index >= len(book.questions):
        raise InPlaceTTTError(
            f"{book.name} has {len(book.questions)} questions, but --samples is above that; lower it."
        )
    question = book.questions[index]
    own, related = set(question.documents), set(question.related)
    beside = [text for text in question.related if text not in own]
    unrelated = [text for text in book.documents if text not in own | related]
    others = random.sample(beside, len(beside)) + random.sample(unrelated, len(unrelated))
    if not others:
        raise InPlaceTTTError(
            f"{book.name} holds only the documents of question {index + 1}, which must be hidden among "
            "others; give more questions."
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
