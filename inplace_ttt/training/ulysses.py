"""Requirements of DeepSpeed's Ulysses for ranks that share rows.

Heads must divide among the ranks, each rank needs whole chunks, and attention must see the documents. Ulysses
drops the attention mask, which was made for a rank's own part. Plain sdpa then lets packed documents see each
other, and ignores sliding windows. Flash attention reads documents and windows from its arguments;
`sdpa_sees_documents` makes sdpa do so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from ..documents import document_starts
from ..errors import InPlaceTTTError
from .recipe.recipe import Recipe


def sharing_problems(recipe: Recipe, chunk_size: int, config: PreTrainedConfig | None = None) -> list[str]:
    """Returns a sentence for each obstacle to ranks that share rows.

    Args:
        recipe: the run's recipe.
        chunk_size: tokens per chunk.
        config: the model's config; without it the attention heads are not checked.
    """
    length, ranks, found = recipe.data.sequence_length, recipe.parallel.sequence_parallel_size, []
    if ranks == 1:
        return []
    if config is not None:
        heads, kv_heads = attention_heads(config)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            found.append(
                f"sequence_parallel_size {ranks} does not divide the model's {heads} attention heads and "
                f"{kv_heads} key-value heads; "
                "choose a number that divides both, or is a multiple of the latter."
            )
    if (length // ranks) % chunk_size:
        found.append(
            f"Each of {ranks} ranks gets {length // ranks} tokens, which are not whole chunks of "
            f"{chunk_size}; make "
            f"data.sequence_length a multiple of {ranks * chunk_size}."
        )
    if recipe.model.attn_implementation == "eager":
        found.append(
            "Ranks cannot share rows under eager attention; set model.attn_implementation to sdpa or "
            "flash_attention_2."
        )
    if recipe.model.attn_implementation == "flash_attention_2" and recipe.training.batch_size > 1:
        found.append(
            f"If ranks share {recipe.training.batch_size} rows at a time, flash attention would not "
            "see the documents; set training.batch_size to 1 and raise training.gradient_accumulation_steps."
        )
    return found


def check_sharing(recipe: Recipe, chunk_size: int, config: PreTrainedConfig | None = None) -> None:
    """Raises InPlaceTTTError with the first of `sharing_problems`."""
    for problem in sharing_problems(recipe, chunk_size, config):
        raise InPlaceTTTError(problem)


def attention_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns a text model's number of query heads and of key-value heads."""
    text = config.get_text_config()
    return text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def sdpa_sees_documents() -> None:
    """Replaces transformers' "sdpa" attention by a version that makes a missing mask from position_ids."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        positions, window = kwargs.get("position_ids"), kwargs.get("sliding_window")
        if (
            attention_mask is None
            and positions is not None
            and query.shape[2] == key.shape[2] == positions.shape[1] > 1
        ):
            attention_mask = document_mask(positions, window)
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register("sdpa", forward)


def ulysses_in_evaluation() -> None:
    """Lets ranks share rows in evaluation as in training.

    accelerate turns this off, for loaders that give each rank rows of its own.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    init = UlyssesSPAttentionHF.__init__

    @functools.wraps(init)
    def always(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: value for name, value in kwargs.items() if name != "disable_in_eval"})

    UlyssesSPAttentionHF.__init__ = always


def document_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """Returns the keys that each query sees, bool [B, 1, T, T].

    These are keys of its own document, not later than the query, and within the window.

    Args:
        positions: position_ids [B, T].
        window: tokens that attention sees, or None.

    Returns:
        The mask, None if causal attention suffices.
    """
    starts = document_starts(positions)
    length = positions.shape[1]
    if not starts[:, 1:].any() and (window is None or window >= length):
        return None
    document = starts.cumsum(-1)
    distance = torch.arange(length, device=positions.device)
    distance = distance[:, None] - distance[None, :]
    near = (distance >= 0) & (distance < (window or length))
    return (near & (document[:, :, None] == document[:, None, :]))[:, None]
