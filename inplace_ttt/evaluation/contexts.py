"""Loss on a fixed last block while the context before it grows (the paper's sliding-window perplexity, Figure 2)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import exp
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..reports.statistics import Mean
from ..surgery import config_of
from .ab import Protocol
from .plain import PlainReader
from .reading import token_losses


def growing_context(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    contexts: Sequence[int],
    protocol: Protocol,
    *,
    block: int = 512,
    base: PreTrainedModel | None = None,
    plain: PlainReader | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """For each number of context tokens: mean loss (nats) and perplexity on the block after it, TTT on, off, base.

    The block is the same for every context: the `block` tokens that follow the longest one in each document of token ids
    [T]. Raises InPlaceTTTError when a document is shorter than the longest context and the block.
    """
    longest = max(contexts)
    if min(contexts) < 1 or block < 1:
        raise InPlaceTTTError(f"contexts and block must be at least 1 token, got {min(contexts)} and {block}.")
    if short := [len(d) for d in documents if len(d) < longest + block]:
        raise InPlaceTTTError(
            f"a context of {longest} tokens and a block of {block} take {longest + block}, and a document has {min(short)}; give longer "
            "documents, or a shorter context."
        )
    plain = plain or PlainReader()
    ends = torch.stack([d[: longest + block] for d in documents])
    found = []
    total = (2 + (base is not None)) * len(documents) * sum(context + block for context in contexts)
    with tqdm(total=total, desc="contexts", unit="tok", file=sys.stderr, disable=None if progress else True) as bar:
        how: dict[str, Any] = {**protocol.attention, "progress": bar.update}
        for context in contexts:
            rows = ends[:, longest - context :]
            losses: dict[str, list[Tensor]] = {"on": [], "off": [], "base": []}
            for group in rows.split(protocol.batch_size):
                losses["on"] += [token_losses(model, group, piece=config_of(model).chunk_size, **how)]
                losses["off"] += [plain.losses(model, group, **how)]
                if base is not None:
                    losses["base"] += [plain.losses(base, group, **how)]
            last = {name: torch.cat(parts)[:, -block:].double().mean(1) for name, parts in losses.items() if parts}
            row: dict[str, Any] = {"context": context, "block": block}
            for name, per_document in last.items():
                mean = float(per_document.mean())
                row[name], row[f"{name}_perplexity"] = mean, exp(mean)
            row["difference"] = vars(Mean.of((last["on"] - last["off"]).tolist(), alone=0.0))
            found.append(row)
    return found
