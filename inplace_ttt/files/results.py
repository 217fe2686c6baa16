"""Stores results as they are computed, so that a long measurement can resume after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError
from .folders import new_file, require_writable
from .json_files import read_json


class Results:
    """JSON objects by name, in one file each. Without a folder they are kept in memory.

    Args:
        folder: folder of the files, each of which is written in one step.
        remedy: end of the message about a file with other settings.
    """

    def __init__(self, folder: str | Path | None, remedy: str = "choose another --out") -> None:
        self.folder, self.remedy = None if folder is None else Path(folder), remedy
        self.known: dict[str, dict[str, Any]] = {}
        if self.folder is not None:
            require_writable(self.folder, remedy)

    def get(self, name: str, **same: Any) -> dict[str, Any] | None:
        """Returns the result of that name, or None.

        Args:
            name: name of the result.
            same: values that the stored result must contain.

        Raises:
            InPlaceTTTError: if a value of `same`, or of a table in it, differs from the stored one, or is
                missing there.
        """
        if (
            name not in self.known
            and self.folder is not None
            and (file := self.folder / f"{name}.json").exists()
        ):
            try:
                result = read_json(file, "it holds no result")
                known = {key: result[key] for key in same}
            except (InPlaceTTTError, KeyError):
                raise InPlaceTTTError(
                    f"{file} is not a result of this command; delete it or {self.remedy}."
                ) from None
            for key, wanted in json.loads(json.dumps(same)).items():
                for difference in _differing("" if isinstance(wanted, dict) else key, known[key], wanted):
                    raise InPlaceTTTError(f"{file} was made with {difference}; {self.remedy}.")
            self.known[name] = result
        return self.known.get(name)

    def put(self, name: str, result: dict[str, Any]) -> None:
        self.known[name] = result
        if self.folder is not None:
            text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            self.folder.mkdir(parents=True, exist_ok=True)
            # `get` raised if the file is not ours
            with new_file(self.folder / f"{name}.json", ours=True, wait=True) as file:
                file.write_text(text, encoding="utf-8")


def _differing(key: str, known: Any, wanted: Any) -> Iterator[str]:
    """Yields each difference as text; the values of a table are compared one by one."""
    if isinstance(wanted, dict) and isinstance(known, dict):
        for name in {**known, **wanted}:
            yield from _differing(f"{key}.{name}" if key else name, known.get(name), wanted.get(name))
    elif known != wanted:
        yield f"{key} {known!r}, not {wanted!r}"
