"""Requests that `inplace-ttt serve` refuses, with the status and the words of each answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import inplace_ttt
from inplace_ttt import Session
from serving.http_texts import BOOKS
from serving.test_memories import after


def bad_requests(place: Path, model: PreTrainedModel) -> Iterator[tuple[str, str, Any]]:
    """Method, path, body: of all kinds."""
    complete, mine = "/v1/completions", "/v1/memories"
    fine = {"model": str(place / "ttt"), "prompt": [5, 6, 7], "max_tokens": 2}
    for name in (
        "",
        "a/b",
        "../x",
        ".hidden",
        "a" * 65,
        "ü",
        "a b",
        "a\n",
        3,
        True,
        [],
        {},
        ["a"],
        {"a": 1},
        -1,
        2.5,
    ):
        yield "POST", complete, {**fine, "memory": name}
    for freeze in (1, "yes", None, [], {}, -1):
        yield "POST", complete, {**fine, "memory": "book", "freeze": freeze}
    for ttt in ("", "OFF", 0, False, None, [], {}, -3):
        yield "POST", complete, {**fine, "ttt": ttt}
    yield "POST", complete, {**fine, "freeze": True}
    yield "POST", complete, {**fine, "memory": "book", "ttt": "off"}
    yield "POST", complete, {**fine, "memory": "nobody-s", "freeze": True}
    for several in (
        {"n": 2},
        {"n": -1},
        {"n": "2"},
        {"best_of": 3},
        {"use_beam_search": True},
        {"stop": ["a"]},
        {"stop": "a"},
    ):
        yield "POST", complete, {**fine, "memory": "book", **several}
    for prompt in ([[5], [6]], ["a", "b"], [[5, 6], "a"], []):
        yield "POST", complete, {**fine, "memory": "book", "prompt": prompt}
    for broken in (
        {"max_tokens": -1},
        {"max_tokens": "x"},
        {"prompt": [5] * 5000},
        {"prompt": [-5]},
        {"prompt": [10**9]},
        {"prompt": None},
    ):
        yield "POST", complete, {**fine, "memory": "book", **broken}
    for broken in (
        {"temperature": -1},
        {"top_p": 7},
        {"model": "no-such"},
        {"logprobs": -4},
        {"seed": "s"},
        {"min_tokens": 9},
    ):
        yield "POST", complete, {**fine, "memory": "book", **broken}
    for args in (
        {"inplace_ttt": "{}"},
        {"inplace_ttt": '{"start": "x", "salted": true}'},
        {"inplace_ttt": 1},
        [1],
        "x",
    ):
        yield "POST", complete, {**fine, "vllm_xargs": args}
        yield "POST", complete, {**fine, "memory": "book", "vllm_xargs": args}
    for body in (
        b"",
        b"{",
        b"no json",
        b"[1]",
        b'"x"',
        b"3",
        b"\xff\xfe",
        b'{"memory": "book"}',
        b'{"memory": "book",',
        b"null",
    ):
        yield "POST", complete, body
    for path in ("/v1/responses", "/v1/messages"):
        yield "POST", path, {**fine, "input": "x", "messages": [], "memory": "book"}
    for method, path in (("GET", ""), ("POST", "/save"), ("POST", "/load"), ("DELETE", ""), ("GET", "/file")):
        yield method, f"{mine}/unknown{path}", None
        yield method, f"{mine}/%2e%2e{path}", None
    for to in ({}, {"to": "book"}, {"to": "../x"}, {"to": 3}, {"to": "x", "more": 1}, [], b"{", None):
        yield "POST", f"{mine}/book/fork", to
    yield "POST", f"{mine}/unknown/fork", {"to": "x"}
    whole = (place / "fine.state").read_bytes()
    tensors = load_file(place / "fine.state")
    other = inplace_ttt.load(place / "ttt")
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    after(other, BOOKS[0]).save(place / "other.state")
    session = Session(model)
    session.read(torch.tensor([BOOKS[0]]))
    session.save(place / "session.state")
    save_file(tensors, place / "headless.state")
    files = [b"", b"x", whole[:100], whole[:-1], whole[:-9] + bytes(9), whole + b"x", bytes(1000)]
    for content in (
        *files,
        *((place / f"{name}.state").read_bytes() for name in ("other", "session", "headless")),
    ):
        yield "PUT", f"{mine}/book/file", content
        yield "PUT", f"{mine}/new/file", content
    yield "PUT", f"{mine}/.x/file", whole
