"""Repeated-passage probe: a document holds a passage twice, the second time beyond the attention window.

Only the fast weights can carry the passage to its second copy. The change of the loss on the unrelated text
between the copies is the bias that recall must exceed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..reports.statistics import Mean
from ..tasks.passages import Passage, mean_loss
from .baseline_losses import BaselineLosses
from .protocol import Protocol, on_and_off_losses, progress_bar


def repeated_passage(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    protocol: Protocol,
    passage: Passage | None = None,
    *,
    seed: int = 0,
    baseline: BaselineLosses | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Measures the loss with TTT on minus off, on the second copy and on the text between the copies.

    The passage starts at a random position after the special tokens that begin every text.

    Args:
        model: a converted model.
        documents: token ids [T] of each document; all are cut to the length of the shortest.
        protocol: settings of the reading.
        passage: length of the passage and gap; default 512 and 1,024 tokens.
        seed: seed of the positions.
        baseline: keeps losses without writes, or None.
        progress: show a bar on stderr.

    Returns:
        JSON object: `repeated_passage` and `between`, on - off in nats per token with the standard error over
        documents; `repeated_passage_off` and `between_off`, the losses without writes.

    Raises:
        InPlaceTTTError: if `require_room` raises it.
    """
    passage = passage or Passage()
    require_room(documents, passage)
    length, generator = min(map(len, documents)), random.Random(seed)
    least = min(len(protocol.begins), length - passage.tokens)
    starts = [passage.random_start(length, generator, least) for _ in documents]
    rows = torch.stack(
        [passage.repeat(d[:length], start) for d, start in zip(documents, starts, strict=True)]
    )
    with progress_bar("repeated passage", 2 * rows.numel(), progress) as bar:
        losses = on_and_off_losses(model, rows, protocol, baseline, progress=bar.update)
    with_writes, without = losses["on"].double(), losses["off"].double()
    spans = {
        "repeated_passage": [passage.second(start) for start in starts],
        "between": [passage.between(start) for start in starts],
    }
    found: dict[str, Any] = {"passage": passage.length, "gap": passage.gap}
    for name, where in spans.items():
        pairs = [
            (float(mean_loss(a, span)), float(mean_loss(b, span)))
            for a, b, span in zip(with_writes, without, where, strict=True)
        ]
        found[name] = vars(Mean.of([a - b for a, b in pairs]))
        found[f"{name}_off"] = sum(b for _, b in pairs) / len(pairs)
    return found


def require_room(documents: Sequence[Tensor], passage: Passage) -> None:
    """Checks that every document has room for both copies.

    Raises:
        InPlaceTTTError: if the shortest document is too short.
    """
    length = min(map(len, documents))
    if length < passage.tokens:
        raise InPlaceTTTError(
            f"a passage of {passage.length} tokens twice, {passage.gap} apart, needs {passage.tokens} "
            "tokens, but the shortest "
            f"document has {length}; give longer documents, or a shorter passage."
        )
