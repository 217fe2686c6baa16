"""Sentences of a long text, among which facts are scattered."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import count

from ...errors import InPlaceTTTError
from ...texts.documents import documents_in
from .world import PEOPLE, ROOMS, THINGS

_SENTENCE = re.compile(r"""(?<=[.!?]) |(?<=[.!?]["'”’)]) """)
_NAMES = {name.lower() for name in (*PEOPLE, *ROOMS, *THINGS)}
_LONGEST = 200
"""Largest number of words of a sentence.

A longer sentence is a table or a text without full stops, and would keep facts next to each other.
"""


class Filler:
    """Sentences of UTF-8 text files, read as one text.

    Only sentences of up to 200 words with at most one name of the stories' world are kept. A sentence with
    two of its people, rooms and things might answer a question.

    Args:
        paths: files or folders.

    Raises:
        InPlaceTTTError: if no sentence is left.
    """

    def __init__(self, paths: Sequence[str], text_field: str | None = None) -> None:
        documents = documents_in(paths, "--text", text_field)
        text = " ".join(" ".join(document.text().split()) for document in documents)
        self.sentences = [sentence for sentence in _SENTENCE.split(text) if sentence and _fits(sentence)]
        if not self.sentences:
            names = ", ".join(document.name for document in documents[:3])
            raise InPlaceTTTError(
                f"{names} holds no sentences of up to {_LONGEST} words to hide facts among; give a long text."
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the sentences."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()

    @cached_property
    def _lengths(self) -> list[int]:
        return [sentence.count(" ") + 1 for sentence in self.sentences]

    def sentences_from(self, start: float, words: int) -> list[str]:
        """Returns sentences of `words` words in total, starting at the fraction `start` (0 to 1) of the text.

        At its end, the text begins again. The last sentence may be cut off.
        """
        taken: list[str] = []
        for place in count(int(start * len(self.sentences))):
            if words <= 0:
                break
            number = place % len(self.sentences)
            sentence, length = self.sentences[number], self._lengths[number]
            taken.append(sentence if length <= words else " ".join(sentence.split(" ")[:words]))
            words -= length
        return taken


def _fits(sentence: str) -> bool:
    return (
        sentence.count(" ") < _LONGEST and len(_NAMES.intersection(re.findall(r"\w+", sentence.lower()))) < 2
    )
