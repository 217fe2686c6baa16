"""Reads lines from standard input, prints notes on standard error, and handles Ctrl-C.

The streams may be a terminal or pipes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from ...errors import InPlaceTTTError, one_line
from ...files.text import UTF8

console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Prints a line on stderr."""
    console.print(text, style="dim")


def lines() -> Iterator[str]:
    """Yields the lines of standard input, with a prompt on a terminal.

    Raises:
        InPlaceTTTError: if standard input cannot be read.
    """
    while True:
        try:
            line = _line()
        except EOFError:
            return
        except UnicodeDecodeError:
            note("this line is not UTF-8 text, and is left out; send it as UTF-8.")
            continue
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            note("\n/quit or Ctrl-D ends the chat.")
            continue
        except (OSError, ValueError, AttributeError) as error:  # it may be closed or None
            raise InPlaceTTTError(
                f"cannot read standard input: {one_line(error)}; give it a terminal, or lines of text."
            ) from None
        yield line


def _line() -> str:
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - adds line editing and history
        # Python edits lines only on descriptors 0 and 1, but the caller has redirected 1 to stderr
        with redirect_stdout(sys.__stdout__):
            return input("> ")
    line: Any = getattr(sys.stdin, "buffer", sys.stdin).readline()
    if not line:
        raise EOFError
    return line.decode(UTF8) if isinstance(line, bytes) else line


class Stop:
    """A request to stop the current turn, made with Ctrl-C.

    Attributes:
        asked: True once Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Turns Ctrl-C inside the block into a request, so that the turn can end in a consistent state.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    stop = Stop()

    def ask(*_: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Bar:
    """A progress bar, shown on a terminal while a file is read.

    Args:
        name: name of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._progress = Progress(
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def advance(self, read: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(f"reading {self._name}", total=total)
        self._progress.update(self._task, completed=read)
