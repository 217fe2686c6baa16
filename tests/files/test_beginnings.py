"""What stands before a text and beyond a vocabulary: one BOS, and no token that the model lacks an embedding
for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import byte_level
from tokenizers.processors import TemplateProcessing
from torch import nn

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.files.text import begins_of, document_ids, require_known_ids
from inplace_ttt.texts.documents import documents_in, joined_tokens, tokens_of
from inplace_ttt.training.data.tokenizing import tokenize


def tokenizer_with_bos() -> Any:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def model_of(embeddings: int) -> Any:
    return SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(embeddings, 1))


@pytest.mark.parametrize("text", ["a text", "<s>a text", "<s><s>a text", "<s> a text", " <s>a text"])
def test_a_text_begins_once(text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with_bos()
    bos = tokenizer.bos_token_id
    (tmp_path / "a.txt").write_text(text)
    spelled = text.startswith(" ")  # there the tag stands within the text
    read = [
        document_ids(tokenizer, text, "it"),
        tokens_of(*documents_in([tmp_path / "a.txt"]), tokenizer, 50)[0].tolist(),
        joined_tokens(documents_in([tmp_path / "a.txt"]), tokenizer, 50)[0].tolist(),
        tokenize({"text": [text]}, "text", tokenizer, "it")["input_ids"][0].tolist()[:-1],
    ]
    for ids in read:
        assert ids[:2].count(bos) == 1 and ids.count(bos) == 1 + spelled
    assert begins_of(tokenizer) == [bos]


def test_without_a_bos_of_its_own_nothing_is_taken_away() -> None:
    tokenizer = byte_level()
    assert document_ids(tokenizer, "<s><s>x", "it").count(tokenizer.bos_token_id) == 2


@pytest.mark.parametrize("added", ["<image>", "<tool>", "<|end|>"])
def test_a_special_token_beyond_the_embeddings_is_refused_in_a_text(added: str, tmp_path: Path) -> None:
    """It may be in the tokenizer, as public ones have it; not in what is read."""
    tokenizer = byte_level()
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [added]})
    require_known_ids(tokenizer, model_of(known), "base")
    (tmp_path / "good.txt").write_text("a text")
    (tmp_path / "bad.txt").write_text(f"a {added} text")
    assert tokens_of(*documents_in([tmp_path / "good.txt"]), tokenizer, 50).max() < known
    tokenize({"input_ids": [[1, known - 1]]}, "input_ids", tokenizer, "rows")
    problem = rf"holds '{added.replace('|', '[|]')}' \(id {known}\), for which the model lacks an embedding"
    with pytest.raises(InPlaceTTTError, match=rf"bad\.txt {problem}"):
        tokens_of(*documents_in([tmp_path / "bad.txt"]), tokenizer, 50)
    with pytest.raises(InPlaceTTTError, match=problem):
        tokenize({"text": ["fine", f"{added}"]}, "text", tokenizer, "texts")
    with pytest.raises(InPlaceTTTError, match="input_ids of rows are not this model's"):
        tokenize({"input_ids": [[1, known]]}, "input_ids", tokenizer, "rows")


def test_a_plain_token_beyond_the_embeddings_is_another_models() -> None:
    tokenizer = byte_level()
    with pytest.raises(InPlaceTTTError, match="has the tokenizer of another model"):
        require_known_ids(tokenizer, model_of(len(tokenizer) - 1), "base")
