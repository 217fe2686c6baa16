"""Ways to damage a file, each as a strategy that gives a function from its bytes to other bytes, or that puts
something else there."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

DEEP = 3000
"""Levels of nesting that no parser of Python's follows."""

NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, 10**6, 10**9, 2**31, 2**63, 10**20, 10**400, -(10**20), 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "text", "float32", "..", "/", "/dev/null", "a" * 300, "a/" * 3000, "\ud800", "\0", "\n\n", "𝔘"),
    *([], {}, [[]], [None], [0], [1, 2], ["a"], {"a": 1}, {"": {}}, {"\ud800": 0}),
]  # fmt: skip

Damage = Callable[[Path], None]
"""What is done to a file; its path."""


def _paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, below in items for path in _paths(below, (*here, key)))]


@st.composite
def other_values(draw: st.DrawFn, values: Any) -> Any:
    """The values with one place replaced, removed, renamed or added to; at any depth."""
    paths = [path for path in _paths(values) if len(path) < 6][:400]
    path = draw(st.sampled_from(paths))
    values = json.loads(json.dumps(values))
    how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add", "wrap"]))
    nasty = draw(st.sampled_from(NASTY))
    if not path:
        return (
            nasty
            if how in ("replace", "remove", "rename")
            else {"more": nasty, **values}
            if isinstance(values, dict)
            else nasty
        )
    table = values
    for key in path[:-1]:
        table = table[key]
    held = table[path[-1]]
    if how == "replace":
        table[path[-1]] = nasty
    elif how == "wrap":
        table[path[-1]] = [held] if draw(st.booleans()) else {"a": held}
    elif how == "remove":
        del table[path[-1]]
    elif isinstance(table, dict):
        name = draw(st.sampled_from(["", "other", "\ud800", "a" * 300, "0", "no.such.thing"]))
        table[name] = table.pop(path[-1]) if how == "rename" else nasty
    return values


@st.composite
def raw_damage(draw: st.DrawFn) -> tuple[str, Damage]:
    """What can happen to the bytes of any file, or to the file."""
    how = draw(
        st.sampled_from(
            [
                "truncate",
                "empty",
                "binary",
                "flip",
                "latin",
                "bom",
                "nul",
                "repeat",
                "folder",
                "loop",
                "missing",
                "fifo",
                "device",
                "dangling",
            ]
        )
    )
    share = draw(st.floats(0, 1))
    noise = draw(st.binary(min_size=1, max_size=64))

    def damage(file: Path) -> None:
        held = file.read_bytes()
        file.unlink()
        at = min(int(share * len(held)), max(len(held) - 1, 0))
        if how == "folder":
            file.mkdir()
        elif how == "loop":
            file.symlink_to(file.name)
        elif how == "dangling":
            file.symlink_to("nowhere")
        elif how == "fifo":
            os.mkfifo(file)
        elif how == "device":
            file.symlink_to("/dev/null")
        elif how != "missing":
            file.write_bytes(
                {
                    "truncate": held[:at],
                    "empty": b"",
                    "binary": noise,
                    "flip": held[:at]
                    + bytes([(held[at] if held else 0) ^ (1 << noise[0] % 8)])
                    + held[at + 1 :],
                    "latin": "Übergrößenträger".encode("latin-1") + held,
                    "bom": b"\xef\xbb\xbf" + held,
                    "nul": held[:at] + b"\0" + held[at:],
                    "repeat": held + held,
                }[how]
            )

    return f"{how} {share:.2f} {noise!r}", damage


@st.composite
def json_damage(draw: st.DrawFn, held: str) -> tuple[str, Damage]:
    """Valid JSON that says something else; or nested beyond measure."""
    if draw(st.integers(0, 11)) == 0:
        text = draw(
            st.sampled_from(
                [
                    "[" * DEEP + "]" * DEEP,
                    '{"a":' * DEEP + "1" + "}" * DEEP,
                    "1" * 5000,
                    '"\\ud800"',
                    "NaN",
                    "null",
                ]
            )
        )
    else:
        text = json.dumps(draw(other_values(json.loads(held))), default=str)
    return text[:300], lambda file: (file.unlink(), file.write_text(text))  # type: ignore[func-returns-value,return-value]


@st.composite
def lines_damage(draw: st.DrawFn, held: str) -> tuple[str, Damage]:
    lines = held.splitlines()
    text = "\n".join([json.dumps(draw(other_values(json.loads(lines[0])))), *lines[1:]])
    return text[:200], lambda file: (file.unlink(), file.write_text(text))  # type: ignore[func-returns-value,return-value]


