"""Texts as tokens."""

from pathlib import Path

import torch
from tiny import byte_level, text

from inplace_ttt.files.text import read_text
from inplace_ttt.texts.documents import documents_in, joined_tokens, tokens_of


def test_texts_read_on_into_the_next_as_one(tmp_path: Path) -> None:
    """As many tokens as are asked for, if there are as many; a text's start is marked once."""
    words = byte_level()
    words.add_bos_token = True
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for i, file in enumerate(files):
        file.write_text(text(40, seed=i))
    documents = documents_in(files)
    parts = [tokens_of(file, words, 10**6)[0] for file in documents]
    starts = parts[0][0] == words.bos_token_id
    whole = torch.cat([parts[0], *(part[1:] if starts else part for part in parts[1:])])
    for tokens in (1, len(parts[0]), len(parts[0]) + 1, len(whole), len(whole) + 9):
        assert torch.equal(joined_tokens(documents, words, tokens)[0], whole[:tokens])


def test_a_mark_at_the_start_is_no_text(tmp_path: Path) -> None:
    """Some editors write one (a BOM)."""
    words = byte_level()
    (tmp_path / "marked.txt").write_text("\ufeffthe sea\r\n", encoding="utf-8")
    (tmp_path / "plain.txt").write_text("the sea\r\n", encoding="utf-8")
    marked, plain = tmp_path / "marked.txt", tmp_path / "plain.txt"
    one, other = documents_in([marked, plain])
    assert tokens_of(one, words, 50).tolist() == tokens_of(other, words, 50).tolist()
    assert read_text(marked) == read_text(plain)
