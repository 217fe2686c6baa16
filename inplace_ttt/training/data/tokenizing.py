"""Tokenizes the documents of records, and adds their length, number of leading special tokens, and digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InPlaceTTTError, shown
from ...files.text import KNOWN_IDS, begins_of, refuse_beyond, with_one_beginning
from ...texts.chats import CHAT, chat_text
from ...texts.json_lines import TOKENS, text_of
from .packing import lead_of

if TYPE_CHECKING:
    import numpy as np
    from datasets import Features

_CHARACTERS = 1 << 21
"""Characters per call of the tokenizer, unless one document has more.

The tokenizer needs hundreds of bytes per character.
"""


def tokenize(
    batch: Mapping[str, Sequence[Any]], column: str, tokenizer: Any, source: str
) -> dict[str, list[Any]]:
    """Tokenizes a batch of texts, or checks a batch of token ids.

    A text gets the tokenizer's own special tokens, and EOS at its end. A text of white space alone becomes an
    empty document.

    Args:
        batch: records, with the documents in `column`.
        column: `input_ids` for token ids, `messages` for chats; any other column holds texts.
        tokenizer: the model's tokenizer.
        source: name of the source, for errors.

    Returns:
        Columns input_ids (int32 arrays), length, lead (number of leading special tokens) and digest.

    Raises:
        InPlaceTTTError: if a document cannot be tokenized, or its token ids are not those of the model.
    """
    import numpy as np

    vocabulary = getattr(tokenizer, KNOWN_IDS, len(tokenizer))
    found = (
        _checked(batch[column], vocabulary, source)
        if column == TOKENS
        else _read(batch[column], column, tokenizer, source)
    )
    documents = [np.asarray(tokens, dtype=np.int32) for tokens in found]
    begins = begins_of(tokenizer)
    return {
        TOKENS: documents,
        "length": [len(d) for d in documents],
        "lead": [lead_of(d[: len(begins)].tolist(), begins) for d in documents],
        "digest": [digest_of(d) for d in documents],
    }


def _checked(documents: Sequence[Any], vocabulary: int, source: str) -> Iterator[Sequence[int]]:
    for tokens in documents:
        if not isinstance(tokens, Sequence | None) or not set(map(type, tokens or ())) <= {int}:
            raise InPlaceTTTError(
                f"the input_ids of {source} are not lists of whole numbers: {shown(tokens)}; tokenize the "
                "documents again."
            )
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            raise InPlaceTTTError(
                f"the input_ids of {source} are not this model's (ids 0 to {vocabulary - 1}): "
                f"{min(tokens)} to {max(tokens)}; "
                "tokenize the documents with this model's tokenizer."
            )
        yield tokens or ()


def _read(texts: Sequence[Any], column: str, tokenizer: Any, source: str) -> Iterator[Sequence[int]]:
    """Yields the tokens of each text, and tokenizes a few texts at a time."""
    few: list[str] = []
    begins = begins_of(tokenizer)
    for i, text in enumerate(texts):
        if column == CHAT and text is not None:
            text = chat_text(text, tokenizer, source)
        text = text_of(text, column, source, "data.text_field")
        few.append(text if text and text.strip() else "")
        if i + 1 == len(texts) or sum(map(len, few)) >= _CHARACTERS:
            for kept, read in zip(few, tokenizer(few, verbose=False)["input_ids"], strict=True):
                tokens = refuse_beyond(with_one_beginning(read, begins), tokenizer, source)
                ended = tokenizer.eos_token_id is None or tokens[-1:] == [tokenizer.eos_token_id]
                yield () if not kept else tokens if ended else [*tokens, tokenizer.eos_token_id]
            few = []


def digest_of(tokens: Sequence[int] | np.ndarray) -> str:
    """Returns a hash of the token ids."""
    import numpy as np

    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def token_features() -> Features:
    from datasets import Features, List, Value

    return Features(
        {
            "input_ids": List(Value("int32")),
            "length": Value("int64"),
            "lead": Value("int64"),
            "digest": Value("string"),
        }
    )
