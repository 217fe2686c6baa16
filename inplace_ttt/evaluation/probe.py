"""The second-copy probe: a passage stands twice in a document, the second time beyond the attention window.

Only a memory can know the second copy. What the writes change on the unrelated text between the copies, the filler, is
the bias that recall has to beat.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..reports.statistics import Mean
from ..surgery import config_of
from ..tasks.passages import Passage
from .ab import Protocol
from .plain import PlainReader
from .reading import token_losses


def second_copy(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    protocol: Protocol,
    passage: Passage | None = None,
    *,
    seed: int = 0,
    plain: PlainReader | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Loss with TTT on minus off on the second copy and on the filler, paired over documents of token ids [T], one length.

    `copy_off` and `filler_off` are the losses without writes. Raises InPlaceTTTError when a document has no room.
    """
    passage = passage or Passage()
    length = min(map(len, documents))
    if length < passage.tokens:
        raise InPlaceTTTError(
            f"a passage of {passage.length} tokens twice, {passage.gap} apart, takes {passage.tokens} tokens, and the shortest document "
            f"has {length}; give longer documents, or a shorter passage."
        )
    generator = random.Random(seed)
    starts = [passage.random_start(length, generator) for _ in documents]
    rows = torch.stack([passage.repeat(d[:length], start) for d, start in zip(documents, starts, strict=True)])
    plain = plain or PlainReader()
    on, off = [], []
    with tqdm(total=2 * rows.numel(), desc="second copy", unit="tok", file=sys.stderr, disable=None if progress else True) as bar:
        how: dict[str, Any] = {**protocol.attention, "progress": bar.update}
        for group in rows.split(protocol.batch_size):
            on += [token_losses(model, group, piece=config_of(model).chunk_size, **how)]
            off += [plain.losses(model, group, **how)]
    with_writes, without = torch.cat(on).double(), torch.cat(off).double()
    spans = {
        "second_copy": [passage.second(start) for start in starts],
        "filler": [passage.between(start) for start in starts],
    }
    found: dict[str, Any] = {"passage": passage.length, "gap": passage.gap}
    for name, where in spans.items():
        pairs = [
            (float(a[span.start : span.stop - 1].mean()), float(b[span.start : span.stop - 1].mean()))
            for a, b, span in zip(with_writes, without, where, strict=True)
        ]
        found[name] = vars(Mean.of([a - b for a, b in pairs], alone=0.0))
        found[f"{name}_off"] = sum(b for _, b in pairs) / len(pairs)
    return found
