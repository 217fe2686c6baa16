"""Write the tables of docs/recipe.md, the recipe reference, from the settings' types, defaults and docstrings.

    python tools/release/recipe_reference.py            # writes the tables
    python tools/release/recipe_reference.py --check    # exits with 1 if they are not current

A table stands between `<!-- settings: SECTION -->` and `<!-- end of settings -->`. The text around them is written by
hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pages import ROOT, main, table

from inplace_ttt.training.recipe import Recipe

PAGE = ROOT / "docs" / "recipe.md"
TABLE = re.compile(r"(?<=<!-- settings: )(?P<section>\w+) -->\n.*?(?=<!-- end of settings -->)", re.DOTALL)
NAMES = {int: "int", float: "float", str: "str", bool: "bool", dict: "table"}
YAML = {"None": "`null`", "True": "`true`", "False": "`false`"}


def page() -> str:
    """Returns the text of docs/recipe.md with current tables."""
    sections = {
        "recipe": Recipe,
        **{name: tables(hint)[0] for name, hint in get_type_hints(Recipe).items() if tables(hint)},
    }
    found: list[str] = []
    text = PAGE.read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))

    def current(match: re.Match[str]) -> str:
        found.append(name := match["section"])
        rows = settings(sections[name]) if name != "recipe" else contents(headings)
        return f"{name} -->\n{table(['setting', 'type', 'default', 'meaning'], rows)}\n"

    text = TABLE.sub(current, text)
    if sorted(found) != sorted(sections):
        raise ValueError(f"{PAGE} has tables of {found}; the sections are {list(sections)}")
    return text


def contents(headings: set[str]) -> Iterator[list[str]]:
    """Yields the rows about the whole recipe. A setting with a heading of its own is a link to it."""
    hints, meanings = get_type_hints(Recipe), described(Recipe)
    for field in dataclasses.fields(Recipe):
        if not field.metadata.get("internal"):
            name = f"[`{field.name}`](#{field.name})" if field.name in headings else f"`{field.name}`"
            yield [name, kind(hints[field.name]), default(field), meanings[field.name]]


def settings(cls: type, prefix: str = "") -> Iterator[list[str]]:
    """Yields the rows about a section, and about the tables inside it."""
    hints, meanings = get_type_hints(cls), described(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], prefix + field.name
        yield [f"`{name}`", kind(hint), default(field), meanings[field.name]]
        for inner in tables(hint):
            yield from settings(inner, f"{name}[]." if get_origin(hint) is list else f"{name}.")


def described(cls: type) -> dict[str, str]:
    """Returns the meaning of each field, from the docstring's section `Attributes` or `Args`."""
    text = inspect.getdoc(cls) or ""
    listed = re.search(r"^(?:Attributes|Args):\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", listed[1] if listed else "", re.MULTILINE)
    return {name: yaml_words(" ".join(meaning.split())) for name, meaning in found}


def yaml_words(text: str) -> str:
    return re.sub(r"\b(None|True|False)\b", lambda word: YAML[word[0]], text)


def tables(hint: Any) -> list[type]:
    """Returns the dataclasses in a type."""
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [found for argument in get_args(hint) for found in tables(argument)]


def kind(hint: Any) -> str:
    """Returns the name of a type, in YAML's words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(kind(argument) for argument in arguments if argument is not type(None))
        )
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (list, tuple):
        return f"list of {kind(arguments[0])}"
    return NAMES.get(origin or hint, "table")


def default(field: dataclasses.Field[Any]) -> str:
    """Returns a setting's default as YAML."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    return f"`{value if isinstance(value, str) else re.sub('e-0', 'e-', json.dumps(value))}`"


if __name__ == "__main__":
    sys.exit(main(__doc__.partition("\n")[0], PAGE, page))
