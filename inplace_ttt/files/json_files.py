"""JSON objects in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError, one_line


def read_json(path: Path, problem: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InPlaceTTTError(f"{problem}: there is no {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InPlaceTTTError(f"{problem}: {path} cannot be read ({one_line(error)}).") from None
    if not isinstance(values, dict):
        raise InPlaceTTTError(f"{problem}: {path} is not a JSON object.")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
