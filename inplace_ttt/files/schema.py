"""Builds dataclasses from plain values, such as those of JSON and YAML files.

Every value is checked against its type.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import InPlaceTTTError, shown

T = TypeVar("T")

Keys = tuple[str, ...]
Refuse = Callable[[Keys, str], InPlaceTTTError]
"""Makes the error for a problem at a path of keys, with the file and the line."""

_LARGEST = 2**63 - 1


class WrongSetting(ValueError):
    """An invalid setting.

    Args:
        key: the setting's key within its section.
        message: the problem.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Open:
    """Mixin for a table that may hold more keys than its fields; they are ignored."""


def require(holds: bool, key: str, message: str) -> None:
    """Raises WrongSetting unless the condition is true."""
    if not holds:
        raise WrongSetting(key, message)


def at_least(least: int, settings: Any, *names: str) -> None:
    """Raises WrongSetting if one of these settings is below `least`; None passes."""
    for name in names:
        require(
            (value := getattr(settings, name)) is None or value >= least, name, f"must be at least {least}"
        )


def at_most(most: int, settings: Any, *names: str) -> None:
    """Raises WrongSetting if one of these settings is above `most`; None passes."""
    for name in names:
        require(
            (value := getattr(settings, name)) is None or value <= most, name, f"must be at most {most:,}"
        )


def from_values(cls: type[T], values: Any, where: str) -> T:
    """Builds a dataclass from the values of a file.

    Args:
        cls: the dataclass.
        values: a table of plain values.
        where: name of the file, for the message.

    Raises:
        InPlaceTTTError: if a key or value is invalid; the message has the key's path.
    """

    def refuse(keys: Keys, message: str) -> InPlaceTTTError:
        return InPlaceTTTError(f"{where}, {'.'.join(keys)}: {message}." if keys else f"{where}: {message}.")

    return build(cls, values, (), refuse)


def build(cls: Any, values: Any, keys: Keys, refuse: Refuse, **internal: Any) -> Any:
    """Builds a dataclass from a table.

    A class with presets takes the other fields from the preset named `preset`.

    Args:
        cls: the dataclass.
        values: a table of plain values.
        keys: path of the table in its file.
        refuse: makes the error.
        internal: values of the fields that are marked internal.
    """
    if not isinstance(values, Mapping):
        raise refuse(keys, f"must be a table of settings, got {shown(values)}")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("internal")}
    presets = {"preset": str} if hasattr(cls, "preset") else {}
    known = {key: value for key, value in values.items() if key in fields or key in presets}
    if len(known) < len(values) and not issubclass(cls, Open):
        key = next(key for key in values if key not in known)
        raise refuse((*keys, _short(key)), f"unknown setting; known here: {', '.join((*presets, *fields))}")
    for name, f in fields.items():
        if (
            name not in known
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ):
            raise refuse((*keys, name), "this setting is missing")
    built = {
        name: checked((hints | presets)[name], value, (*keys, name), refuse) for name, value in known.items()
    }
    try:
        preset = cls.preset(built.pop("preset")) if presets and "preset" in built else None
        rest = {} if preset is None else {name: getattr(preset, name) for name in fields}
        return cls(**{**rest, **built, **internal})
    except WrongSetting as error:
        raise refuse((*keys, error.key), str(error)) from None
    except InPlaceTTTError as error:
        raise refuse(keys, str(error).rstrip(".")) from None


def checked(hint: Any, value: Any, keys: Keys, refuse: Refuse) -> Any:
    """Returns a value converted to its type.

    An integer passes for a float, a float without a fraction for an integer, and one item for a list.

    Args:
        hint: the type.
        value: a plain value.
        keys: path of the value in its file.
        refuse: makes the error.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(hint, value, keys, refuse)
    if dataclasses.is_dataclass(hint):
        return build(hint, {} if value is None else value, keys, refuse)
    if origin in (list, tuple):
        items = value if isinstance(value, (list, tuple)) else [value]
        return origin(checked(arguments[0], item, (*keys, str(i)), refuse) for i, item in enumerate(items))
    if origin is dict and isinstance(value, dict):
        return {
            name: checked(arguments[1], held, (*keys, _short(name)), refuse) for name, held in value.items()
        }
    if origin is Literal and any(
        value is option or (type(value) is type(option) and value == option) for option in arguments
    ):
        return value
    if hint is float and (number := _number(value)) is not None:
        return number
    if hint is int and (whole := _whole(value)) is not None:
        return whole
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        if "\0" in value:
            raise refuse(keys, "has a zero byte in it")
        return value
    raise refuse(keys, f"must be {_describe(hint)}, got {shown(value)}")


def _one_of(hint: Any, value: Any, keys: Keys, refuse: Refuse) -> Any:
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    tables = [option for option in options if dataclasses.is_dataclass(option)]
    if tables and isinstance(value, Mapping):
        return checked(tables[0], value, keys, refuse)
    for option in options:
        if option is not type(None):
            try:
                return checked(option, value, keys, refuse)
            except InPlaceTTTError:
                continue
    raise refuse(keys, f"must be {_describe(hint)}, got {shown(value)}")


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) <= _LARGEST else None


def _number(value: Any) -> float | None:
    if type(value) not in (int, float) or not abs(value) < 1e300:  # the comparison is False for NaN
        return None
    return float(value)


def _short(key: Any) -> str:
    text = str(key)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin in (list, tuple):
        return f"a list ({_describe(get_args(hint)[0])})"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a table",
        type(None): "nothing",
    }
    return names.get(origin or hint, "a table")
