"""What a command says beside its result: warnings wait until its input has proved good, so that bad input
gives one line alone."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from logging.handlers import MemoryHandler
from typing import TextIO


class _Waiting(MemoryHandler):
    """Records of every library, kept until `say_now` or the end; dropped where the command is refused."""

    def __init__(self) -> None:
        super().__init__(
            capacity=sys.maxsize, flushLevel=sys.maxsize, target=logging.StreamHandler(), flushOnClose=False
        )


@contextmanager
def waiting() -> Iterator[None]:
    """Within it warnings wait; at its end, unless by an error, they are said."""
    from transformers import logging as transformers_logging

    handler, root = _Waiting(), logging.getLogger()
    bars = transformers_logging.is_progress_bar_enabled() and (sys.stderr is None or not sys.stderr.isatty())
    root.addHandler(handler)
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    logging.captureWarnings(True)
    if bars:  # as our own: only where somebody watches
        transformers_logging.disable_progress_bar()
    try:
        yield
        handler.flush()
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        logging.captureWarnings(False)
        transformers_logging.disable_propagation()
        transformers_logging.enable_default_handler()
        root.removeHandler(handler)
        handler.close()


@contextmanager
def stdout_for_the_result() -> Iterator[None]:
    """Redirects everything that libraries, their compiled code and subprocesses print on stdout to stderr."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def say_now() -> None:
    """The input is good: say what waited, and from here on everything at once."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Waiting):
            handler.flush()
            handler.flushLevel = logging.NOTSET


def warn(message: str) -> None:
    logging.getLogger("inplace_ttt").warning("warning: %s", message)


def say(text: str, stream: TextIO | None) -> None:
    """A line, whatever the stream can spell; OSError where it is closed or full."""
    if stream is not None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(f"{text.encode(encoding, 'backslashreplace').decode(encoding)}\n")
        stream.flush()


def refuse(arguments: Sequence[str], verb: str | None, message: str, code: int) -> int:
    """One line on stderr, and with --json an object on stdout; gives the exit code."""
    line = " ".join(message.split())
    with suppress(OSError, ValueError):
        say(f"inplace-ttt{f' {verb}' if verb else ''}: {line}", sys.stderr)
    if any(len(a) > 2 and "--json".startswith(a) for a in arguments):
        with suppress(OSError, ValueError):
            say(json.dumps({"error": line, "exit_code": code}), sys.stdout)
    return code
