"""Types of command-line values, for argparse.

They refuse a value that is out of range, or that cannot be a file name, before anything is read. argparse
itself refuses text that is not a number, and names the expected type.
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
"""Most tokens of a text or prompt: more than a model can read, but few enough for any machine."""


def whole(least: int | None = None, most: int = MOST) -> Callable[[str], int]:
    """Returns a parser for an integer in a range.

    Args:
        least: smallest value. If None, integers from -most to most pass, and the caller checks them.
        most: largest value.
    """

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
    """Returns a parser for a finite number.

    Args:
        least: smallest value.
        most: largest value.
        above: open lower end of the range.
        or_zero: allow 0 as well.
    """

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
    """Raises InPlaceTTTError for an option that was given without any of the options that it depends on.

    Args:
        args: the parsed arguments.
        needs: option -> options that it depends on, by their names in `args`.
    """
    for option, needed in needs.items():
        given = getattr(args, option)
        if given is not None and given is not False and not any(getattr(args, other) for other in needed):
            raise InPlaceTTTError(
                f"{flag(option)} does nothing without {' or '.join(map(flag, needed))}; leave it out, "
                "or give both."
            )


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def seed() -> Callable[[str], int]:
    return whole(0, 2**32 - 1)


def path(text: str) -> str:
    """Parses a possible name of a file or folder, or a hub id."""
    if (problem := name_problem(text)) is not None:
        raise ArgumentTypeError(f"{shown(text)} {problem}")
    return text


def numbers(text: str) -> list[int]:
    """Parses positive integers separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(
            f"must be whole numbers separated by commas, such as 4096,8192, got {shown(text)}"
        ) from None
    if min(found) < 1 or max(found) > MOST_TOKENS:
        raise ArgumentTypeError(f"must be above 0 and at most {MOST_TOKENS:,}, got {shown(text)}")
    return found


def rates(text: str) -> list[float]:
    """Parses positive learning rates separated by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(
            f"must be numbers separated by commas, such as 1,5, got {shown(text)}"
        ) from None
    if not all(0 < rate < math.inf for rate in found):
        raise ArgumentTypeError(f"must be above 0 and finite, got {shown(text)}")
    return found


def dtype(name: str) -> str:
    """Parses a torch dtype that weights can have, or `auto`."""
    if name not in _DTYPES:
        raise ArgumentTypeError(f"{shown(name)} is not a dtype of weights; use float32 or bfloat16")
    return name


_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64", "half", "float", "double")


def device(name: str) -> str:
    """Parses cpu, or a GPU by its number."""
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise ArgumentTypeError(f"must be cpu or cuda, got {shown(name)}")
    return name


def add_texts(
    parser: ArgumentParser, option: str, help: str, *, several: bool = True, required: bool = True
) -> None:
    """Adds an option for texts, and `--text-field` for texts in records (see `texts.documents`).

    Args:
        parser: the verb's parser.
        option: such as "--text".
        help: beginning of the option's help.
        several: allow more than one text.
        required: make the option mandatory.
    """
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


def add_base(parser: ArgumentParser) -> None:
    """Adds `--base`, for adapters."""
    parser.add_argument(
        "--base", type=path, metavar="PATH", help="current path of an adapter's base, if it was moved"
    )


def add_dtype(parser: ArgumentParser) -> None:
    """Adds `--dtype`, the dtype in which the model computes."""
    parser.add_argument(
        "--dtype",
        type=dtype,
        default="auto",
        metavar="DTYPE",
        help="float32, bfloat16, … (default: the checkpoint's)",
    )


def add_temperature(parser: ArgumentParser) -> None:
    """Adds `--temperature`, the temperature of sampling."""
    parser.add_argument(
        "--temperature",
        type=number(1e-4, 1e4, or_zero=True),
        default=0.0,
        metavar="FLOAT",
        help="temperature of sampling; 0 always takes the most likely token (default: 0)",
    )


def add_push(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--push",
        metavar="REPO",
        help="also upload OUT to the hub, to the private repository NAME or OWNER/NAME; needs a token",
    )
