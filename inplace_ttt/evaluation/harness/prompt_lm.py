"""A model for lm-eval that reads long prompts as in normal use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ...errors import InPlaceTTTError, errors_only
from ...families import CACHE
from ...session.prompt import write_prompt
from ...surgery import config_of, is_converted
from ..prompt import Prompter

_logger = logging.getLogger(__name__)
_PREFILL = 1024
"""Largest number of prompt tokens per forward pass, so that a long prompt fits on the device."""


class PromptLM(HFLM):
    """A converted model or its base, for lm-evaluation-harness.

    It differs from lm-eval's `HFLM` in four points:

    - A long prompt is read in pieces.
    - A model with `prompt_write` writes its prompt before it answers.
    - Settings for chatting in the checkpoint, such as penalties, are ignored.
    - A prompt is tokenized with the tokenizer's first tokens and without its last ones.

    Args:
        model: the model, on its device.
        prompter: tokenizes prompts.
        batch_size: prompts per batch.

    Attributes:
        longest: prompt and answer may have this many tokens, even if that exceeds the model's positions.
        answered: called with the number of prompts after each batch of answers.

    Raises:
        InPlaceTTTError: if the tokenizer lacks an end-of-text token.
    """

    def __init__(self, model: PreTrainedModel, prompter: Prompter, batch_size: int = 1) -> None:
        if prompter.tokenizer.eos_token_id is None:
            raise InPlaceTTTError(
                "the tokenizer lacks an end-of-text token, which lm-eval needs; set eos_token in its "
                "tokenizer_config.json."
            )
        self.prompter, self.longest = prompter, 0
        self.answered: Callable[[int], Any] = lambda prompts: None
        with errors_only("lm_eval.models.huggingface"):  # it warns that the model is already loaded
            super().__init__(
                pretrained=model, backend="causal", tokenizer=prompter.tokenizer, batch_size=batch_size
            )

    @property
    def max_length(self) -> int:
        return max(super().max_length, self.longest)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        return super().generate_until(requests, disable_tqdm=True)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Returns token ids and mask [B, T] of prompts, padded on the left."""
        rows = [self.prompter.ids(text) for text in strings]
        if left_truncate_len and (cut := max(map(len, rows)) - left_truncate_len) > 0:
            _logger.warning(
                "warning: a prompt is longer than the model's context; its first %d tokens are cut off.", cut
            )
            rows = [row[-left_truncate_len:] for row in rows]
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        """Returns prompts with their answers [B, T + new]."""
        width = context.shape[1]
        # with `prompt_write`, generate reads one token, which needs no pieces
        writes = is_converted(self.model) and config_of(self.model).prompt_write is not None
        # equal pieces: a last piece of one token would count as generated
        pieces = None if writes else -(-width // -(-width // _PREFILL))
        ends = ends_of(self.model, self.tokenizer)
        with torch.no_grad(), _generating(self.model, ends, self.tokenizer.pad_token_id, pieces):
            if writes:
                kwargs[CACHE] = _written(self.model, context, kwargs["attention_mask"])
            answers = super()._model_generate(context, max_length, stop, **kwargs)
        self.answered(len(context))
        return answers


def ends_of(model: PreTrainedModel, tokenizer: Any) -> int | list[int] | None:
    """Returns the token ids that end an answer."""
    own = model.generation_config
    return tokenizer.eos_token_id if own is None or own.eos_token_id is None else own.eos_token_id


@contextmanager
def _generating(model: PreTrainedModel, ends: Any, pad: int, pieces: int | None) -> Iterator[None]:
    """Replaces the checkpoint's settings for generation inside the block."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=ends,
        pad_token_id=pad,
        prefill_chunk_size=pieces,
    )
    try:
        yield
    finally:
        model.generation_config = kept


def _written(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> DynamicCache:
    """Returns a cache that has read the prompts up to their last token, with the prompts written.

    With TTT off, nothing is written.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    cache.activate_past_recording()
    model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=1)
    write_prompt(model, cache)
    return cache
