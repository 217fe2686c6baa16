"""Renders the text of each turn.

Together, the turns are the text that the chat template renders for the whole conversation.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from ...errors import InPlaceTTTError, reported
from ...files.text import document_ids, ids_within, refuse_beyond

PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant:{{ m.content }}"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template for a tokenizer that lacks one. An answer is one line."""

_MARK = "\ufdd0"
"""Placeholder for text that the session has already read. Unicode reserves it, so no text contains it."""


class Place(Enum):
    """The kind of text that a session ends with.

    Attributes:
        START: before the first token.
        OPEN: after a file in a user's turn, before the question.
        ANSWERED: after an answer, before the template's end of the answer.
        RAW: after a text outside of turns, such as `inplace-ttt generate` reads.
    """

    START = "start"
    OPEN = "open"
    ANSWERED = "answered"
    RAW = "raw"


class Turns:
    """The turns of a conversation under a tokenizer's chat template.

    Earlier turns are never rendered again. Placeholders replace them, so answers stay as they were generated.

    Args:
        tokenizer: the model's tokenizer.
        system: instructions at the start, or None.
        source: the model's path or hub id, for messages.

    Attributes:
        is_plain: True if the tokenizer lacks a template, so that each turn is a line.

    Raises:
        InPlaceTTTError: if the template fails, or if a later turn changes the text of an earlier one.
    """

    def __init__(self, tokenizer: Any, system: str | None, source: str) -> None:
        self.tokenizer, self.system, self.source = tokenizer, system, source
        self.is_plain = not tokenizer.chat_template
        self._one = self._rendered(_MARK)
        two, three = (self._rendered(_MARK, answers) for answers in (1, 2))
        added = self._after(self._one + _MARK, two)
        if self._one.count(_MARK) != 1 or three != two + _MARK + added:
            self._refuse()
        self._first, later = self._one.partition(_MARK)[0], added.partition(_MARK)[0]
        # the longest common suffix of the texts before a later user's text and before the first one
        self._header = next(later[n:] for n in range(len(later) + 1) if self._first.endswith(later[n:]))
        self.end_of_answer = ids_within(tokenizer, added)[:1]

    def ids(self, place: Place, content: str, source: str, *, asks: bool) -> list[int]:
        """Returns the token ids that continue a session with a user's text.

        Args:
            place: the kind of text that the session ends with.
            content: the user's text.
            source: its name, for messages.
            asks: end the user's turn and begin the answer; False leaves the turn open.

        Raises:
            InPlaceTTTError: if the template or the tokenizer refuses the text.
        """
        text = self._text(place, content if asks else content + _MARK, asks)
        if not asks:
            text = text[: text.rindex(_MARK)]
        if self.is_plain and place is Place.START:
            return document_ids(self.tokenizer, text, source)
        with reported(f"the tokenizer cannot read {source}"):
            return refuse_beyond(ids_within(self.tokenizer, text), self.tokenizer, source)

    def in_a_turn(self, text: str) -> bool:
        """Returns True if a session's text holds the beginning of a user's turn."""
        # decoding moves the spaces around special tokens
        return "".join(self._header.split()) in "".join(text.split())

    def _text(self, place: Place, content: str, asks: bool) -> str:
        if place is Place.START:
            return self._rendered(content, asks=asks)
        if place is Place.OPEN:
            opened = self._first + _MARK
            return self._after(opened, self._rendered(f"{_MARK}\n\n{content}", asks=asks))
        if place is Place.RAW:
            return f"\n\n{self._header}" + self._after(self._first, self._rendered(content, asks=asks))
        return self._after(self._one + _MARK, self._rendered(content, 1, asks=asks))

    def _rendered(self, content: str, answers: int = 0, *, asks: bool = True) -> str:
        """Returns the text of a conversation that ends with a user's text, after `answers` answers."""
        messages = [{"role": "system", "content": self.system.strip()}] if self.system else []
        for _ in range(answers):
            messages += [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
        messages.append({"role": "user", "content": content})
        problem = f"the chat template of {self.source} cannot write this conversation"
        with reported(problem, "correct its chat_template.jinja, or delete it to chat in plain lines"):
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=PLAIN if self.is_plain else None,
                tokenize=False,
                add_generation_prompt=asks,
            )

    def _after(self, read: str, whole: str) -> str:
        """Returns the part of a text after the part that the session has read."""
        if not whole.startswith(read):
            self._refuse()
        return whole[len(read) :]

    def _refuse(self) -> None:
        without = "leave out --system, or " if self.system else ""
        raise InPlaceTTTError(
            f"the chat template of {self.source} changes an earlier turn when a later one follows, and a "
            f"session cannot read a turn again; {without}correct chat_template.jinja, or delete it to chat "
            "in plain lines."
        )
