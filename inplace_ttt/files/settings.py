"""YAML into dataclasses: every value checked against its type, every error with its line and key."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import InPlaceTTTError

T = TypeVar("T")


class WrongSetting(ValueError):
    """A setting that cannot be: its key within the section, and what is wrong with it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def require(holds: bool, key: str, message: str) -> None:
    if not holds:
        raise WrongSetting(key, message)


def at_least(least: int, settings: Any, *names: str) -> None:
    """Each of these numbers that is given."""
    for name in names:
        require((value := getattr(settings, name)) is None or value >= least, name, f"must be at least {least}")


def read_settings(cls: type[T], file: Path, overrides: Sequence[str] = (), **internal: Any) -> T:
    """A dataclass from a YAML file and `a.b=value` overrides; `internal` fills fields marked so. Raises InPlaceTTTError."""
    import yaml

    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise InPlaceTTTError(f"cannot read {file}: {error.strerror}; give the path of a YAML file.") from None
    except UnicodeDecodeError:
        raise InPlaceTTTError(f"{file} is not UTF-8 text; give the path of a YAML file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise InPlaceTTTError(f"{file}{where} is not YAML: {getattr(error, 'problem', None) or error}.") from None
    if not isinstance(root, yaml.MappingNode):
        raise InPlaceTTTError(f"{file} is not a table of settings.")
    lines: dict[tuple[str, ...], int] = {}
    values = _plain(root, (), lines, str(file))
    for text in overrides:
        override(values, text, lines)
    return _build(cls, values, (), _Source(str(file), lines), **internal)


@dataclass(frozen=True)
class _Source:
    """Where values came from: the file, and the line of each key path (0 for --set)."""

    name: str
    lines: Mapping[tuple[str, ...], int]

    def error(self, keys: tuple[str, ...], message: str) -> InPlaceTTTError:
        known = keys
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        where = f"{self.name}" if line is None else f"{self.name} line {line}" if line else "--set"
        return InPlaceTTTError(f"{where}, {'.'.join(keys) or 'the file'}: {message}.")


def _plain(node: Any, keys: tuple[str, ...], lines: dict[tuple[str, ...], int], name: str) -> Any:
    """A YAML node as plain values, noting the line of every key."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        table: dict[str, Any] = {}
        for key, value in node.value:
            below = (*keys, str(key.value))
            if key.value in table:
                raise InPlaceTTTError(f"{name} line {key.start_mark.line + 1}, {'.'.join(below)}: the key stands there twice; remove one.")
            lines[below] = key.start_mark.line + 1
            table[str(key.value)] = _plain(value, below, lines, name)
        return table
    if isinstance(node, yaml.SequenceNode):
        return [_plain(value, (*keys, str(i)), lines, name) for i, value in enumerate(node.value)]
    value = yaml.SafeLoader("").construct_object(node)
    return _number(value) if node.style is None else value  # what is in quotes is text


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text; here it is a number."""
    if isinstance(value, str) and value[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def override(values: dict[str, Any], text: str, lines: dict[tuple[str, ...], int] | None = None) -> None:
    """Put the value of `a.b=value` into nested tables, and note 0 as the line of its path. Raises InPlaceTTTError."""
    import yaml

    path, equals, value = text.partition("=")
    keys = tuple(path.split("."))
    if not equals or not all(keys):
        raise InPlaceTTTError(f"--set {text}: write it as section.key=value.")
    table = values
    for key in keys[:-1]:
        if table.get(key) is None:
            table[key] = {}
        table = table[key]
        if not isinstance(table, dict):
            raise InPlaceTTTError(f"--set {text}: {key} is not a section.")
    try:
        table[keys[-1]] = _number(yaml.safe_load(value))
    except yaml.YAMLError:
        raise InPlaceTTTError(f"--set {text}: {value!r} is not a YAML value.") from None
    if lines is not None:
        for depth in range(1, len(keys) + 1):
            lines.setdefault(keys[:depth], 0)
        lines[keys] = 0


def _build(cls: Any, values: Any, keys: tuple[str, ...], source: _Source, **internal: Any) -> Any:
    """A dataclass from plain values, each checked against its type. A class of presets fills in the rest from the one named `preset`."""
    if not isinstance(values, Mapping):
        raise source.error(keys, f"must be a table of settings, got {values!r}")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("internal")}
    presets = {"preset": str} if hasattr(cls, "preset") else {}
    for key in values:
        if key not in (*fields, *presets):
            raise source.error((*keys, key), f"there is no such setting; known here: {', '.join((*presets, *fields))}")
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise source.error((*keys, name), "this setting is missing")
    built = {name: _value((hints | presets)[name], value, (*keys, name), source) for name, value in values.items()}
    try:
        rest = vars(cls.preset(built.pop("preset"))) if presets and "preset" in built else {}
        return cls(**{**rest, **built, **internal})
    except WrongSetting as error:
        raise source.error((*keys, error.key), str(error)) from None
    except InPlaceTTTError as error:
        raise source.error(keys, str(error).rstrip(".")) from None


def _value(hint: Any, value: Any, keys: tuple[str, ...], source: _Source) -> Any:
    """The value as its type wants it; an integer passes for a float, a round float for an integer, one item for a list."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        tables = [option for option in options if dataclasses.is_dataclass(option)]
        if tables and isinstance(value, Mapping):
            return _value(tables[0], value, keys, source)
        for option in options:
            if option is not type(None):
                try:
                    return _value(option, value, keys, source)
                except InPlaceTTTError:
                    continue
        raise source.error(keys, f"must be {_describe(hint)}, got {value!r}")
    if dataclasses.is_dataclass(hint):
        return _build(hint, {} if value is None else value, keys, source)
    if origin in (list, tuple):
        items = value if isinstance(value, (list, tuple)) else [value]
        return origin(_value(get_args(hint)[0], item, (*keys, str(i)), source) for i, item in enumerate(items))
    if origin is Literal:
        if value in get_args(hint):
            return value
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if value == value and abs(value) != float("inf"):
            return float(value)
    elif hint is int and isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    elif hint in (bool, str) and isinstance(value, hint):
        return value
    raise source.error(keys, f"must be {_describe(hint)}, got {value!r}")


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin in (list, tuple):
        return f"a list ({_describe(get_args(hint)[0])})"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table", type(None): "nothing"}
    return names.get(origin or hint, "a table")
