"""Exceptions whose messages state the problem, its place, and the remedy."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class InPlaceTTTError(ValueError):
    """Reports bad input or an impossible request.

    It is a ValueError. Its message is one sentence that names the problem and usually a remedy. The command
    line prints the message and exits with `exit_code`.

    Attributes:
        exit_code: exit status of the command line, 2.

    Examples:
        >>> from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError
        >>> try:
        ...     InPlaceTTTConfig(chunk_size=0)
        ... except InPlaceTTTError as error:
        ...     print(error)
        chunk_size must be an integer of at least 1, got 0.
    """

    exit_code = 2


class NotSoError(InPlaceTTTError):
    """Reports that a command's check failed, such as `inplace-ttt audit` on an undeclared deviation."""

    exit_code = 1


def how_to_install(extra: str) -> str:
    """Returns the end of an error message about a missing package.

    The command names a checkout, since no package index has `inplace-ttt` yet.
    """
    return f"in a checkout of inplace-ttt, pip install -e '.[{extra}]'"


TRACEBACK = "INPLACE_TTT_TRACEBACK"
"""Environment variable. If it is set, the command line also prints an error's traceback."""


def refused_by_system(error: OSError) -> str | None:
    """Returns a message about a file that the system cannot use; None if the error names no file."""
    if not isinstance(error.filename, (str, bytes)) or error.strerror is None:
        return None
    name = (
        error.filename
        if isinstance(error.filename, str)
        else error.filename.decode(errors="backslashreplace")
    )
    return f"cannot use {name}: {error.strerror}; choose a file or folder that you may read and write."


_LONGEST = 400
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def one_line(error: BaseException, *, kind: bool = True) -> str:
    """Returns a third party's error as one line of at most 400 characters.

    The result is the first line of the error's message, and the next line if the first ends in a colon. The
    error's type comes first if the message alone is hard to understand.

    Args:
        kind: False if the sentence around it already names the type.
    """
    lines = [" ".join(line.split()) for line in _ESCAPES.sub("", str(error)).splitlines() if line.strip()]
    text = " ".join(lines[: 1 + (len(lines) > 1 and lines[0].endswith(":"))])
    if (kind and isinstance(error, (LookupError, TypeError, AttributeError, ArithmeticError))) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@contextmanager
def reported(problem: str, remedy: str = "") -> Iterator[None]:
    """Turns a third party's errors into InPlaceTTTError, with the problem, the reason and the remedy.

    Use it around a library's work on a user's file. InPlaceTTTError and interruptions pass unchanged.
    """
    try:
        yield
    except InPlaceTTTError:
        raise
    except BaseException as error:
        # a panic in a library written in Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        ending = f"; {remedy}." if remedy else "."
        raise InPlaceTTTError(f"{problem}: {one_line(error).rstrip('.')}{ending}") from error


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_SHOWN.maxdict = _SHOWN.maxlist = 4
_SHOWN.maxlevel = 3


def shown(value: Any) -> str:
    """Returns a value's repr for a message, shortened if it is long or deep."""
    return _SHOWN.repr(value)


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Silences the records of a logger that are below the level ERROR."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
