"""Results on disk: a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...errors import InPlaceTTTError


class Results:
    """The results of cells, in a folder (None: in memory), one file each: {asked, scores, tokens, answers, predictions}."""

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.known: dict[str, dict[str, Any]] = {}
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InPlaceTTTError(f"cannot write to {folder}: {error.strerror}; choose another --out.") from None

    def get(self, name: str, asked: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a cell if there is one. Raises InPlaceTTTError when it answers another question."""
        if name not in self.known and self.folder is not None and (file := self.folder / f"{name}.json").exists():
            try:
                result = json.loads(file.read_text(encoding="utf-8"))
                known = result["asked"]
            except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
                raise InPlaceTTTError(f"{file} is not a result of this command; delete it or choose another --out.") from None
            if differing := [key for key in asked if known.get(key) != asked[key]]:
                raise InPlaceTTTError(
                    f"{file} was made with {differing[0]} {known.get(differing[0])!r}, not {asked[differing[0]]!r}; choose another --out."
                )
            self.known[name] = result
        return self.known.get(name)

    def put(self, name: str, result: dict[str, Any]) -> None:
        self.known[name] = result
        if self.folder is not None:
            partial = self.folder / f".{name}.partial"
            try:
                partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                os.replace(partial, self.folder / f"{name}.json")
            except OSError as error:
                raise InPlaceTTTError(f"cannot write to {self.folder}: {error.strerror}; what is done is kept, run again.") from None
