"""Ways of reading in which a model with `target: gradient` must equal plain gradient steps.

Each scene calls the model as a user does. It yields the errors of the model's logits against `GradientRule`,
relative to the effect of the writes.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from ..families import CACHE
from ..layer.overrides import overriding
from ..session.session import Session
from ..surgery import config_of, disable_ttt, fast_weights
from .borrowing import probe_chunk, small_chunks
from .gradient_rule import GradientRule
from .prepared import Prepared

_STRENGTH = 0.3
"""Norm of the reads over the norm of W0's outputs. Much stronger steps would amplify rounding."""


@dataclasses.dataclass(frozen=True)
class Read:
    """A document that the model read.

    Attributes:
        ids: its token ids [T].
        logits: the model's logits [n, V] of its last n tokens.
    """

    ids: Tensor
    logits: Tensor


Scene = Callable[["Probed"], Iterator[tuple[str, float]]]
"""Calls a model and yields errors, each with the name of the way of reading."""


class Probed(Prepared):
    """A prepared model whose logits are compared with plain gradient steps."""

    @classmethod
    @contextmanager
    def of(cls, lm: Any, seed: int) -> Iterator[Probed]:
        """Yields the prepared model, and restores it on exit."""
        declared, layers = config_of(lm), fast_weights(lm).values()
        chunk = probe_chunk(declared.kernel_size)
        gains: list[Any] = [layer.ttt.gain for layer in layers]
        with small_chunks(lm, chunk, seed):
            config = dataclasses.replace(declared, chunk_size=chunk, clip=None)
            probed = cls(lm, config, seed)
            try:
                rule = GradientRule(lm, config)
                rule.logits(probed.ids(1, 3 * chunk))
                factor = _STRENGTH / rule.reads if rule.reads else 1.0
                for layer, gain in zip(layers, gains, strict=True):
                    layer.ttt.gain = gain * factor
                relative = declared.clip is not None and declared.clip.relative
                norms = [
                    factor * norm / (float(rule.rules[index].tensors["w0"].norm()) if relative else 1.0)
                    for index, norm in rule.deltas
                ]
                with probed.clipping_half(declared, norms) as clipped:
                    yield clipped
            finally:
                for layer, gain in zip(layers, gains, strict=True):
                    layer.ttt.gain = gain

    @torch.no_grad()
    def forward(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Returns the model's logits [B, T, V]."""
        logits: Tensor = self.lm(input_ids=ids, **kwargs).logits
        return logits

    def in_pieces(self, ids: Tensor, sizes: Sequence[int], cache: DynamicCache | None = None) -> Tensor:
        """Returns the logits [B, T, V] of ids that are read through a cache in pieces of these sizes."""
        cache = cache or self.cache()
        pieces = ids.split([*sizes, ids.shape[1] - sum(sizes)], 1)
        return torch.cat([self.forward(piece, **{CACHE: cache}) for piece in pieces if piece.numel()], 1)

    def error(self, documents: Sequence[Read]) -> float:
        """Returns the error of all documents' logits, relative to the effect of the writes on them."""
        off = size = 0.0
        for document in documents:
            ids, n = document.ids[None], len(document.logits)
            wanted = GradientRule(self.lm, self.config).logits(ids)[-n:].double()
            with disable_ttt(self.lm):
                without = self.forward(ids, use_cache=False)[0, -n:].double()
            off += float((document.logits.double() - wanted).square().sum())
            size += float((without - wanted).square().sum())
        return float(off / size) ** 0.5 if size else float("inf")


def plain(probed: Probed) -> Iterator[tuple[str, float]]:
    ids = probed.ids(1, 3 * probed.chunk + 5)
    yield "one row in one call", probed.error([Read(ids[0], probed.forward(ids, use_cache=False)[0])])


def pieces(probed: Probed) -> Iterator[tuple[str, float]]:
    """Reads pieces that end anywhere, single tokens across a chunk's edge, and another text after a reset."""
    chunk, cache = probed.chunk, probed.cache()
    first, second = probed.ids(1, 5 * chunk), probed.ids(1, 4 * chunk, 1)
    sizes = [chunk // 2, 2 * chunk + 2, chunk - chunk // 2 - 4, 1, 1, 1, 1]
    yield "in pieces", probed.error([Read(first[0], probed.in_pieces(first, sizes, cache)[0])])
    cache.reset()
    logits = probed.in_pieces(second, [chunk + 3, chunk], cache)[0]
    yield "in pieces after a reset", probed.error([Read(second[0], logits)])


def batches(probed: Probed) -> Iterator[tuple[str, float]]:
    """Reads rows of unequal length that are padded on the left, and rows that are reordered as beams are."""
    chunk = probed.chunk
    yield "rows padded on the left", _padded(probed, [3 * chunk + 1, 2 * chunk + 3, chunk + 5])
    order, cache = torch.tensor([2, 0, 0]), probed.cache()
    known, later = probed.ids(3, 2 * chunk + 3), probed.ids(3, 2 * chunk, 1)
    probed.forward(known, **{CACHE: cache})
    cache.reorder_cache(order.to(known.device))
    logits = probed.in_pieces(later, [chunk - 4, 1, 1, 1], cache)
    texts = [torch.cat([known[source], row]) for source, row in zip(order, later, strict=True)]
    yield "rows reordered", probed.error([Read(*pair) for pair in zip(texts, logits, strict=True)])


def _padded(probed: Probed, lengths: Sequence[int]) -> float:
    longest = max(lengths)
    ids, mask = probed.ids(len(lengths), longest), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : longest - length] = 0
    mask = mask.to(ids.device)
    given = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if probed.takes_documents else {}
    logits = probed.forward(ids, attention_mask=mask, **given)
    return probed.error([Read(ids[row, -n:], logits[row, -n:]) for row, n in enumerate(lengths)])


def documents(probed: Probed) -> Iterator[tuple[str, float]]:
    """Reads five documents packed in a row. With several steps per chunk, a row cannot be packed."""
    chunk = probed.chunk
    lengths = [2 * chunk + 1, chunk - 1, 3 * chunk, 2 * chunk + 2, chunk + 5]
    if probed.takes_documents and probed.config.steps_per_chunk == 1:
        yield "five documents", _packed(probed, lengths)


def _packed(probed: Probed, lengths: list[int]) -> float:
    ids = probed.ids(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(ids.device)
    logits = probed.forward(ids, position_ids=positions, use_cache=False)[0]
    return probed.error(
        [Read(*pair) for pair in zip(ids[0].split(lengths), logits.split(lengths), strict=True)]
    )


def many_chunks(probed: Probed) -> Iterator[tuple[str, float]]:
    """Reads sixteen chunks in one call and in pieces, then chunks of another length."""
    chunk = probed.chunk
    ids = probed.ids(1, 16 * chunk + 3)
    yield "sixteen chunks", probed.error([Read(ids[0], probed.forward(ids, use_cache=False)[0])])
    logits = probed.in_pieces(ids, [9 * chunk + 4, chunk - 6, 1, 1, 1, 1])[0]
    yield "sixteen chunks in pieces", probed.error([Read(ids[0], logits)])
    with probed.with_larger_chunks() as larger:
        (error,) = (error for _, error in plain(larger))
        yield f"chunks of {larger.chunk} tokens", error


def taken_back(probed: Probed) -> Iterator[tuple[str, float]]:
    """Reads on after tokens were cropped from a cache, and in a session and its branch."""
    chunk = probed.chunk
    known = probed.ids(1, 2 * chunk + 3)
    session = Session(probed.lm)
    session.read(known)
    found = []
    for part, one in enumerate((session, session.fork())):
        later = probed.ids(1, 2 * chunk, 1 + part)
        logits = probed.in_pieces(later, [chunk], one.cache)
        found.append(Read(torch.cat([known[0], later[0]]), logits[0]))
    yield "a session and its branch", probed.error(found)
    cache = probed.cache()
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        return  # tokens that left a sliding window cannot be restored
    probed.forward(known, **{CACHE: cache})
    cache.crop(-(chunk // 2))
    kept, later = known[0, : -(chunk // 2)], probed.ids(1, 2 * chunk, 3)
    positions = torch.arange(len(kept), len(kept) + later.shape[1], device=known.device)[None]
    logits = probed.forward(later, position_ids=positions, **{CACHE: cache})[0]
    yield "tokens taken back", probed.error([Read(torch.cat([kept, later[0]]), logits)])


def ways_of_calling(probed: Probed) -> Iterator[tuple[str, float]]:
    """Calls the model with a mask, with labels, in inference mode, after `generate`, and as a copy."""
    chunk = probed.chunk
    ids = probed.ids(1, 2 * chunk + 5)
    calls: dict[str, Callable[[], Tensor]] = {
        "a mask of ones": lambda: probed.forward(ids, attention_mask=torch.ones_like(ids)),
        "labels": lambda: probed.forward(ids, labels=ids),
        "inference mode": torch.inference_mode()(lambda: probed.forward(ids).clone()),
        "a copy of the model": lambda: Probed(copy.deepcopy(probed.lm), probed.config, 0).forward(ids),
    }
    for name, call in calls.items():
        yield name, probed.error([Read(ids[0], call()[0])])
    greedy, cache = GenerationConfig(max_new_tokens=chunk, do_sample=False, pad_token_id=0), probed.cache()
    with overriding([probed.lm], generation_config=greedy):
        made = probed.lm.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=chunk, **{CACHE: cache}
        )
    later = probed.ids(1, chunk, 1)
    # the last generated token was not read yet
    logits = probed.forward(torch.cat([made[:, -1:], later], 1), **{CACHE: cache})
    yield "after generate", probed.error([Read(torch.cat([made[0], later[0]]), logits[0])])


def drawn_sizes(probed: Probed) -> Iterator[tuple[str, float]]:
    """Reads rows, chunks and documents whose numbers and lengths are drawn from the audit's seed."""
    draw, chunk = random.Random(probed.seed), probed.chunk
    rows = draw.randint(4, 6)
    yield f"{rows} rows", _padded(probed, [draw.randint(chunk, 4 * chunk) for _ in range(rows)])
    lengths = [draw.randint(chunk - 2, 3 * chunk) for _ in range(draw.randint(8, 12))]
    if probed.takes_documents and probed.config.steps_per_chunk == 1:
        yield f"{len(lengths)} documents", _packed(probed, lengths)
    chunks = draw.randint(30, 40)
    ids = probed.ids(1, chunks * chunk + draw.randrange(chunk))
    logits = probed.in_pieces(ids, [draw.randint(1, 20 * chunk), 1, draw.randint(1, 8 * chunk)])[0]
    yield f"{chunks} chunks in pieces", probed.error([Read(ids[0], logits)])
    with probed.with_chunks_of(draw.randint(40, 70)) as larger:
        (error,) = (error for _, error in plain(larger))
        yield f"chunks of {larger.chunk} tokens", error


def saved_session(probed: Probed) -> Iterator[tuple[str, float]]:
    """Saves a session in the middle of a chunk, loads it, and reads on."""
    chunk = probed.chunk
    known, later = probed.ids(1, 5 * chunk).split([2 * chunk + 5, 3 * chunk - 5], 1)
    session = Session(probed.lm)
    session.read(known)
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "session")
        loaded = Session.load(Path(folder) / "session", probed.lm)
    logits = probed.forward(later, **{CACHE: loaded.cache})[0]
    yield "a session that was saved and loaded", probed.error([Read(torch.cat([known[0], later[0]]), logits)])
