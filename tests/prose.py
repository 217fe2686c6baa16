"""Counts the patterns that make a sentence need a second reading: Markdown, docstrings, comments, messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PATTERNS = {
    "headless clause": r"(?<!\bto )\bwhat(?! to\b)\b|\bwho(?:ever)?\b(?<!\w who)|\bthat which\b",
    "program that says": r"\b(?:says?|said|speaks?|spoke|knows?|knew|tells?|told|mends?|mended)\b",
    "negative definition": r"\b(?:is|are|was|were|has|have|had) no\b",
    "a for per": r"\b(?:nats?|tokens?|bytes?|KB|[KMGT]i?B|seconds?|ms|minutes?|hours?|times|once|twice|steps?|rows?|FLOPs?|products?"
    r"|chunks?|numbers?|layers?|matrix|matrices|state|states|pass|passes|launch|launches|forward|call|calls|file|files)"
    r" an? (?:token|chunk|step|second|layer|row|sequence|document|rank|device|process|head|text|word|minute|hour|day"
    r"|call|launch|block|file|matrix|state|request|slot|run|node|model|family|passage|question|fact|seed|key)\b",
    "British spelling": r"\b\w*(?:optimis|quantis|normalis|standardis|initialis|generalis|recognis|serialis|tokenis|summaris|organis"
    r"|minimis|maximis|parallelis(?!m)|materialis(?!m)|regularis|behaviour|colour|favour|neighbour|licence|centred|labelled|cancelled)\w*",
}
"""Regular expressions, without regard to case."""

OPENINGS = ("Of", "What", "By", "How", "Where", "Whether", "Which", "For who")
"""First words that a docstring must not have: no subject follows them."""

_LEAST_WORDS = 3
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def markdown(path: Path) -> list[str]:
    """Sentences of a page, without code, tables of figures, addresses and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [sentence for block in re.split(r"\n\s*\n|\n(?=[-*|#\d])", text) for sentence in _sentences(block)]


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a module, of its classes and functions, and of its constants, without examples."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield re.sub(r">>>.*?(\n\s*\n|\Z)", "", node.value.value, flags=re.S)


def comments(path: Path) -> Iterator[str]:
    """Blocks of comment lines of a module."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:|pragma)", token.string):
            if block and token.start[0] != last + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield " ".join(block)


def python(path: Path) -> list[str]:
    """Sentences of a module's docstrings and comments."""
    return _plain(*docstrings(path), *comments(path))


def yaml(path: Path) -> list[str]:
    """Sentences of a YAML file's comments, without commands: lines of a block, and those behind a value."""
    block: list[str] = []
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        before, mark, comment = line.partition("#")
        if mark and not before.strip() and not comment.startswith("   "):
            block.append(comment.strip())
            continue
        texts += [" ".join(block), comment.strip()] if mark and before.strip() else [" ".join(block)]
        block = []
    return _plain(*texts, " ".join(block))


def messages(path: Path) -> list[str]:
    """Sentences of a module's strings of three words and more: errors, warnings, findings, help of options.

    Placeholders of an f-string are X. Strings of an AttributeError are left out, since they copy Python's.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (" ".join(text.split()) for text in _strings(tree))
    return _plain(*(text for text in found if text.count(" ") >= _LEAST_WORDS - 1))


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_pythons = isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise AttributeError")
    if not is_docstring and not is_pythons:
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                yield from _strings(child)


def _plain(*texts: str) -> list[str]:
    return [sentence for text in texts for sentence in _sentences(re.sub(r"`[^`]*`", "X", text))]


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE.split(" ".join(text.split())) if sentence]


def found(sentences: list[str]) -> dict[str, list[str]]:
    """For each pattern the sentences that hold it, once per occurrence. Questions may ask what and who."""
    hits: dict[str, list[str]] = {name: [] for name in PATTERNS}
    for sentence in sentences:
        for name, pattern in PATTERNS.items():
            if name == "headless clause" and sentence.endswith("?"):
                continue
            hits[name] += [sentence] * len(re.findall(pattern, sentence, flags=re.I))
    return hits


def words(sentences: list[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)
