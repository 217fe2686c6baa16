"""Ways of reading that a rule has to hold in: batches, pieces, packed documents, many chunks, other chunk sizes, training.

A converted model runs as a user runs it, with short chunks and writes that show; each scene gives what its TTT layers saw, and which
documents they read.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..families import CACHE, locate
from ..layer.cache import streams
from ..layer.fast_linear import FastWeight
from ..layer.overrides import with_config
from ..state import FastWeightState
from ..surgery import config_of, fast_weights
from .converted import probe_chunk, small_chunks
from .declared_rule import DeclaredRule
from .limits import limits, room
from .recording import STRENGTH, Document, Piece, Recording, base_output, deviation, recording

Documents = Sequence[Document]
Reading = tuple[str, Recording, Documents]
Scene = Callable[["Probed"], Iterator[Reading]]
"""Runs a model; for each way of reading its name, what the layers saw, and the documents in it."""


class Probed:
    """A converted model with short chunks, writes that show, and a clip that acts on half of them where there is one.

    training: whether rules are asked for as training has them.
    """

    def __init__(self, lm: Any, config: InPlaceTTTConfig, seed: int, training: bool = False) -> None:
        self.lm, self.config, self.seed, self.training = lm, config, seed, training
        self.layers: dict[int, FastWeight] = fast_weights(lm)
        self.chunk = config.chunk_size

    @classmethod
    @contextmanager
    def of(cls, lm: Any, seed: int, strength: float = STRENGTH) -> Iterator[Probed]:
        """The model as probed; as before afterwards. strength: of what tokens read, over what W0 gives them."""
        declared = config_of(lm)
        chunk = probe_chunk(declared.kernel_size)
        with small_chunks(lm, chunk, seed), torch.no_grad():
            probed = cls(lm, dataclasses.replace(declared, chunk_size=chunk, clip=None, prompt_write=None), seed)
            record = probed.read(probed.ids(1, 4 * chunk))
            norms = probed._strengthen(record, strength, relative=declared.clip is not None and declared.clip.relative)
            if declared.clip is None:
                yield probed
                return
            clip = dataclasses.replace(declared.clip, tau=median(norms))
            with with_config(probed.layers.values(), clip=clip):
                yield cls(lm, dataclasses.replace(probed.config, clip=clip), seed)

    def with_larger_chunks(self) -> AbstractContextManager[Probed]:
        """The same with chunks of another, odd, length."""
        return self.with_chunks_of(2 * self.chunk + 5)

    @contextmanager
    def with_chunks_of(self, chunk: int) -> Iterator[Probed]:
        with with_config(self.layers.values(), chunk_size=chunk):
            yield Probed(self.lm, dataclasses.replace(self.config, chunk_size=chunk), self.seed, self.training)

    def _strengthen(self, record: Recording, strength: float, relative: bool) -> list[float]:
        """Scale each layer's P, so that what is read shows; norms of chunks' deltas after that, or these over ‖W0‖."""
        norms = []
        for index, layer in self.layers.items():
            z, source, _, writes = record.of(index, record.whole()[0])
            rule = self.rule(index)
            reads, base = rule.reads(z, source, writes), base_output(layer, z)
            wanted = base.norm() if bool(base.any()) else reads.norm()
            factor = float(strength * wanted / reads.norm()) if bool(reads.any()) else 1.0
            if self.config.write_norm is None:
                layer.ttt.proj.data = layer.ttt.proj.data * factor
            one = float(rule.tensors["w0"].norm()) or 1.0 if relative else 1.0
            for k, x in zip(rule.keys(z).split(self.chunk), source.split(self.chunk), strict=True):
                norms.append(factor * float((rule.targets(x).T @ rule.counted(k)).norm()) / one)
        return norms

    def rule(self, index: int) -> DeclaredRule:
        """What a layer declares."""
        return self._rule_of(self.layers[index], index, self.config)

    def _rule_of(self, layer: FastWeight, index: int, config: InPlaceTTTConfig) -> DeclaredRule:
        eta = config.eta[sorted(self.layers).index(index)] if isinstance(config.eta, tuple) else config.eta
        return DeclaredRule.of(layer, config, eta, self.training)

    def ids(self, rows: int, tokens: int, part: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1000 * part)
        ids = torch.randint(self.lm.config.get_text_config().vocab_size, (rows, tokens), generator=generator)
        return ids.to(self.lm.get_input_embeddings().weight.device)

    def forward(self, ids: Tensor, **kwargs: Any) -> None:
        """One call, with the last token's logits alone where the model lets one choose: none are looked at."""
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.lm.forward).parameters else {}
        self.lm(input_ids=ids, **last, **kwargs)

    def read(self, ids: Tensor, **kwargs: Any) -> Recording:
        with recording(self.lm, self.config) as record:
            self.forward(ids, **{"use_cache": False, **kwargs})
        return record

    @property
    def takes_documents(self) -> bool:
        """Whether the model is told by position_ids where documents begin; others read a row as one."""
        return "position_ids" in inspect.signature(locate(self.lm).base.forward).parameters

    @cached_property
    def takes_padding(self) -> bool:
        """Whether padded rows are read; behind an attention window they are refused."""
        try:
            self.read(self.ids(2, 2), attention_mask=torch.tensor([[0, 1], [1, 1]], device=self.ids(1, 1).device))
        except InPlaceTTTError:
            return False
        return True

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.lm.config.get_text_config())

    def deviations(self, scene: Scene) -> dict[str, dict[int, float]]:
        """By way of reading and layer."""
        return {name: self.errors(record, documents) for name, record, documents in scene(self)}

    def errors(self, record: Recording, documents: Documents) -> dict[int, float]:
        """By layer, how far its outputs are from what it declares; under autocast, as far as its limit is to the model's."""
        own = self.lm.dtype
        wider = 1.0 if record.dtype in (None, own) else limits(own).outputs / limits(record.dtype).outputs / room(record.dtype, self.config)
        found = {}
        for i, layer in record.layers.items():
            rule = record.rules.get(i) or self._rule_of(layer, i, record.config)
            found[i] = wider * deviation(record, i, layer, documents, dataclasses.replace(rule, dtype=record.dtype or rule.dtype))
        return found


