"""JSON in files."""

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
"""Levels of nesting; more make readers and writers run out of stack."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError with one line for whatever is none, is nested too deep or
    holds no proper Unicode."""
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
    """Refuse half a surrogate pair, which no file can be written with."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair, which is no Unicode text") from None


def read_json(path: Path, problem: str) -> dict[str, Any]:
    """The JSON object in a file. problem: what the reader wanted, at the head of every refusal."""
    require_regular(path, problem)
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise InPlaceTTTError(f"{problem}: there is no {path}.") from None
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(f"{problem}: {path} cannot be read ({one_line(error)}).") from None
    if not isinstance(values, dict):
        raise InPlaceTTTError(f"{problem}: {path} is not a JSON object.")
    return values


def json_text(values: Mapping[str, Any], indent: int | None = None, **options: Any) -> str:
    """Strict JSON: a number that is not finite is null."""
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
