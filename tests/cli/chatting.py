"""Chats for tests: models that answer in words, a chat in this process, and one in a process with a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from forkserver import FORKSERVER
from transformers import AutoTokenizer

from inplace_ttt import Session, cli
from inplace_ttt.checkpoint.opened import load
from inplace_ttt.cli.chat.conversation import Conversation
from inplace_ttt.cli.chat.turns import Turns

WORDS = [f"Ġ{word}" for word in ("the", "sea", "whale", "and", "ship", "captain", "harpoon", "night")]
"""Tokens with a space before them, so that an answer of them is tokenized as it was generated."""


def save_speaking(base: Path, folder: Path, *more: str, **settings: Any) -> Path:
    """The tiny converted model, which answers in `WORDS` and the tokens `more` alone."""
    tiny.save_converted(base, folder)
    tokenizer = tiny.tokenizer()
    allowed = set(tokenizer.convert_tokens_to_ids([*WORDS, *more]))
    file = folder / "generation_config.json"
    silent = [token for token in range(len(tokenizer)) if token not in allowed]
    file.write_text(json.dumps({**json.loads(file.read_text()), "suppress_tokens": silent, **settings}))
    return folder


def without_template(model: Path) -> Path:
    (model / "chat_template.jinja").unlink()
    return model


class Chats:
    """Runs chats in this process, with lines on standard input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, *words: object, lines: tuple[str, ...] = (), code: int = 0) -> tuple[str, str]:
        """What a chat printed on stdout and on stderr."""
        text = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
        self._monkeypatch.setattr("sys.stdin", text)
        self._capsys.readouterr()
        assert cli.main(["chat", *map(str, words)]) == code
        return self._capsys.readouterr()

    def answers(self, *words: object, lines: tuple[str, ...]) -> list[str]:
        """The answers of a chat."""
        out, _ = self.run(*words, "--json", lines=lines)
        return [turn["answer"] for turn in json.loads(out)["answers"]]


class Typed:
    """A chat in a process of its own: a person at a terminal."""

    def __init__(self, *words: object) -> None:
        self.screen, other = pty.openpty()
        self.process = FORKSERVER.Process(
            target=_chat, args=(os.ttyname(other), list(map(str, words))), daemon=True
        )
        self.process.start()
        self._other = other  # open until the process has opened it too
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self.screen, line.encode())

    def wait_for(self, text: str, seconds: float = 240) -> str:
        """What came on the screen since the last call, until a text comes."""
        until = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < until, f"{text!r} does not come: {self.seen!r}"
            if select.select([self.screen], [], [], 0.2)[0]:
                self.seen += os.read(self.screen, 1 << 16).decode("utf-8", "replace")
            else:
                assert self.process.is_alive(), f"ended before {text!r}: {self.seen!r}"
        found, self.seen = self.seen.split(text, 1)
        return found + text

    def end(self) -> int | None:
        """The exit code of a process that ends by itself."""
        self.process.join(120)
        os.close(self._other)
        os.close(self.screen)
        return self.process.exitcode


def _chat(terminal: str, words: list[str]) -> None:
    os.setsid()
    screen = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(screen, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in enumerate(("r", "w", "w")))
    sys.argv[1:] = ["chat", *words]
    sys.exit(cli.main())


SHORT = ("--max-new-tokens", 5)


def session_in(file: Path, model: Path) -> Session:
    return Session.load(file, load(str(model), dtype=torch.float32).eval())


def conversation(model: Path, most: int = 5) -> Conversation:
    """A conversation in memory."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = Turns(tokenizer, None, str(model))
    return Conversation(load(str(model), dtype=torch.float32).eval(), turns, str(model), most, 0.0)
