"""Kinds of values on the command line: what is out of range, or no name of a file, is refused before anything
is read.

Each is a `type` of argparse. What is no number at all argparse refuses itself, by the name of the type.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from ..errors import InPlaceTTTError, shown
from ..files.paths import name_problem

MOST = 2**31 - 1
MOST_TOKENS = 10**7
"""Of one text or prompt: more than any model reads, less than what no machine holds."""


def whole(least: int | None = None, most: int = MOST) -> Callable[[str], int]:
    """A whole number in a range; without `least` any that is not beyond ±`most`, for a reader that knows
    better."""

    def parse(text: str) -> int:
        number = int(text)
        if least is not None and number < least:
            raise ArgumentTypeError(
                f"must be {f'at least {least}' if least else '0 or more'}, got {shown(number)}"
            )
        if abs(number) > most:
            raise ArgumentTypeError(f"must be at most {most:,}, got {shown(number)}")
        return number

    parse.__name__ = "int"
    return parse


def number(
    least: float = -math.inf, most: float = math.inf, *, above: float | None = None, or_zero: bool = False
) -> Callable[[str], float]:
    """A finite number in a range that a float32 holds. above: the range's open end. or_zero: 0 as well."""

    def parse(text: str) -> float:
        value = float(text)
        if above is not None and not value > above:
            raise ArgumentTypeError(f"must be above {above:g}, got {text}")
        if not (least <= value <= most) and not (or_zero and value == 0):
            zero = "0, or " if or_zero else ""
            raise ArgumentTypeError(f"must be {zero}from {least:g} to {most:g}, got {text}")
        return value

    parse.__name__ = "float"
    return parse


def refuse_without_effect(args: Namespace, **needs: tuple[str, ...]) -> None:
    """Refuse options, by their names in `args`, that were given without any of those that they belong to."""
    for option, needed in needs.items():
        given = getattr(args, option)
        if given is not None and given is not False and not any(getattr(args, other) for other in needed):
            raise InPlaceTTTError(
                f"{_flag(option)} has no effect without {' or '.join(map(_flag, needed))}; leave it out, "
                "or give both."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def seed() -> Callable[[str], int]:
    return whole(0, 2**32 - 1)


def path(text: str) -> str:
    """A name that a file or folder can have, or a hub id."""
    if (problem := name_problem(text)) is not None:
        raise ArgumentTypeError(f"{shown(text)} {problem}")
    return text


def numbers(text: str) -> list[int]:
    """Whole numbers above 0 with commas between."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(
            f"must be whole numbers with commas between, got {shown(text)}; it takes numbers such as "
            "4096,8192"
        ) from None
    if min(found) < 1 or max(found) > MOST_TOKENS:
        raise ArgumentTypeError(f"must be above 0 and at most {MOST_TOKENS:,}, got {shown(text)}")
    return found


def dtype(name: str) -> str:
    """A torch dtype that weights can have, or `auto`."""
    if name not in _DTYPES:
        raise ArgumentTypeError(f"{shown(name)} is no dtype of weights; try float32 or bfloat16")
    return name


_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64", "half", "float", "double")


def device(name: str) -> str:
    """cpu, or a GPU by its number."""
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise ArgumentTypeError(f"must be cpu or cuda, got {shown(name)}")
    return name


def add_texts(
    parser: ArgumentParser, option: str, help: str, *, several: bool = True, required: bool = True
) -> None:
    """Adds an option that names texts, and `--text-field` for those that are records (`texts.documents`)."""
    parser.add_argument(
        option,
        type=path,
        required=required,
        nargs="+" if several else None,
        metavar="TEXT",
        help=f"{help}: text files, .jsonl, .parquet, folders of one of these, or a dataset's name",
    )
    parser.add_argument(
        "--text-field", metavar="NAME", help="field of a record that holds its text (default: text)"
    )


def add_push(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--push",
        metavar="REPO",
        help="also upload OUT to the hub, a private repository NAME or OWNER/NAME; wants a token",
    )
