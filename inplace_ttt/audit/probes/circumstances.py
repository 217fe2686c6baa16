"""Probes of where the rule has to hold: in training, in batches, in pieces, over many chunks, in half precision, through a file.

A converted model runs as a user runs it, and each TTT layer's outputs are held against what it declares (`DeclaredRule`). The other
items name what is wrong with a rule; these decide whether anything is, also where nobody thought of a name.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ...checkpoint.loading import load
from ...config import DeltaClip, InPlaceTTTConfig
from ...errors import InPlaceTTTError, one_line
from ...layer.fast_linear import FastWeight
from ...layer.overrides import overriding, with_config
from ...state import FastWeightState
from ...surgery import config_of, fast_weights
from ..converted import probe_chunk, small_chunks
from ..declared_rule import DeclaredRule
from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from ..recording import Document, Piece, Recording, base_output, deviation, gradient_errors, recording
from ..whole_model import WholeModel
from .bench import Bench, error
from .twin import twin

Documents = Sequence[Document]
Scene = Callable[["Probed"], Iterator[tuple[str, Recording, Documents]]]
"""Runs a model; for each way of reading its name, what the layers saw, and the documents in it."""

_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3, torch.bfloat16: 0.02, torch.float16: 5e-3}
"""By the model's dtype, of what a token reads: outputs are rounded to it."""
_GRADIENT_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3, torch.bfloat16: 0.05, torch.float16: 0.03}
_STRENGTH = 0.5
"""What tokens read over what W0 gives them, as the probes set P: large beside rounding, and beside what clips let through."""


class Probed:
    """A converted model with short chunks, writes that show, and a clip that acts on half of them where there is one."""

    def __init__(self, lm: Any, config: InPlaceTTTConfig, seed: int) -> None:
        self.lm, self.config, self.seed = lm, config, seed
        self.layers: dict[int, FastWeight] = fast_weights(lm)
        self.chunk = config.chunk_size
        self.training = False

    @classmethod
    @contextmanager
    def of(cls, lm: Any, seed: int) -> Iterator[Probed]:
        """The model as probed; as before afterwards."""
        declared = config_of(lm)
        chunk = probe_chunk(declared.kernel_size)
        with small_chunks(lm, chunk, seed), torch.no_grad():
            probed = cls(lm, dataclasses.replace(declared, chunk_size=chunk, clip=None, prompt_write=None), seed)
            record = probed.read(probed.ids(1, 4 * chunk))
            norms = probed._strengthen(record)
            if declared.clip is None:
                yield probed
                return
            clip = DeltaClip(median(norms), when=declared.clip.when)
            with with_config(probed.layers.values(), clip=clip):
                yield cls(lm, dataclasses.replace(probed.config, clip=clip), seed)

    def _strengthen(self, record: Recording) -> list[float]:
        """Scale each layer's P, so that what is read shows; norms of chunks' deltas after that."""
        norms = []
        for index, layer in self.layers.items():
            z, source, _, writes = record.of(index, record.whole()[0])
            rule = self.rule(index)
            reads, base = rule.reads(z, source, writes), base_output(layer, z)
            factor = float(_STRENGTH * base.norm() / reads.norm().clamp(min=1e-30))
            if self.config.write_norm is None:
                layer.ttt.proj.data = layer.ttt.proj.data * factor
            for k, x in zip(rule.keys(z).split(self.chunk), source.split(self.chunk), strict=True):
                norms.append(factor * float((rule.targets(x).T @ k).norm()))
        return norms

    def rule(self, index: int) -> DeclaredRule:
        eta = self.config.eta_of(sorted(self.layers).index(index))
        return DeclaredRule.of(self.layers[index], self.config, eta, self.training)

    def ids(self, rows: int, tokens: int, part: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1000 * part)
        ids = torch.randint(self.lm.config.get_text_config().vocab_size, (rows, tokens), generator=generator)
        return ids.to(self.lm.get_input_embeddings().weight.device)

    def read(self, ids: Tensor, **kwargs: Any) -> Recording:
        with recording(self.lm, self.config) as record:
            self.lm(input_ids=ids, **{"use_cache": False, **kwargs})
        return record

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.lm.config.get_text_config())

    def deviations(self, scene: Scene) -> dict[str, dict[int, float]]:
        """By way of reading and layer."""
        return {
            name: {i: deviation(record, i, layer, documents, self.rule(i)) for i, layer in self.layers.items()}
            for name, record, documents in scene(self)
        }