def plain(probed: Probed) -> Iterator[Reading]:
    """One row in one call, in evaluation."""
    record = probed.read(probed.ids(1, 3 * probed.chunk + 5))
    yield "one row in one call", record, record.whole()


def batches(probed: Probed) -> Iterator[Reading]:
    """Rows of unequal lengths, padded on either side, in one call and, on the left, in pieces; rows of documents; rows reordered."""
    chunk = probed.chunk
    if probed.takes_documents:
        yield "rows of documents", *packed(probed, [[2 * chunk + 5, 3 * chunk - 2], [chunk - 1, 2 * chunk, 2 * chunk + 4]])
    if probed.takes_padding:
        yield from _padded_batches(probed)
    order = torch.tensor([2, 0, 0])
    first = probed.ids(3, 2 * chunk + 3).split([chunk + 1, chunk + 2], 1)
    rest = probed.ids(3, 3 * chunk + 3, 1)
    second = _cut(rest, _over_an_edge(2 * chunk + 3, chunk))
    record, documents = streamed(probed, [first, second], lambda cache, part: cache.reorder_cache(order.to(first[0].device)))
    yield "rows reordered", record, [[*documents[int(s)][: len(first)], *documents[row][len(first) :]] for row, s in enumerate(order)]
    chosen = torch.tensor([2, 1], device=first[0].device)
    second = rest[:2].split([chunk, 2 * chunk + 3], 1)
    record, documents = streamed(probed, [first, second], lambda cache, part: cache.batch_select_indices(chosen))
    yield "rows chosen", record, [[*documents[int(s)][: len(first)], *documents[row][len(first) :]] for row, s in enumerate(chosen)]
    first, second = tuple(ids[:2] for ids in first), tuple(ids.repeat(2, 1) for ids in second)
    record, documents = streamed(probed, [first, second], lambda cache, part: cache.batch_repeat_interleave(2))
    yield "rows repeated", record, [[*documents[row // 2][: len(first)], *documents[row][-len(second) :]] for row in range(4)]


def _padded_batches(probed: Probed) -> Iterator[Reading]:
    chunk = probed.chunk
    lengths = [4 * chunk + 1, 2 * chunk + 3, chunk + 5]
    for left in (False, True):
        yield f"padded on the {'left' if left else 'right'}", *padded(probed, lengths, left)
    longest = max(lengths)
    ids, mask, spans = _padding(probed, lengths, left=True)
    # As `generate` passes them: Qwen's vision-language models take a longer mask by no other way.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pieces = [2 * chunk + 4, 1, chunk, longest - 3 * chunk - 5]
    documents: list[list[Piece]] = [[] for _ in lengths]
    cache, begin = probed.cache(), 0
    with recording(probed.lm, probed.config) as record:
        for number, size in enumerate(pieces):
            part = slice(begin, begin + size)
            given = {"position_ids": positions[:, part]} if probed.takes_documents else {}
            probed.forward(ids[:, part], attention_mask=mask[:, : part.stop], **given, **{CACHE: cache}, use_cache=True)
            for row, (start, _) in enumerate(spans):
                if part.stop > start:
                    documents[row].append(Piece(number, row, max(start - begin, 0), size, _writes(probed, size, begin)))
            begin += size
    yield "padded on the left, in pieces", record, documents


def pieces(probed: Probed) -> Iterator[Reading]:
    """A row through a cache, in pieces that end anywhere, token by token over a chunk's edge; and another one after a reset."""
    chunk = probed.chunk
    first = _cut(probed.ids(1, 5 * chunk), [chunk // 2, 3 * chunk + 2, *_over_an_edge(chunk // 2 + 2, chunk)])
    yield "in pieces", *streamed(probed, [first])
    second = _cut(probed.ids(1, 5 * chunk, 1), [chunk + 3, chunk, *_over_an_edge(3, chunk)])
    record, (document,) = streamed(probed, [first[:2], second], lambda cache, part: cache.reset(), restarts=True)
    yield "in pieces after a reset", record, [document[:2], document[2:]]


def taken_back(probed: Probed) -> Iterator[Reading]:
    """A cache that takes back the tokens that completed a chunk, and one that was branched off."""
    chunk = probed.chunk
    yield from _branched(probed)
    if any(getattr(layer, "is_sliding", False) for layer in probed.cache().layers) or not probed.config.decode_updates:
        return  # what left a window does not come back, and where tokens may be unwritten nothing is taken back
    first = probed.ids(1, 2 * chunk + 2).split([chunk + 2, chunk], 1)
    second = _cut(probed.ids(1, 3 * chunk, 1), _over_an_edge(2, chunk))
    record, (document,) = streamed(probed, [first, second], lambda cache, part: cache.crop(-chunk))
    yield "a chunk taken back", record, [[document[0], *document[2:]]]
    first = probed.ids(1, 2 * chunk + 7).split([2 * chunk + 3, 1, 3], 1)
    second = _cut(probed.ids(1, 2 * chunk, 1), [1, *_over_an_edge(5, chunk)])
    record, (document,) = streamed(probed, [first, second], lambda cache, part: cache.crop(-3))
    yield "tokens of an open chunk taken back", record, [[*document[:2], *document[3:]]]


def _branched(probed: Probed) -> Iterator[Reading]:
    """A branch and its stem read on in turn, each text of its own."""
    chunk = probed.chunk
    known = probed.ids(1, 2 * chunk + 3)
    later = [probed.ids(1, 2 * chunk, part).split([chunk, chunk], 1) for part in (1, 2)]
    state = FastWeightState(probed.lm)
    with recording(probed.lm, probed.config) as record:
        state.read(known)
        both = (state, state.fork())
        for turn in range(2):
            for one, ids in zip(both, later, strict=True):
                one.read(ids[turn])
    size = Piece(0, 0, 0, known.shape[1])
    yield "a session and its branch", record, [[size, Piece(1 + n, 0, 0, chunk), Piece(3 + n, 0, 0, chunk)] for n in range(2)]


def documents(probed: Probed) -> Iterator[Reading]:
    """Five documents in a row."""
    chunk = probed.chunk
    if probed.takes_documents:
        yield "five documents", *packed(probed, [[2 * chunk + 1, chunk - 1, 3 * chunk, 2 * chunk + 2, 4 * chunk + 5]])


def many_chunks(probed: Probed) -> Iterator[Reading]:
    """Sixteen chunks of one document, in one call, and in pieces with single tokens late; and a few larger ones."""
    chunk = probed.chunk
    record = probed.read(probed.ids(1, 16 * chunk + 3))
    yield "sixteen chunks", record, record.whole()
    parts = _cut(probed.ids(1, 16 * chunk + 3), [9 * chunk + 4, *_over_an_edge(4, chunk)])
    yield "sixteen chunks in pieces", *streamed(probed, [parts])
    with probed.with_larger_chunks() as larger:
        record = larger.read(larger.ids(1, 3 * larger.chunk + 4))
        yield f"chunks of {larger.chunk} tokens", record, record.whole()


def many_writes(probed: Probed, chunks: int) -> tuple[Reading, dict[int, float]]:
    """So many chunks in three pieces, and by layer how far the state is from what these are declared to write."""
    chunk, cache = probed.chunk, probed.cache()
    with recording(probed.lm, probed.config) as record:
        for ids in _cut(probed.ids(1, chunks * chunk), [chunks // 2 * chunk + 5, 3]):
            probed.forward(ids, **{CACHE: cache}, use_cache=True)
    document = [Piece(n, 0, 0, record.tokens(n)) for n in range(len(record.forwards))]
    found = {}
    for index, held in streams(cache).items():
        z, source, _, _ = record.of(index, document)
        wanted = probed.rule(index).state(z, source)
        state = torch.zeros_like(wanted) if held.state is None else held.state[0].double().cpu()
        total = len(probed.rule(index).tensors["proj"])
        parts = [(state[:total], wanted[:total]), (state[total:], wanted[total:])]
        found[index] = max(float((got - right).norm() / right.norm()) for got, right in parts if right.numel())
    return (f"{chunks} chunks in pieces", record, [document]), found


@contextmanager
def recomputing(lm: Any) -> Iterator[bool]:
    """Gradient checkpointing within it, as before afterwards; whether the model takes it."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    modules = [module for module in lm.modules() if hasattr(module, names[0])]
    before = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    try:
        for module in modules:
            vars(module).update(zip(names, (True, functools.partial(checkpoint, use_reentrant=False)), strict=True))
        yield bool(modules) and lm.supports_gradient_checkpointing
    finally:
        for module, own in zip(modules, before, strict=True):
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(own)


def training_rows(probed: Probed) -> Reading:
    """A packed row, one document of it of nine chunks; where the model takes no documents, a row of ten chunks."""
    chunk = probed.chunk
    if not probed.takes_documents:
        record = probed.read(probed.ids(1, 10 * chunk + 7))
        return "a row of ten chunks", record, record.whole()
    return "a row of documents", *packed(probed, [[9 * chunk + 3, chunk + 4]])


def padded_training_rows(probed: Probed) -> Reading:
    """Rows of unequal lengths, or of one where the model takes no padding."""
    chunk = probed.chunk
    if not probed.takes_padding:
        record = probed.read(probed.ids(2, 3 * chunk + 4))
        return f"rows, chunks of {chunk} tokens", record, record.whole()
    return f"padded rows, chunks of {chunk} tokens", *padded(probed, [3 * chunk + 4, 2 * chunk + 1], left=True)


def _over_an_edge(at: int, chunk: int) -> list[int]:
    """Sizes of pieces: what brings a stream from `at` to two tokens before an edge, and four single ones over it."""
    ahead = (chunk - 2 - at) % chunk
    return [*([ahead] if ahead else []), 1, 1, 1, 1]


def _cut(ids: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Pieces [B, n] of these sizes, and one of what is left."""
    return ids.split([*sizes, ids.shape[1] - sum(sizes)], 1)


def _padding(probed: Probed, lengths: Sequence[int], left: bool) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Ids [B, T], their mask, and where each row's tokens stand."""
    longest = max(lengths)
    spans = [(longest - n, longest) if left else (0, n) for n in lengths]
    ids = probed.ids(len(lengths), longest)
    mask = torch.zeros_like(ids)
    for row, (start, stop) in enumerate(spans):
        mask[row, start:stop] = 1
    return ids, mask, spans


def padded(probed: Probed, lengths: Sequence[int], left: bool) -> tuple[Recording, Documents]:
    ids, mask, spans = _padding(probed, lengths, left)
    return probed.read(ids, attention_mask=mask), [[Piece(0, row, *span)] for row, span in enumerate(spans)]


def packed(
    probed: Probed, rows: Sequence[Sequence[int]], first_positions: Sequence[int] = (), **kwargs: Any
) -> tuple[Recording, Documents]:
    """Rows of packed documents of these lengths in one call; first_positions: of each document of a row, 0 without them."""
    firsts = first_positions or [0] * max(len(lengths) for lengths in rows)
    positions = torch.stack([torch.cat([first + torch.arange(n) for first, n in zip(firsts, row, strict=False)]) for row in rows])
    ids = probed.ids(*positions.shape)
    record = probed.read(ids, position_ids=positions.to(ids.device), **kwargs)
    found: list[Document] = []
    for row, lengths in enumerate(rows):
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        found += [[Piece(0, row, start, stop)] for start, stop in itertools.pairwise(starts)]
    return record, found


def streamed(
    probed: Probed, parts: Sequence[Sequence[Tensor]], between: Callable[[Any, int], None] | None = None, restarts: bool = False
) -> tuple[Recording, list[list[Piece]]]:
    """Pieces of ids [B, n] through one cache; `between` is called with the cache after each part but the last.

    restarts: each part is a text of its own.
    """
    cache, number, known = probed.cache(), 0, 0
    found: list[list[Piece]] = [[] for _ in range(max(len(part[0]) for part in parts))]
    with recording(probed.lm, probed.config) as record:
        for part, pieces in enumerate(parts):
            known = 0 if restarts else known
            for ids in pieces:
                probed.forward(ids, **{CACHE: cache}, use_cache=True)
                for row, document in enumerate(found[: len(ids)]):
                    document.append(Piece(number, row, 0, ids.shape[1], _writes(probed, ids.shape[1], known)))
                number, known = number + 1, known + ids.shape[1]
            if between is not None and part + 1 < len(parts):
                between(cache, part)
    return record, found


def _writes(probed: Probed, tokens: int, known: int) -> bool:
    """Whether a piece of so many tokens fills chunks: one token that is read alone into a cache counts as generated."""
    return probed.config.decode_updates or tokens > 1 or known == 0
