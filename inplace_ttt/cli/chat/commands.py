"""The loop of a chat: a line is a question or a command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TextIO

from ...errors import InPlaceTTTError, shown
from .conversation import Conversation, HalfwayError, text_of
from .server import ServerConversation
from .terminal import Bar, Stop, note, stoppable

HELP = {
    "/read": ("FILE", "read a UTF-8 text; the next question is about it"),
    "/forget": ("", "start a new session: drop the KV cache and the fast weights"),
    "/drop": ("", "drop the KV cache, keep the fast weights"),
    "/save": ("[FILE]", "save the session; FILE becomes its file"),
    "/fork": ("FILE", "save a copy of the session, and continue in the current file"),
    "/off": ("", "read and answer without the fast weights, in a copy of the session"),
    "/on": ("", "use the fast weights again, in the session as it was before /off"),
    "/info": ("", "print the session's sizes"),
    "/help": ("", "print this list"),
    "/quit": ("", "end the chat, as Ctrl-D does; Ctrl-C stops an answer"),
}
"""Command -> its argument and its effect."""


class Chat:
    """A chat over a conversation.

    Args:
        conversation: the conversation to continue, in this process or on a server.
        stdout: stream to print the answers to. If None, they are only collected in `answers`.

    Attributes:
        answers: questions and answers so far.
    """

    def __init__(self, conversation: Conversation | ServerConversation, stdout: TextIO | None) -> None:
        self.conversation = conversation
        self.answers: list[dict[str, str]] = []
        self._stdout = stdout
        self._commands: dict[str, Callable[[str, Stop], None]] = {
            "/read": lambda file, stop: self.read(os.path.expanduser(file), None, stop),
            "/forget": self._forget,
            "/drop": self._drop,
            "/save": self._save,
            "/fork": self._fork,
            "/off": lambda *_: self._switch(False),
            "/on": lambda *_: self._switch(True),
            "/info": lambda *_: note(self.conversation.info()),
            "/help": lambda *_: self._help(),
        }

    def run(self, lines: Iterable[str]) -> None:
        """Executes lines until they end or one is /quit, then saves the session.

        A refused request prints the reason, and the chat goes on.

        Raises:
            HalfwayError: if the model fails while it answers.
            InPlaceTTTError: if the session cannot be saved at the end.
        """
        for line in lines:
            if line.split() == ["/quit"]:
                break
            if line.strip():
                with stoppable() as stop:
                    self._follow(line, stop)
        with stoppable():
            if self.conversation.file and not self.conversation.is_saved:
                self.conversation.save()

    def read(self, file: str, text: str | None, stop: Stop) -> None:
        """Reads a file into the session.

        Args:
            file: its path.
            text: its text, if it is read already.
            stop: ends the reading when Ctrl-C sets it.
        """
        text = text_of(file) if text is None else text
        written = self.conversation.chunks_written
        with Bar(file) as bar:
            read = self.conversation.read(text, file, stop, bar.advance)
        written = self.conversation.chunks_written - written
        stopped = "stopped: " if stop.asked else ""
        note(f"{stopped}read {read:,} tokens of {file}, wrote {written:,} chunks into the fast weights")
        self._took_a_turn()

    def _follow(self, line: str, stop: Stop) -> None:
        """Executes a line: a command or a question."""
        try:
            if not line.startswith("/"):
                return self._ask(line.strip(), stop)
            name, _, argument = line.strip().partition(" ")
            argument = argument.strip()
            if name not in HELP:
                raise InPlaceTTTError(
                    f"{shown(name)} is not a command; see /help, or begin a question with a space."
                )
            wanted = HELP[name][0]
            if argument and not wanted:
                raise InPlaceTTTError(f"{name} does not take an argument; give {name} alone.")
            if wanted == "FILE" and not argument:
                raise InPlaceTTTError(f"{name} needs a file; give {name} FILE.")
            self._commands[name](argument, stop)
        except HalfwayError:
            raise
        except InPlaceTTTError as error:
            note(str(error))

    def _ask(self, question: str, stop: Stop) -> None:
        printed = Printed(self._stdout, stop)
        answer = self.conversation.answer(question, stop, printed.write)
        printed.end()
        self.answers.append({"question": question, "answer": answer})
        self._took_a_turn()

    def _forget(self, *_: object) -> None:
        self.conversation.forget()
        note("this is a new session")
        self._changed()

    def _drop(self, *_: object) -> None:
        self.conversation.drop()
        note("the KV cache is empty, and the fast weights are kept")
        self._changed()

    def _save(self, file: str, stop: Stop) -> None:
        self.conversation.save(os.path.expanduser(file) or None)
        note(f"saved to {self.conversation.file}" if self.conversation.file else "saved")

    def _fork(self, file: str, stop: Stop) -> None:
        self.conversation.fork(os.path.expanduser(file))
        note(f"saved a copy to {file}")

    def _switch(self, on: bool) -> None:
        self.conversation.switch(on)
        note(
            "TTT is on; the session is as it was before /off"
            if on
            else "TTT is off; turns until /on do not become part of the session"
        )

    def _help(self) -> None:
        for name, (argument, effect) in HELP.items():
            note(f"{f'{name} {argument}':14}{effect}")

    def _took_a_turn(self) -> None:
        if self.conversation.is_on:
            self._changed()

    def _changed(self) -> None:
        """Saves the session after a change, if it has a file."""
        self.conversation.is_saved = False
        if self.conversation.file:
            self.conversation.save()


class Printed:
    """Prints an answer while it is generated.

    Args:
        stdout: stream to print to; None prints nothing.
        stop: is set if the stream refuses a piece, which ends the answer.
    """

    def __init__(self, stdout: TextIO | None, stop: Stop) -> None:
        self._stdout, self._stop = stdout, stop
        self._error: OSError | None = None
        self._last = ""

    def write(self, text: str) -> None:
        """Prints a piece."""
        if self._stdout is None or self._error is not None:
            return
        self._last = text
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except OSError as error:
            self._error, self._stop.asked = error, True

    def end(self) -> None:
        """Ends the answer's last line.

        Raises:
            BrokenPipeError: if the reader of stdout is gone.
            HalfwayError: if stdout refused a piece.
        """
        if not self._last.endswith("\n"):
            self.write("\n")
        if isinstance(self._error, BrokenPipeError):
            raise self._error
        if self._error is not None:
            raise HalfwayError(f"cannot write the answer to standard output: {self._error.strerror}.")
