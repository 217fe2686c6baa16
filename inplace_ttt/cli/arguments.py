"""Kinds of values on the command line: what is out of range, or no name of a file, is refused before anything is read.

Each is a `type` of argparse. What is no number at all argparse refuses itself, by the name of the type.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable

import torch

from ..errors import InPlaceTTTError, shown
from ..files.paths import name_problem

MOST = 2**31 - 1
MOST_TOKENS = 10**7
"""Of one text or prompt: more than any model reads, less than what no machine holds."""


def whole(least: int | None = None, most: int = MOST) -> Callable[[str], int]:
    """A whole number in a range; without `least` any that is not beyond ±`most`, for a reader that knows better."""

    def parse(text: str) -> int:
        number = int(text)
        if least is not None and number < least:
            raise ArgumentTypeError(f"must be {f'at least {least}' if least else '0 or more'}, got {shown(number)}")
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
            raise InPlaceTTTError(f"{_flag(option)} has no effect without {' or '.join(map(_flag, needed))}; leave it out, or give both.")


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
            f"must be whole numbers with commas between, got {shown(text)}; it takes numbers such as 4096,8192"
        ) from None
    if min(found) < 1 or max(found) > MOST_TOKENS:
        raise ArgumentTypeError(f"must be above 0 and at most {MOST_TOKENS:,}, got {shown(text)}")
    return found


def dtype(name: str) -> str:
    """A torch dtype that weights can have, or `auto`."""
    found = getattr(torch, name, None) if name.isidentifier() else None
    if name != "auto" and not isinstance(found, torch.dtype):
        raise ArgumentTypeError(f"{shown(name)} is not a torch dtype; try float32 or bfloat16")
    if isinstance(found, torch.dtype) and not (found.is_floating_point and found.itemsize >= 2):
        raise ArgumentTypeError(f"{name} holds no weights; try float32 or bfloat16")
    return name


def device(name: str) -> str:
    """cpu, or a GPU that is here."""
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"must be cpu or cuda, got {shown(name)}")
    if (found.index or 0) >= (torch.cuda.device_count() if found.type == "cuda" else 1):
        raise ArgumentTypeError(f"{name} is not on this machine")
    return name
