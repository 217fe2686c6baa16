"""Attention for ranks that share packed rows.

DeepSpeed's Ulysses drops the attention mask, since it was made for a rank's own part; plain sdpa then lets packed
documents see each other and forgets sliding windows. Flash attention reads both from its arguments; this does it for sdpa.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def sdpa_sees_documents() -> None:
    """Register over transformers' "sdpa" one that makes its own mask from position_ids where it is given none."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        positions, window = kwargs.get("position_ids"), kwargs.get("sliding_window")
        if attention_mask is None and positions is not None and query.shape[2] == key.shape[2] == positions.shape[1] > 1:
            attention_mask = document_mask(positions, window)
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register("sdpa", forward)


def document_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """Which keys [B, 1, T, T] each query sees: its own document's, not later, within the window; None where plain causal does."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=-1) != 1
    length = positions.shape[1]
    if not starts[:, 1:].any() and (window is None or window >= length):
        return None
    document = starts.cumsum(-1)
    distance = torch.arange(length, device=positions.device)
    distance = distance[:, None] - distance[None, :]
    near = (distance >= 0) & (distance < (window or length))
    return (near & (document[:, :, None] == document[:, None, :]))[:, None]
