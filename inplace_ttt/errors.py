"""The exceptions that tell a user what is wrong, where, and what to do."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class InPlaceTTTError(ValueError):
    """Bad input or an impossible request; the message is one sentence a user can act on."""

    exit_code = 2


class NotSoError(InPlaceTTTError):
    """What was to be proved does not hold."""

    exit_code = 1


def how_to_install(extra: str) -> str:
    """Return the end of an error about a package that is not installed. The package itself is on no index
    yet."""
    return f"in a checkout of inplace-ttt, pip install -e '.[{extra}]'"


TRACEBACK = "INPLACE_TTT_TRACEBACK"
"""Environment variable: where it is set, an error's traceback is printed above its line."""


def refused_by_system(error: OSError) -> str | None:
    """One sentence for a file that the system does not let a command use; None for an error that names no
    file."""
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
    """The first line of an error of somebody else's, and the next where the first ends in a colon; its kind
    first where that tells more.

    kind: False where the sentence around it has named that already.
    """
    lines = [" ".join(line.split()) for line in _ESCAPES.sub("", str(error)).splitlines() if line.strip()]
    text = " ".join(lines[: 1 + (len(lines) > 1 and lines[0].endswith(":"))])
    if (kind and isinstance(error, (LookupError, TypeError, AttributeError, ArithmeticError))) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@contextmanager
def reported(problem: str, remedy: str = "") -> Iterator[None]:
    """Around other people's code on a user's file: whatever it raises becomes an InPlaceTTTError that says
    the problem, its reason, and the remedy. Our own errors pass as they are; so do interruptions."""
    try:
        yield
    except InPlaceTTTError:
        raise
    except BaseException as error:
        # a library in Rust gave up
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        ending = f"; {remedy}." if remedy else "."
        raise InPlaceTTTError(f"{problem}: {one_line(error).rstrip('.')}{ending}") from error


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_SHOWN.maxdict = _SHOWN.maxlist = 4
_SHOWN.maxlevel = 3


def shown(value: Any) -> str:
    """A value as a message quotes it: its repr, shortened where it is long or deep."""
    return _SHOWN.repr(value)
