"""Reads and writes JSON files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError, one_line
from .paths import require_regular

_DEEPEST = 100
"""Levels of nesting; deeper values make readers and writers overflow the stack."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: if the text is not JSON, nested too deep, or not valid Unicode; its message is one line.
    """
    try:
        values = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels") from None
    except ValueError as error:
        raise ValueError(one_line(error)) from None
    level = [values]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str) and not value.isascii():
                require_unicode(value)
            elif isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
        if not below:
            return values
        level = below
    raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def require_unicode(text: str) -> None:
    """Raises ValueError for half a surrogate pair, which cannot be written to a file."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair, which is not Unicode text") from None


def read_json(path: Path, problem: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Args:
        path: the file.
        problem: beginning of every error message, such as "X is not an adapter folder".

    Raises:
        InPlaceTTTError: if the file is missing or does not hold a JSON object.
    """
    require_regular(path, problem)
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise InPlaceTTTError(f"{problem}: {path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(f"{problem}: {path} cannot be read ({one_line(error)}).") from None
    if not isinstance(values, dict):
        raise InPlaceTTTError(f"{problem}: {path} is not a JSON object.")
    return values


def json_text(values: Mapping[str, Any], indent: int | None = None, **options: Any) -> str:
    """Returns strict JSON: numbers that are not finite become null."""
    try:
        return json.dumps(values, indent=indent, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(values), indent=indent, allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    Path(path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
