"""Measures the loss on a fixed last block while the context before it grows.

This is the paper's sliding-window perplexity (Figure 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
from sys import float_info
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..reports.statistics import Mean
from .baseline_losses import BaselineLosses
from .protocol import Protocol, on_and_off_losses, progress_bar


def growing_context(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    contexts: Sequence[int],
    protocol: Protocol,
    *,
    block: int = 512,
    base: PreTrainedModel | None = None,
    baseline: BaselineLosses | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measures loss and perplexity on a block after contexts of several lengths.

    The readings are TTT on, off, and the base. The block is the same for every context: the `block` tokens
    that follow the longest context in each document. A shorter context begins with the special tokens of
    every text.

    Args:
        model: a converted model.
        documents: token ids [T] of each document.
        contexts: numbers of context tokens.
        protocol: settings of the reading.
        block: number of tokens of the block.
        base: the model to compare with, or None.
        baseline: keeps losses without writes, or None.
        progress: show a bar on stderr.

    Returns:
        One JSON object per context: mean losses in nats per token, perplexities, and on - off with its
        standard error.

    Raises:
        InPlaceTTTError: if `require_contexts` raises it.
    """
    require_contexts(documents, contexts, block)
    longest = max(contexts)
    ends = torch.stack([d[: longest + block] for d in documents])
    begins = ends.new_tensor(protocol.begins).expand(len(ends), -1)
    found = []
    total = (2 + (base is not None)) * len(documents) * sum(context + block for context in contexts)
    with progress_bar("contexts", total, progress) as bar:
        for context in contexts:
            rows = ends if context == longest else torch.cat([begins, ends[:, longest - context :]], dim=1)
            losses = on_and_off_losses(model, rows, protocol, baseline, base, progress=bar.update)
            last = {name: all_tokens[:, -block:].double().mean(1) for name, all_tokens in losses.items()}
            row: dict[str, Any] = {"context": context, "block": block}
            for name, per_document in last.items():
                mean = float(per_document.mean())
                row[name], row[f"{name}_perplexity"] = mean, exp(mean) if mean < log(float_info.max) else inf
            row["difference"] = vars(Mean.of((last["on"] - last["off"]).tolist()))
            found.append(row)
    return found


def require_contexts(documents: Sequence[Tensor], contexts: Sequence[int], block: int) -> None:
    """Checks that every document is long enough.

    Raises:
        InPlaceTTTError: if a document is shorter than the longest context and the block, or a length is below
            1.
    """
    longest = max(contexts)
    if min(contexts) < 1 or block < 1:
        raise InPlaceTTTError(
            f"contexts and block must be at least 1 token, got {min(contexts)} and {block}."
        )
    if short := [len(d) for d in documents if len(d) < longest + block]:
        raise InPlaceTTTError(
            f"a context of {longest} tokens and a block of {block} need {longest + block}, but a document "
            f"has only {min(short)}; give longer documents, or a shorter context."
        )
