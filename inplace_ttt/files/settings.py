"""Builds dataclasses from YAML: values are type-checked, and errors name their line and key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InPlaceTTTError, one_line, shown
from .json_files import require_unicode
from .paths import require_regular
from .schema import Keys, build

T = TypeVar("T")

_MOST_NODES = 100_000
"""Most values in a file: a few lines of nested aliases can expand to more than fits in memory."""


def read_settings(cls: type[T], file: Path, overrides: Sequence[str] = (), **internal: Any) -> T:
    """Builds a dataclass from a YAML file and overrides.

    Args:
        cls: the dataclass.
        file: the YAML file.
        overrides: settings as `a.b=value`.
        internal: values of the fields that are marked internal.

    Raises:
        InPlaceTTTError: if the file or a setting is invalid; the message has line and key.
    """
    import yaml

    require_regular(file, "cannot read the settings")
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise InPlaceTTTError(f"{file} is not UTF-8 text; give the path of a YAML file.") from None
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(
            f"cannot read {file}: {getattr(error, 'strerror', None) or error}; give the path of a YAML file."
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise InPlaceTTTError(
            f"{file}{where} is not YAML: {getattr(error, 'problem', None) or one_line(error)}."
        ) from None
    except RecursionError:
        raise InPlaceTTTError(f"{file} is nested too deep to be a table of settings.") from None
    if not isinstance(root, yaml.MappingNode):
        raise InPlaceTTTError(f"{file} is not a table of settings.")
    reader = _Reader(str(file))
    values = reader.plain(root, ())
    for text in overrides:
        override(values, text, reader.lines)
    return build(cls, values, (), reader.refuse, **internal)


class _Reader:
    """Converts YAML nodes to plain values, and records the line of every key path (0 for --set)."""

    def __init__(self, name: str) -> None:
        self.name, self.lines = name, dict[Keys, int]()
        self._nodes = 0

    def refuse(self, keys: Keys, message: str) -> InPlaceTTTError:
        known = keys
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        where = self.name if line is None else f"{self.name} line {line}" if line else "--set"
        return InPlaceTTTError(f"{where}, {'.'.join(keys) or 'the file'}: {message}.")

    def plain(self, node: Any, keys: Keys) -> Any:
        """Returns a YAML node as plain values."""
        import yaml

        self._nodes += 1
        if self._nodes > _MOST_NODES or len(keys) > 50:
            raise InPlaceTTTError(
                f"{self.name} holds more than {_MOST_NODES:,} values or nests them too deep; replace its "
                "aliases by their values."
            )
        if isinstance(node, yaml.MappingNode):
            table: dict[str, Any] = {}
            for key, value in node.value:
                line, name = key.start_mark.line + 1, key.value
                if not isinstance(name, str):
                    raise InPlaceTTTError(f"{self.name} line {line}: the name of a setting must be text.")
                below = (*keys, name)
                if name in table:
                    raise InPlaceTTTError(
                        f"{self.name} line {line}, {'.'.join(below)}: the key appears twice; remove one."
                    )
                self.lines[below] = line
                table[name] = self.plain(value, below)
            return table
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(value, (*keys, str(i))) for i, value in enumerate(node.value)]
        try:
            value = yaml.SafeLoader("").construct_object(node)
            require_unicode(node.value)
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError):
            raise self.refuse(keys, f"{shown(node.value)} cannot be read as a value of YAML") from None
        if not isinstance(value, (str, int, float, type(None))):  # dates are read as text
            return node.value
        return _number(value, node.value) if node.style is None else value  # quoted values are text


def _number(value: Any, text: str) -> Any:
    """Reads 1e-5 as a number, 010 as 10 and 1:30 as text. YAML 1.1 reads these as text, 8 and 90."""
    if type(value) in (int, float) and ":" in text:
        return text
    if type(value) is int and text.lstrip("+-").replace("_", "").isdecimal():
        return int(text)
    if isinstance(value, str) and value[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def override(values: dict[str, Any], text: str, lines: dict[Keys, int] | None = None) -> None:
    """Puts the value of `a.b=value` into nested tables.

    Args:
        values: the tables, changed in place.
        text: the override.
        lines: line of every key path; the override's path gets 0.

    Raises:
        InPlaceTTTError: if the override is malformed.
    """
    import yaml

    path, equals, value = text.partition("=")
    keys = tuple(path.split("."))
    if not equals or not all(keys) or len(keys) > 50:
        raise InPlaceTTTError(f"--set {text}: write it as section.key=value.")
    table = values
    for key in keys[:-1]:
        if table.get(key) is None:
            table[key] = {}
        table = table[key]
        if not isinstance(table, dict):
            raise InPlaceTTTError(f"--set {text}: {key} is not a section.")
    try:
        node = yaml.compose(value, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InPlaceTTTError(f"--set {text}: {shown(value)} is not a YAML value.") from None
    table[keys[-1]] = None if node is None else _Reader(f"--set {path}").plain(node, keys)
    if lines is not None:
        for depth in range(1, len(keys) + 1):
            lines.setdefault(keys[:depth], 0)
        lines[keys] = 0