def plain(probed: Probed) -> Iterator[tuple[str, Recording, Documents]]:
    """One row in one call, in evaluation."""
    record = probed.read(probed.ids(1, 3 * probed.chunk + 5))
    yield "one row in one call", record, record.whole()


def batches(probed: Probed) -> Iterator[tuple[str, Recording, Documents]]:
    """Rows of unequal lengths, padded on either side, in one call and, padded on the left, in pieces."""
    chunk = probed.chunk
    lengths = [4 * chunk + 1, 2 * chunk + 3, chunk + 5]
    longest = max(lengths)
    for side in ("right", "left"):
        spans = [(0, n) if side == "right" else (longest - n, longest) for n in lengths]
        mask = torch.zeros(len(lengths), longest, dtype=torch.long)
        for row, (start, stop) in enumerate(spans):
            mask[row, start:stop] = 1
        ids = probed.ids(len(lengths), longest)
        record = probed.read(ids, attention_mask=mask.to(ids.device))
        yield f"padded on the {side}", record, [[Piece(0, row, *span)] for row, span in enumerate(spans)]
    pieces = [2 * chunk + 4, 1, chunk, longest - 3 * chunk - 5]
    documents: list[list[Piece]] = [[] for _ in lengths]
    cache, begin = probed.cache(), 0
    with recording(probed.lm, probed.config) as record:
        for number, size in enumerate(pieces):
            part = slice(begin, begin + size)
            probed.lm(input_ids=ids[:, part], attention_mask=mask[:, : part.stop].to(ids.device), past_key_values=cache, use_cache=True)
            for row, (start, _) in enumerate(spans):
                if part.stop > start:
                    documents[row].append(Piece(number, row, max(start - begin, 0), size, _writes(probed, size, begin)))
            begin += size
    yield "padded on the left, in pieces", record, documents


