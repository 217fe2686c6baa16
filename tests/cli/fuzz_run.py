"""One command in this process, watched: what it printed, to the last byte of its file descriptors, and what
it left."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from inplace_ttt import cli

SECONDS = 60
COMPILED = "Ignored unknown kwarg option"
"""What tokenizers' compiled code prints past Python's streams."""


@dataclass(frozen=True)
class Outcome:
    code: int | None
    out: str
    err: str
    escaped: str
    left: tuple[str, ...]

    def problem(self, arguments: list[str]) -> str | None:
        """What is wrong with an answer to bad input, or None."""
        if self.escaped:
            return f"escaped: {self.escaped}"
        verb = next(a for a in arguments if a in cli.VERBS)
        if self.code == 0 or (self.code == 1 and verb == "audit" and "Traceback" not in self.err):
            return None
        if self.code != 2:
            return f"exit code {self.code}: {self.err[-300:]}"
        if self.left:
            return f"left behind: {', '.join(self.left)}"
        own = "".join(line for line in self.err.splitlines(keepends=True) if not line.startswith(COMPILED))
        if not own.startswith(f"inplace-ttt {verb}: ") or own.count("\n") != 1 or not own.endswith("\n"):
            return f"not one line: {self.err[:600]!r}"
        if cli.TRACEBACK in self.err:
            return f"the net: {self.err}"
        if "--json" in arguments:
            try:
                return None if json.loads(self.out)["error"] else "no error in the JSON"
            except (ValueError, KeyError, TypeError):
                return f"no JSON: {self.out[:200]!r}"
        return f"stdout: {self.out[:200]!r}" if self.out else None


class Hangs(BaseException):
    """Taken too long."""


def _alarm(*_: Any) -> None:
    raise Hangs


def _text(file: Any, errors: str) -> TextIO:
    return open(os.dup(file.fileno()), "w", encoding="utf-8", errors=errors)


@contextmanager
def _redirected(number: int, to: Any) -> Iterator[None]:
    kept = os.dup(number)
    os.dup2(to.fileno(), number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def run(arguments: list[str], folder: Path, typed: str | None = None) -> Outcome:
    """Run a command whose output is `folder`/out; typed: lines on standard input."""
    before = set(os.listdir(folder))
    escaped, code = "", None
    old = signal.signal(signal.SIGALRM, _alarm)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin, stdout, stderr = sys.stdin, sys.stdout, sys.stderr
        if typed is not None:
            sys.stdin = io.StringIO(typed)
        sys.stdout, sys.stderr = _text(out, "strict"), _text(err, "backslashreplace")
        signal.alarm(SECONDS)
        try:
            with _redirected(1, out), _redirected(2, err):
                code = cli.main(arguments)
        except SystemExit as stop:
            escaped = f"SystemExit {stop.code}"
        except BaseException as error:
            escaped = "".join(traceback.format_exception(error)[-4:])
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, old)
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.close()
                except BaseException as error:
                    escaped += repr(error)
            sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    left = tuple(sorted(set(os.listdir(folder)) - before)) if code != 0 else ()
    return Outcome(code, texts[0], texts[1], escaped, left)
