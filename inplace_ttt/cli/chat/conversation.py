"""A conversation in one session: it reads files, answers questions, and saves itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, TextStreamer

from ...errors import InPlaceTTTError, reported
from ...files.text import ids_within, read_text
from ...session.session import Session
from ...surgery import config_of, disable_ttt
from ..loading import note_on_positions
from ..messages import warn
from .terminal import Stop
from .turns import Place, Turns

_READ_AT_ONCE = 1024
"""Tokens of a file between two checks for Ctrl-C. `Session.read` passes this many to the model at once."""


class HalfwayError(InPlaceTTTError):
    """An answer failed halfway. It ends the chat, because nothing can follow it in this session."""


class Conversation:
    """A conversation in one session.

    Args:
        model: a converted model.
        turns: renders the texts of the turns.
        source: the model's path or hub id, for messages.
        max_new_tokens: most tokens of an answer.
        temperature: sampling temperature; 0 takes the most likely token.

    Attributes:
        session: the session, which may be replaced.
        aside: a copy of the session that reads and answers without the fast weights. None while they are on.
        file: the session's file, or None.
        is_saved: True if the file holds the latest state of the session.
    """

    def __init__(
        self, model: PreTrainedModel, turns: Turns, source: str, max_new_tokens: int, temperature: float
    ) -> None:
        self.model, self.turns, self.source = model, turns, source
        self.session = Session(model)
        self.aside: Session | None = None
        self.file: str | None = None
        self.is_saved = True
        self._max_new_tokens, self._warned = max_new_tokens, False
        configured = model.generation_config.eos_token_id
        ends = configured if isinstance(configured, list) else [] if configured is None else [configured]
        special = [i for i in turns.end_of_answer if i in turns.tokenizer.all_special_ids]
        # a model trained with another template may list only the token that ends a document
        self._ends = list(dict.fromkeys(ends + special))
        self._settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "eos_token_id": self._ends or None,
            "pad_token_id": self._ends[0] if self._ends else None,
            **({"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}),
        }

    @classmethod
    def loaded(cls, file: str, *given: Any) -> Conversation:
        """Returns a conversation that continues the session in a file.

        Raises:
            InPlaceTTTError: if the file is damaged, belongs to another model, or holds several sequences.
        """
        made = cls(*given)
        made.session = Session.load(file, made.model)
        if (rows := made.session.batch) > 1:
            raise InPlaceTTTError(
                f"{file} holds {rows} sequences, but a chat continues only one; give another file."
            )
        made.file = file
        return made

    @property
    def current(self) -> Session:
        """The session that the next turn continues."""
        return self.session if self.aside is None else self.aside

    @property
    def is_on(self) -> bool:
        """True while turns use the fast weights, and so belong to the session."""
        return self.aside is None

    @property
    def chunks_written(self) -> int:
        """Chunks that the present session has written."""
        return self.current.chunks_written

    @property
    def tokens(self) -> int:
        """Tokens of the present session."""
        return 0 if self.current.tokens is None else self.current.tokens.shape[1]

    def read(self, text: str, source: str, stop: Stop, advance: Callable[[int, int], None]) -> int:
        """Reads a file's text as the beginning of the user's next turn.

        Args:
            text: the file's text.
            source: the file, for messages.
            stop: ends the reading between two pieces.
            advance: called after each piece, with the tokens read so far and all tokens.

        Returns:
            The number of tokens read.
        """
        ids = self._next_ids(text, source, asks=False)
        read = 0
        with self._switched():
            for piece in ids.split(_READ_AT_ONCE, dim=1):
                if stop.asked:
                    break
                self.current.read(piece)
                read += piece.shape[1]
                advance(read, ids.shape[1])
        return read

    def answer(self, question: str, stop: Stop, write: Callable[[str], None]) -> str:
        """Reads a question and answers it.

        Args:
            question: the user's text.
            stop: ends the answer after the present token.
            write: called with each finished piece of the answer.

        Returns:
            The answer.

        Raises:
            HalfwayError: if the model fails while it answers.
            InPlaceTTTError: if the turn is refused before it is read.
        """
        ids = self._next_ids(question, "this turn", asks=True)
        start = self.tokens + ids.shape[1]
        ends = _Ends(stop, self.turns.tokenizer if self.turns.is_plain else None, start)
        problem = f"cannot generate with the settings of {self.source}/generation_config.json"
        try:
            with self._switched(), reported(problem, "correct it or delete it"):
                new = self.current.generate(
                    ids,
                    streamer=_Streamer(self.turns.tokenizer, write),
                    stopping_criteria=StoppingCriteriaList([ends]),
                    **self._settings,
                )
        except InPlaceTTTError as error:
            if isinstance(error.__cause__, (MemoryError, torch.OutOfMemoryError)):
                raise error.__cause__ from None
            raise HalfwayError(str(error)) from None
        return self.turns.tokenizer.decode(new[0], skip_special_tokens=True).strip()

    def switch(self, on: bool) -> None:
        """Switches the fast weights on or off.

        Turns without the fast weights go to a copy of the session, which is dropped when they are on again.
        So the fast weights read every token of the session itself. If they skipped some, `target: gradient`
        could not compute a gradient there.
        """
        if on:
            self.aside = None
        elif self.aside is None:
            self.aside = self.session.fork()

    def forget(self) -> None:
        """Starts a new session."""
        self._replace(Session(self.model))

    def drop(self) -> None:
        """Keeps only the fast weights. The next turn begins a new conversation."""
        self._replace(self.session.drop_kv_cache())

    def _replace(self, session: Session) -> None:
        self.session = session
        self.aside = None if self.aside is None else session.fork()

    def save(self, file: str | None = None) -> None:
        """Saves the session to its file, or to a given file, which becomes its file.

        Raises:
            InPlaceTTTError: if the session cannot be saved there, or does not have a file.
        """
        if (file := file or self.file) is None:
            raise InPlaceTTTError("this session does not have a file yet; give one: /save FILE.")
        self.session.save(file)
        self.file, self.is_saved = file, True

    def fork(self, file: str) -> None:
        """Saves a copy of the session. Its own file stays the same."""
        self.session.save(file)

    def summary(self) -> dict[str, Any]:
        """Returns the session's file and sizes as a JSON object."""
        return {
            "session": self.file,
            "tokens": 0 if self.session.tokens is None else self.session.tokens.shape[1],
            "chunks_written": self.session.chunks_written,
            "state_bytes": self.session.state_bytes,
        }

    def info(self) -> str:
        """Returns the sizes of the session."""
        layers = ", ".join(map(str, config_of(self.model).layers))
        return (
            f"{self.tokens:,} tokens, {self.current.cache.get_seq_length():,} of them in the KV cache; "
            f"{self.current.chunks_written:,} chunks written into TTT layers {layers} "
            f"({self.current.state_bytes:,} bytes); TTT {'on' if self.is_on else 'off'}; "
            f"{f'saved to {self.file}' if self.file else 'not saved to a file'}"
        )

    def _switched(self) -> Any:
        return nullcontext() if self.aside is None else disable_ttt(self.model)

    @property
    def place(self) -> Place:
        """Returns the kind of text that the session ends with.

        It depends on the tokens and the KV cache alone, so a loaded session continues like one in memory.
        After an answer, the cache lacks the last token; after reading, it has all tokens.
        """
        if self.current.tokens is None or not self.tokens:
            return Place.START
        if self.current.cache.get_seq_length() < self.tokens:
            return Place.ANSWERED
        text = self.turns.tokenizer.decode(self.current.tokens[0])
        return Place.OPEN if self.turns.in_a_turn(text) else Place.RAW

    def _next_ids(self, content: str, source: str, *, asks: bool) -> Tensor:
        """Returns the token ids [1, n] that continue the session with a user's text.

        After an answer, they begin with its unread last token, unless that token ends the answer. Then comes
        the template's own end of an answer.
        """
        place = self.place
        added = self.turns.ids(place, content, source, asks=asks)
        wanted = self._max_new_tokens if asks else 0
        note = note_on_positions(
            self.model,
            self.tokens + len(added) + wanted,
            "start at position 0 again with /drop or /forget, or give less text or a lower --max-new-tokens",
        )
        if note and not self._warned:
            warn(note)
            self._warned = True
        if place is Place.ANSWERED:
            assert self.current.tokens is not None
            last = int(self.current.tokens[0, -1])
            self.current.tokens = self.current.tokens[:, :-1]
            added = self._kept_of(last) + added
        return torch.tensor([added], dtype=torch.int64, device=self.model.device)

    def _kept_of(self, last: int) -> list[int]:
        """Returns the token ids of an answer's last token, without the part that ends the answer."""
        if last in self._ends:
            return []
        text = self.turns.tokenizer.decode([last])
        if self.turns.is_plain and "\n" in text:
            return ids_within(self.turns.tokenizer, text.partition("\n")[0])
        return [last]


class _Ends(StoppingCriteria):
    """Ends an answer after Ctrl-C. An answer in plain lines also ends with its line.

    Args:
        stop: set by Ctrl-C.
        tokenizer: decodes an answer in plain lines; None for other answers.
        start: index of the answer's first token.
    """

    def __init__(self, stop: Stop, tokenizer: Any, start: int) -> None:
        self._stop, self._tokenizer, self._start = stop, tokenizer, start

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        ended = self._stop.asked
        if self._tokenizer is not None:
            ended |= "\n" in self._tokenizer.decode(input_ids[0, self._start :]).lstrip()
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)


class _Streamer(TextStreamer):
    """Passes an answer on, piece by piece, without the white space before it."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write, self._begun = write, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self._begun else text.lstrip()
        if text:
            self._begun = True
            self._write(text)


def text_of(file: str) -> str:
    """Returns a file's text, without white space around it.

    Raises:
        InPlaceTTTError: if it cannot be read or is empty.
    """
    if file == "-":
        raise InPlaceTTTError("- is standard input, from which the chat reads its turns; give a file.")
    if not (text := read_text(file, "the file ").strip()):
        raise InPlaceTTTError(f"{file} holds no text; give something to read.")
    return text