def pieces(probed: Probed) -> Iterator[tuple[str, Recording, Documents]]:
    """Two rows through a cache, in pieces that end anywhere, and token by token over a chunk's edge."""
    chunk = probed.chunk
    sizes = [chunk // 2, 2 * chunk + 3, chunk, *[1] * (chunk + 2), 3, 2 * chunk]
    yield "in pieces", *_streamed(probed, [probed.ids(2, sum(sizes)).split(sizes, 1)], lambda cache, part: None)


def steps_back(probed: Probed) -> Iterator[tuple[str, Recording, Documents]]:
    """A cache whose rows are reordered as beams are, and one that takes back the tokens that completed a chunk."""
    chunk = probed.chunk
    order = torch.tensor([2, 0, 0])
    first, second = probed.ids(3, 2 * chunk + 3).split([chunk + 1, chunk + 2], 1), probed.ids(3, 3 * chunk, 1).split([4, 3 * chunk - 4], 1)
    record, documents = _streamed(probed, [first, second], lambda cache, part: cache.reorder_cache(order.to(first[0].device)))
    moved = [[*documents[int(source)][: len(first)], *documents[row][len(first) :]] for row, source in enumerate(order)]
    yield "rows reordered", record, moved
    if any(getattr(layer, "is_sliding", False) for layer in probed.cache().layers) or not probed.config.decode_updates:
        return  # what left a window does not come back, and where tokens may be unwritten nothing is taken back
    first, second = probed.ids(1, 2 * chunk + 2).split([chunk + 2, chunk], 1), probed.ids(1, 3 * chunk, 1).split([chunk, 2 * chunk], 1)
    record, (document,) = _streamed(probed, [first, second], lambda cache, part: cache.crop(-chunk))
    yield "a chunk taken back", record, [[document[0], *document[2:]]]


def many_chunks(probed: Probed) -> Iterator[tuple[str, Recording, Documents]]:
    """Five documents in a row, and sixteen chunks of one, in one call and in two pieces."""
    chunk = probed.chunk
    lengths = [2 * chunk + 1, chunk - 1, 3 * chunk, 2 * chunk + 2, 4 * chunk + 5]
    yield "five documents", *_packed(probed, [lengths])
    record = probed.read(probed.ids(1, 16 * chunk + 3))
    yield "sixteen chunks", record, record.whole()
    yield "sixteen chunks in pieces", *_streamed(probed, [probed.ids(1, 16 * chunk + 3).split([9 * chunk + 4, 7 * chunk - 1], 1)], None)


def _packed(probed: Probed, rows: Sequence[Sequence[int]]) -> tuple[Recording, Documents]:
    """Rows of packed documents of these lengths in one call."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    ids = probed.ids(*positions.shape)
    record = probed.read(ids, position_ids=positions.to(ids.device))
    documents: list[Document] = []
    for row, lengths in enumerate(rows):
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        documents += [[Piece(0, row, start, stop)] for start, stop in itertools.pairwise(starts)]
    return record, documents


def _streamed(
    probed: Probed, parts: Sequence[Sequence[Tensor]], between: Callable[[Any, int], None] | None
) -> tuple[Recording, list[list[Piece]]]:
    """Pieces of ids [B, n] through one cache; `between` is called with the cache after each part but the last."""
    cache, documents, number, known = probed.cache(), [[] for _ in parts[0][0]], 0, 0  # type: ignore[var-annotated]
    with recording(probed.lm, probed.config) as record:
        for part, pieces in enumerate(parts):
            for ids in pieces:
                probed.lm(input_ids=ids, past_key_values=cache, use_cache=True)
                for row, document in enumerate(documents):
                    document.append(Piece(number, row, 0, ids.shape[1], _writes(probed, ids.shape[1], known)))
                number, known = number + 1, known + ids.shape[1]
            if between is not None and part + 1 < len(parts):
                between(cache, part)
    return record, documents


def _writes(probed: Probed, tokens: int, known: int) -> bool:
    """Whether a piece of so many tokens fills chunks: one token that is read alone into a cache counts as generated."""
    return probed.config.decode_updates or tokens > 1 or known == 0


# Judgements


def declared_rule(whole: WholeModel, expected: Any) -> Outcome:
    """A plain reading by every TTT layer that the first one does not differ from."""
    errors = whole.once(plain_deviations)
    first = next(iter(errors))
    return _judged(whole.lm.dtype, {"one row in one call": {first: errors[first]}}, "a reading computes what the settings declare")


def in_batches(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, batches, "padded and unpadded rows each compute what they declare")


def in_pieces(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, pieces, "a text in pieces computes what is declared for the whole")


def take_back(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, steps_back, "rows that move and tokens that are taken back leave nothing behind")


def over_many_chunks(whole: WholeModel, expected: Any) -> Outcome:
    return _held(whole, many_chunks, "sixteen chunks and five documents compute what is declared")


def in_training(whole: WholeModel, expected: Any) -> Outcome:
    """Outputs and gradients of packed rows in training mode."""
    chunk, lm = whole.chunk, whole.lm
    rows = [[2 * chunk + 5, 3 * chunk - 2], [chunk - 1, 2 * chunk, 2 * chunk + 4]]
    lawful, found = _lawful(whole), "training computes what is declared, and its gradient"
    with Probed.of(lm, whole.seed) as probed:
        record, documents = _packed(probed, rows)
        apart = {i for i in lawful if deviation(record, i, probed.layers[i], documents, probed.rule(i)) >= _TOLERANCE[lm.dtype]}
        lawful = [i for i in lawful if i not in apart]
        if not lawful:
            raise NotChecked("packed rows are not what is declared in evaluation either, which other items report")
        probed.training = True
        layers = {i: probed.layers[i] for i in lawful}
        learning = [lm.get_input_embeddings(), *probed.layers.values()]  # the embeddings, so that every layer's input has a gradient
        parameters = [p for module in learning for p in module.parameters() if p.is_floating_point()]
        with overriding(lm.modules(), training=True), overriding(parameters, requires_grad=True), torch.enable_grad():
            record, documents = _packed(probed, rows)
            gradients = gradient_errors(record, layers, documents, probed.rule)
        outputs = {i: deviation(record, i, layer, documents, probed.rule(i)) for i, layer in layers.items()}
    outcome = _judged(lm.dtype, {"in training": outputs}, found)
    if outcome.verdict != "conforms":
        return outcome
    worst = max(((error, name, i) for i, errors in gradients.items() for name, error in errors.items()), default=(0.0, "", 0))
    numbers = {**outcome.numbers, **{f"gradient, layer {i}": errors for i, errors in gradients.items()}}
    limit = _GRADIENT_TOLERANCE[lm.dtype]
    if worst[0] >= limit:
        found = f"in training the gradient by {worst[1]} in layer {worst[2]} is {worst[0]:.0%} off that of what is declared"
    return judged(worst[0] < limit, found, numbers, limit)


def precisions(whole: WholeModel, expected: Any) -> Outcome:
    """A small model with these settings in each precision, over many chunks in one call and in pieces."""
    found: dict[torch.dtype, Outcome] = {}
    for dtype in _TOLERANCE:
        with twin(whole.config) as model, Probed.of(model.to(dtype), whole.seed) as probed:
            try:
                errors = {name: by_layer for scene in (plain, many_chunks) for name, by_layer in probed.deviations(scene).items()}
                found[dtype] = _judged(dtype, errors, "")
            except Exception as error:
                found[dtype] = judged(False, f"it raises {type(error).__name__}: {one_line(error, kind=False)}", {})
    numbers = {f"{_named(dtype)}, {name}": value for dtype, outcome in found.items() for name, value in outcome.numbers.items()}
    failed = [dtype for dtype, outcome in found.items() if outcome.verdict == "deviates"]
    if len(failed) == len(found):
        raise NotChecked("what is declared holds in no precision, which other items report")
    if failed:
        return judged(False, f"in {_named(failed[0])}, {found[failed[0]].found}", numbers, found[failed[0]].tolerance)
    return judged(True, f"what is declared holds in {', '.join(map(_named, found))}", numbers, max(_TOLERANCE.values()))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def through_a_file(whole: WholeModel, expected: Any) -> Outcome:
    """A small model with these settings, written and loaded: its tensors and logits; and a session in the middle of a chunk."""
    with twin(whole.config) as model, Probed.of(model, whole.seed) as probed, tempfile.TemporaryDirectory() as folder:
        chunk = probed.chunk
        ids = probed.ids(1, 5 * chunk)
        known, later = ids.split([2 * chunk + 5, 3 * chunk - 5], 1)
        model.config.inplace_ttt["config"] = probed.config.to_dict()
        right = model(ids, use_cache=False).logits
        with _quiet():
            model.save_pretrained(folder)
            loaded = load(folder)
        changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, loaded.state_dict()[name])]
        numbers: dict[str, Any] = {"tensors changed": changed, "same settings": config_of(loaded) == probed.config}
        off = {"a checkpoint": _difference(loaded(ids, use_cache=False).logits, right)}
        file = Path(folder) / "session.state"
        state = FastWeightState(model)
        state.read(known)
        state.save(file)
        whole_stream = model(later, past_key_values=state.cache, use_cache=True).logits
        try:
            again = FastWeightState.load(file, model)
            off["a session"] = _difference(model(later, past_key_values=again.cache, use_cache=True).logits, whole_stream)
        except InPlaceTTTError as refusal:
            return judged(False, f"a session that was saved does not load: {refusal}", numbers)
    numbers |= {f"logits through {name}": error for name, error in off.items()}
    worst = max(off, key=lambda name: off[name])
    if changed:
        return judged(False, f"a checkpoint does not give back {', '.join(changed[:3])}", numbers, 0)
    found = "a checkpoint and a session come back as they were" if off[worst] < 1e-5 else f"{worst} comes back {off[worst]:.2g} away"
    return judged(off[worst] < 1e-5, found, numbers, 1e-5)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars, which would stand in the middle of the audit's own."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def layer_in_training(bench: Bench, expected: Any) -> Outcome:
    """One layer: what its writes change in training, against evaluation."""
    x, target = bench.tiled(3 * bench.chunk + 5), bench.scale * bench.units(3 * bench.chunk + 5)
    right = bench.response(x, target)
    with bench.mode(True):
        off = error(bench.response(x, target), right)
    found = "training computes what evaluation does" if off < TOLERANCE else f"training reads something {off:.0%} off"
    return judged(off < TOLERANCE, found, {"training against evaluation": off}, TOLERANCE)


def layer_over_many_chunks(bench: Bench, expected: Any) -> Outcome:
    """One layer: what each of fifteen chunks with the same keys reads of the first, by the size of what the second reads."""
    x = bench.tiled(16 * bench.chunk)
    effect = bench.response(x, bench.middle(len(x), 0)).split(bench.chunk)
    reads = [bench.share(part) / bench.diluted(number) for number, part in enumerate(effect) if number]
    off = max(abs(read - 1) for read in reads)
    found = "a write is read by fifteen chunks alike" if off < TOLERANCE else f"one of fifteen chunks reads {off:.0%} more or less"
    return judged(off < TOLERANCE, found, {"read of the first chunk's write, by chunk": reads}, TOLERANCE)


def _lawful(whole: WholeModel) -> list[int]:
    """The TTT layers whose plain reading is what they declare."""
    limit = _TOLERANCE[whole.lm.dtype]
    found = [i for i, error in whole.once(plain_deviations).items() if error < limit]
    if not found:
        raise NotChecked("a plain reading is not what is declared, which other items report")
    return found


def plain_deviations(whole: WholeModel) -> dict[int, float]:
    """By layer, how far one row in one call is from what is declared."""
    with Probed.of(whole.lm, whole.seed) as probed:
        (errors,) = probed.deviations(plain).values()
    return errors


def _held(whole: WholeModel, scene: Scene, found: str) -> Outcome:
    lawful = _lawful(whole)
    with Probed.of(whole.lm, whole.seed) as probed:
        try:
            errors = {name: {i: by_layer[i] for i in lawful} for name, by_layer in probed.deviations(scene).items()}
        except Exception as error:  # in one call it ran
            return judged(False, f"the model raises {type(error).__name__}: {one_line(error, kind=False)}", {})
    return _judged(whole.lm.dtype, errors, found)


def _judged(dtype: torch.dtype, errors: dict[str, dict[int, float]], found: str) -> Outcome:
    limit = _TOLERANCE[dtype]
    error, name, layer = max((float("inf") if e != e else e, name, i) for name, by_layer in errors.items() for i, e in by_layer.items())
    numbers = {name: max(by_layer.values()) for name, by_layer in errors.items()}
    if error >= limit:
        found = f"{name}, layer {layer} gives outputs that are {error:.2g} of what is read off what its settings declare"
    return judged(error < limit, found, numbers, limit)