_OF_ALIASES = [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(9)]
YAML_TEXTS = [
    *("a: " * 2000, "[" * DEEP, "{a: " * DEEP, "&a [*a]", "a: &a {b: *a}", "? [a, b]\n: 1", "? {a: 1}\n: 2", "<<: 3", "\t", "%TAG", "!x"),
    *("--- a\n--- b", "output: !!python/object:os.system x", "output: !!binary '&&&'", "output: !!int x", "output: ="),
    *("output: 2026-13-45", "output: " + "9" * 5000, "output: 0x", "output: 1:60:99", "output: .inf", "output: \x07"),
    "\n".join(["a: &a [x,x,x,x,x,x,x,x,x]", *_OF_ALIASES]),
]  # fmt: skip


@st.composite
def yaml_damage(draw: st.DrawFn, held: str) -> tuple[str, Damage]:
    """Valid YAML that says something else, or a snippet that its readers stumble over, alone or behind the
    rest."""
    if draw(st.integers(0, 4)) == 0:
        snippet = draw(st.sampled_from(YAML_TEXTS))
        text = snippet if draw(st.booleans()) else f"{held}\n{snippet}\n"
    else:
        text = yaml.safe_dump(draw(other_values(yaml.safe_load(held))), allow_unicode=False)
    return text[-300:], lambda file: (file.unlink(), file.write_bytes(text.encode("utf-8", "surrogatepass")))  # type: ignore[func-returns-value,return-value]


@st.composite
def tensor_damage(draw: st.DrawFn, held: bytes) -> tuple[str, Damage]:
    """A safetensors file that is one, with other names, shapes, dtypes, numbers or metadata."""
    size = struct.unpack("<Q", held[:8])[0]
    header, data = json.loads(held[8 : 8 + size]), held[8 + size :]
    names = sorted(set(header) - {"__metadata__"})
    name = draw(st.sampled_from(names))
    entry = header[name]
    how = draw(
        st.sampled_from(
            ["drop", "rename", "dtype", "shape", "flat", "fill", "metadata", "header", "swap", "session"]
        )
    )
    start, stop = entry["data_offsets"]
    if how == "drop":
        header.pop(name)
        data = data[:start] + data[stop:]
        for other in set(header) - {"__metadata__"}:
            header[other]["data_offsets"] = [
                o - (stop - start) * (o >= stop) for o in header[other]["data_offsets"]
            ]
    elif how == "rename":
        header[
            draw(
                st.sampled_from(
                    [
                        "x",
                        "0",
                        "0.",
                        ".conv",
                        "1.fast.state",
                        "99.keys",
                        "-1.keys",
                        "0.conv.x",
                        "0.other",
                        "",
                        "9" * 30 + ".conv",
                    ]
                )
            )
        ] = header.pop(name)
    elif how == "dtype":
        widths = {
            "F32": ("I32", "U32"),
            "I64": ("F64", "U64"),
            "F16": ("BF16", "I16"),
            "BF16": ("F16", "I16"),
        }
        entry["dtype"] = draw(st.sampled_from([*widths.get(entry["dtype"], ("U8",)), "F99"]))
    elif how == "shape":
        entry["shape"] = list(reversed(entry["shape"]))
    elif how == "flat":
        count = 1
        for n in entry["shape"]:
            count *= n
        entry["shape"] = draw(
            st.sampled_from([[count], [1, count], [count, 1], [1, 1, 1, count], [count, 1, 1, 1]])
        )
    elif how == "fill":
        pattern = draw(
            st.sampled_from(
                [b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80"]
            )
        )
        data = data[:start] + (pattern * ((stop - start) // 4 + 1))[: stop - start] + data[stop:]
    elif how == "metadata":
        header["__metadata__"] = draw(
            st.sampled_from(
                [
                    None,
                    {},
                    {"session": "{}"},
                    {"session": "["},
                    {"format": "np"},
                    {"session": "[" * DEEP},
                    {"session": "null"},
                    3,
                ]
            )
        )
    elif how == "header":
        header = draw(other_values(header))
    elif how == "swap" and len(names) > 1:
        other = draw(st.sampled_from(names))
        header[name], header[other] = header[other], header[name]
    elif how == "session" and "session" in header.get("__metadata__", {}):
        header["__metadata__"]["session"] = json.dumps(
            draw(other_values(json.loads(header["__metadata__"]["session"]))), default=str
        )
    text = json.dumps(header, default=str).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return f"{how} {name}: {text[:200]!r}", lambda file: (
        file.unlink(),
        file.write_bytes(struct.pack("<Q", len(text)) + text + data),
    )  # type: ignore[func-returns-value,return-value]
