"""Prints the messages of a command, apart from its result.

Warnings are held back until the input has proved valid, so that bad input prints one line only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from typing import TextIO

from ..errors import TRACEBACK, one_line, refused_by_system


class _Waiting(MemoryHandler):
    """Holds the log records of all libraries until `say_now` or the end; an error drops them."""

    def __init__(self) -> None:
        super().__init__(
            capacity=sys.maxsize, flushLevel=sys.maxsize, target=logging.StreamHandler(), flushOnClose=False
        )


@contextmanager
def waiting() -> Iterator[None]:
    """Holds warnings back inside the block, and prints them at its end unless it raises."""
    from transformers import logging as transformers_logging

    handler, root = _Waiting(), logging.getLogger()
    bars = transformers_logging.is_progress_bar_enabled() and (sys.stderr is None or not sys.stderr.isatty())
    root.addHandler(handler)
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    logging.captureWarnings(True)
    if bars:  # like our own bars, shown only on a terminal
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
def stdout_for_the_result() -> Iterator[TextIO]:
    """Redirects to stderr everything that libraries, their compiled code and subprocesses print on stdout.

    Yields a stream to stdout, for a verb that prints its result while it runs.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        result = _on(stdout, sys.stdout)
        with redirect_stdout(sys.stderr):
            yield result
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _on(stdout: int, stream: TextIO) -> TextIO:
    """Returns `stream`, or one on the descriptor `stdout` if `stream` writes to descriptor 1."""
    try:
        if stream.fileno() != 1:
            return stream
    except (AttributeError, OSError, ValueError):  # None, or a stream without a descriptor
        return stream
    # unbuffered, so that a refused piece is not written again when the stream is freed
    unbuffered = open(stdout, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return TextIOWrapper(unbuffered, stream.encoding, "backslashreplace", write_through=True)


def say_now() -> None:
    """Prints the warnings held so far, and later ones immediately; called once the input has proved valid."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Waiting):
            handler.flush()
            handler.flushLevel = logging.NOTSET


def warn(message: str) -> None:
    logging.getLogger("inplace_ttt").warning("warning: %s", message)


class _Hearing(logging.Handler):
    """Collects the messages of log records."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yields a list that collects this package's warnings inside the block. They are printed too."""
    handler, logger = _Hearing(), logging.getLogger("inplace_ttt")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def say(text: str, stream: TextIO | None) -> None:
    """Prints a line; characters that the stream cannot encode are escaped.

    Raises:
        OSError: if the stream is closed or full.
    """
    if stream is not None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(f"{text.encode(encoding, 'backslashreplace').decode(encoding)}\n")
        stream.flush()


def sentence_of(error: Exception) -> str:
    """Returns one sentence about an error that was not detected where the input was read."""
    # the name, because torch's error would need an import
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            f"this machine does not have enough memory ({one_line(error)}); use a smaller model, text or "
            "batch."
        )
    if isinstance(error, OSError) and (reason := refused_by_system(error)) is not None:
        return reason
    return (
        f"unexpected {type(error).__name__}: {one_line(error)}; set {TRACEBACK}=1 to see where, and please "
        "report it."
    )


def refuse(arguments: Sequence[str], verb: str | None, message: str, code: int) -> int:
    """Prints one line on stderr, and with --json an object on stdout.

    Args:
        arguments: the command's arguments.
        verb: None if none was recognized.
        message: the error.
        code: exit code.

    Returns:
        The exit code.
    """
    line = " ".join(message.split())
    with suppress(OSError, ValueError):
        say(f"inplace-ttt{f' {verb}' if verb else ''}: {line}", sys.stderr)
    if any(len(a) > 2 and "--json".startswith(a) for a in arguments):
        with suppress(OSError, ValueError):
            say(json.dumps({"error": line, "exit_code": code}), sys.stdout)
    return code
