"""What DeepSpeed's Ulysses asks of ranks that share rows: heads and chunks that divide, and attention that
sees documents.

It drops the attention mask, since that was made for a rank's own part; plain sdpa then lets packed documents
see each other and forgets sliding windows. Flash attention reads both from its arguments;
`sdpa_sees_documents` does it for sdpa.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from ..errors import InPlaceTTTError
from ..layout import document_starts
from .recipe.recipe import Recipe


def sharing_problems(recipe: Recipe, chunk_size: int, config: PreTrainedConfig | None = None) -> list[str]:
    """A sentence for each thing that keeps a recipe's ranks from sharing rows; `config`, the model's, adds
    its heads to what is checked."""
    length, ranks, found = recipe.data.sequence_length, recipe.parallel.sequence_parallel_size, []
    if ranks == 1:
        return []
    if config is not None:
        heads, kv_heads = attention_heads(config)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            found.append(
                f"sequence_parallel {ranks} does not divide the model's {heads} attention heads and "
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
            f"Of {recipe.training.batch_size} rows at a time that ranks share, flash attention would not "
            "see the documents; set "
            "training.batch_size to 1 and raise accumulation."
        )
    return found


def check_sharing(recipe: Recipe, chunk_size: int, config: PreTrainedConfig | None = None) -> None:
    for problem in sharing_problems(recipe, chunk_size, config):
        raise InPlaceTTTError(problem)


def attention_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """A text model's heads of queries, and of keys and values."""
    text = config.get_text_config()
    return text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def sdpa_sees_documents() -> None:
    """Register over transformers' "sdpa" one that makes its own mask from position_ids where it is given
    none."""

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
    """Let ranks share rows in evaluation as in training; accelerate turns that off, for loaders that give
    each rank rows of its own."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    init = UlyssesSPAttentionHF.__init__

    @functools.wraps(init)
    def always(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: value for name, value in kwargs.items() if name != "disable_in_eval"})

    UlyssesSPAttentionHF.__init__ = always


def document_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """Which keys [B, 1, T, T] each query sees: its own document's, not later, within the window; None where
    plain causal does."""
    starts = document_starts(positions)
    length = positions.shape[1]
    if not starts[:, 1:].any() and (window is None or window >= length):
        return None
    document = starts.cumsum(-1)
    distance = torch.arange(length, device=positions.device)
    distance = distance[:, None] - distance[None, :]
    near = (distance >= 0) & (distance < (window or length))
    return (near & (document[:, :, None] == document[:, None, :]))[:, None]
