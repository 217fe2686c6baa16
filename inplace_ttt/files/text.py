"""Reads UTF-8 text files, and converts texts to token ids."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from typing import Any, BinaryIO

from ..errors import InPlaceTTTError, one_line, reported
from .paths import kind_of

_PIECE = 1 << 20
UTF8 = "utf-8-sig"
"""Drops the byte order mark that some editors put first, since it is not part of the text."""
KNOWN_IDS = "inplace_ttt_known_ids"
"""Attribute of a tokenizer with special tokens beyond its model's embeddings.

Its value is the number of ids that have an embedding.
"""


def document_ids(tokenizer: Any, text: str, source: str) -> list[int]:
    """Returns the token ids of a document, with the tokenizer's special tokens.

    Args:
        tokenizer: the model's tokenizer.
        text: the document's text.
        source: the document's name, for the message.

    Raises:
        InPlaceTTTError: if the tokenizer cannot read the text, or the text holds a token without an
            embedding.
    """
    with reported(f"the tokenizer cannot read {source}"):
        ids = tokenizer(text, truncation=False, verbose=False).input_ids
    return refuse_beyond(with_one_beginning(ids, begins_of(tokenizer)), tokenizer, source)


def with_one_beginning(ids: list[int], begins: list[int]) -> list[int]:
    """Returns ids with a single BOS, also if the text itself begins with one.

    Args:
        ids: token ids of a text.
        begins: the tokenizer's ids before every text.
    """
    while begins and ids[: 2 * len(begins)] == begins * 2:
        ids = ids[len(begins) :]
    return ids


def refuse_beyond(ids: list[int], tokenizer: Any, source: str) -> list[int]:
    """Returns the ids. Raises InPlaceTTTError if one is a special token beyond the model's embeddings.

    Args:
        ids: token ids.
        tokenizer: checked by `require_known_ids`, which records the number of embeddings.
        source: the text's name, for the message.
    """
    known = getattr(tokenizer, KNOWN_IDS, None)
    if known is not None and ids and (largest := max(ids)) >= known:
        raise InPlaceTTTError(
            f"{source} holds {tokenizer.convert_ids_to_tokens(largest)!r} (id {largest}), for which the "
            "model lacks an embedding (it has "
            f"{known}); remove it from the text, or use the model's own tokenizer."
        )
    return ids


def begins_of(tokenizer: Any) -> list[int]:
    """Finds the special tokens that a tokenizer puts before every text, such as a BOS.

    Args:
        tokenizer: a tokenizer of transformers.

    Returns:
        Their ids, to be put before each part of a document that is cut.

    Examples:
        >>> from tokenizers import Tokenizer, models, processors
        >>> from transformers import PreTrainedTokenizerFast
        >>> from inplace_ttt.files.text import begins_of
        >>> words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
        >>> words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        >>> begins_of(PreTrainedTokenizerFast(tokenizer_object=words))
        [0]
    """
    text = "a"
    ids, within = tokenizer(text, verbose=False).input_ids, ids_within(tokenizer, text)
    return ids[
        : next((n for n in range(len(ids) - len(within) + 1) if ids[n : n + len(within)] == within), 0)
    ]


def ids_within(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a part of a text, without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def require_known_ids(tokenizer: Any, model: Any, source: str) -> None:
    """Raises InPlaceTTTError for a tokenizer with ids beyond the model's embeddings.

    Special tokens may lie beyond the embeddings; `refuse_beyond` then raises if a text holds one.

    Args:
        tokenizer: the tokenizer to check.
        model: the model to check it against.
        source: the tokenizer's name, for the message.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    numbers = set(tokenizer.get_vocab().values())
    largest = max(numbers - special, default=0)
    if largest >= (known := model.get_input_embeddings().num_embeddings):
        raise InPlaceTTTError(
            f"{source} has the tokenizer of another model: it gives ids up to {largest}, but the model has "
            f"{known} embeddings."
        )
    if max(numbers, default=0) >= known:
        setattr(tokenizer, KNOWN_IDS, known)


def read_text(path: str | os.PathLike[str], what: str = "") -> str:
    """Returns the contents of a UTF-8 text file.

    Args:
        path: the file; "-" is standard input.
        what: name of the text in the message, with a space after it.

    Raises:
        InPlaceTTTError: if it cannot be read.
    """
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read().decode(UTF8) if hasattr(sys.stdin, "buffer") else sys.stdin.read()
        with _opened(path, pipe=True) as file:
            return file.read().decode(UTF8)
    except (OSError, ValueError, AttributeError) as error:  # standard input may be closed or None
        raise InPlaceTTTError(
            f"cannot read {what}{path}: {one_line(error)}; give a UTF-8 text file."
        ) from None


def start_of(path: str | os.PathLike[str], size: int) -> tuple[str, bool]:
    """Returns the text of a file's first `size` bytes, and True if the file holds no more.

    Raises:
        InPlaceTTTError: if the file cannot be read.
    """
    try:
        with _opened(path) as file:
            pieces = []
            while size > 0 and (piece := file.read(min(size, _PIECE))):
                pieces.append(piece)
                size -= len(piece)
            whole = not file.read(1)
        return codecs.getincrementaldecoder(UTF8)().decode(b"".join(pieces), final=whole), whole
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(
            f"cannot read the text {path}: {one_line(error)}; give a UTF-8 text file."
        ) from None


def _opened(path: str | os.PathLike[str], *, pipe: bool = False) -> BinaryIO:
    """Opens a file for reading.

    Devices and named pipes are refused, because a device may never end and a pipe never begin. With `pipe`, a
    pipe from a running process such as bash's <(…) is allowed.
    """
    mode = os.stat(path).st_mode
    from_process = pipe and stat.S_ISFIFO(mode) and os.path.realpath(path).startswith("/proc/")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or from_process):
        raise ValueError(f"it is {kind_of(mode)}")
    return open(path, "rb")
