"""From a recipe's documents to rows: tokenised once, split by document, packed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InPlaceTTTError
from ..tasks.recall import recall_data
from .data_report import DataReport, Tally, make_report
from .packing import count, lay_out, pack
from .recipe import Data, Recipe
from .sources import TOKENS, Source, find, open_source, read_error, root_cause
from .tokenising import digest_of, token_features, tokenise
from .ulysses import check_sharing

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset, Features, IterableDataset

SHUFFLE_BUFFER = 64
"""Documents of a source that a stream holds to shuffle them; the files of a source are shuffled too."""
SAMPLED_ROWS = 16
"""Rows of a stream that its report counts."""
_FORMAT = 1
"""Part of every cache key; raise it when the same input gives other tokens or rows."""
_BATCH = 32
"""Documents, or rows, handled at a time: one may have a million tokens."""
_STREAM_BATCH = 4


@dataclass(frozen=True)
class TrainingData:
    """train and validation: rows with input_ids, position_ids and labels, each a list of `sequence_length` integers.

    train is a stream where the recipe says so; its rows come in the same order every time, so that skipping the rows that
    were read resumes it exactly (and so does its state_dict).
    """

    train: Dataset | IterableDataset
    validation: Dataset | None
    report: DataReport


def build_data(recipe: Recipe, tokenizer: Any, chunk_size: int) -> TrainingData:
    """The rows of a run. `tokenizer` is unused with `data.recall`. Raises InPlaceTTTError for data that cannot train.

    Every process of a run calls it: of those that see one cache, one tokenises and packs while the others wait at its lock,
    however long it takes, and then read the cache.
    """
    data = recipe.data
    check_sharing(recipe, chunk_size)
    build = _recall if data.recall is not None else _streamed if data.streaming else _cached
    return build(_Job(recipe, tokenizer, chunk_size))


def _recall(job: _Job) -> TrainingData:
    data, task = job.recipe.data, job.recipe.data.recall
    assert task is not None
    known = (job.recipe.model.config or {}).get("vocab_size", task.vocabulary)
    if known < task.vocabulary:
        raise InPlaceTTTError(f"data.recall.vocabulary is {task.vocabulary}, but model.config.vocab_size is {known}; make them equal.")
    make = functools.partial(recall_data, pairs=task.pairs, vocabulary=task.vocabulary, length=data.sequence_length, seed=data.seed)
    train = make(task.rows)
    validation = make(data.validation_documents, held_out=True) if data.validation_documents else None
    counts = count([data.sequence_length] * task.rows, data.sequence_length, job.chunk_size)
    sha256 = hashlib.sha256("".join(map(digest_of, train[TOKENS])).encode()).hexdigest()
    sizes = _sizes([data.sequence_length] * data.validation_documents, job)
    report = make_report(job.recipe, counts, Tally(task.rows, sha256=sha256), [], sizes)
    return TrainingData(train, validation, report)


@dataclass(frozen=True)
class _Job:
    """What every step of building needs."""

    recipe: Recipe
    tokenizer: Any
    chunk_size: int

    @property
    def align(self) -> int:
        return self.chunk_size if self.recipe.parallel.sequence_parallel > 1 else 1

    @property
    def pad_token(self) -> int:
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    @functools.cached_property
    def tokenizer_key(self) -> str:
        """Differs for tokenizers that read a text differently."""
        t = self.tokenizer
        backend = getattr(t, "backend_tokenizer", None)
        inner: Any = sorted(t.get_vocab().items())
        if backend is not None:
            inner = {key: value for key, value in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")}
        return _key(type(t).__name__, inner, t.eos_token_id, t.bos_token_id, getattr(t, "add_bos_token", None))


def _cached(job: _Job) -> TrainingData:
    """Tokens and rows as files in the cache, read from there while training."""
    import datasets
    from filelock import FileLock

    data = job.recipe.data
    cache = Path(data.cache or datasets.config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"inplace-ttt-{_key(dataclasses.asdict(data))}.lock"):
            return _from_files(job, cache)
    except InPlaceTTTError:
        raise
    except Exception as error:
        if not isinstance(cause := root_cause(error), OSError):
            raise
        raise InPlaceTTTError(f"cannot keep the tokenised data in {cache}: {cause.strerror or cause}; set data.cache.") from None


def _from_files(job: _Job, cache: Path) -> TrainingData:
    import numpy as np
    from datasets import concatenate_datasets

    data = job.recipe.data
    sources, held_sources = find(data.train, data.format, "train"), find(data.validation, data.format, "validation")
    documents = concatenate_datasets([_tokenised(job, source, cache) for source in sources])
    order, empty = _order(documents, data.shuffle, data.seed)
    if held_sources:
        held = concatenate_datasets([_tokenised(job, source, cache) for source in held_sources])
        held_order, _ = _order(held, False, data.seed)
    else:
        held, (held_order, order) = documents, _hold_out(order, data.validation_documents, data.seed)
    digests = set(held.select(held_order)["digest"])
    sha, repeated = hashlib.sha256(), []
    chosen = np.zeros(len(documents), dtype=bool)
    chosen[order] = True
    for index, digest in enumerate(_column(documents, "digest")):
        if chosen[index] and digest in digests:
            repeated.append(index)
        elif chosen[index]:
            sha.update(digest.encode())
    order = order[~np.isin(order, repeated)]
    lengths, held_lengths = (np.fromiter(_column(d, "length"), np.int64)[o] for d, o in ((documents, order), (held, held_order)))
    counts = count(lengths.tolist(), data.sequence_length, job.chunk_size, job.align)
    tally = Tally(len(order), empty, len(repeated), sha.hexdigest())
    report = make_report(job.recipe, counts, tally, [*sources, *held_sources], _sizes(held_lengths.tolist(), job))
    validation = _rows(job, held, held_order, held_lengths, cache) if len(held_order) else None
    return TrainingData(_rows(job, documents, order, lengths, cache), validation, report)


def _order(documents: Dataset, shuffle: bool, seed: int) -> tuple[np.ndarray, int]:
    """The documents that are not empty, in the order of packing, and how many are."""
    import numpy as np

    (filled,) = np.nonzero(np.fromiter(_column(documents, "length"), np.int64))
    order = np.random.default_rng([seed, 0]).permutation(filled) if shuffle else filled
    return order, len(documents) - len(filled)


def _hold_out(order: np.ndarray, wanted: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`wanted` documents chosen by the seed, and the rest in its order."""
    import numpy as np

    if 0 < len(order) <= wanted:
        raise InPlaceTTTError(
            f"data.validation_documents holds {wanted} documents out of {len(order)}, which leaves none to train on; lower it."
        )
    held = np.sort(np.random.default_rng([seed, 1]).permutation(np.sort(order))[:wanted])
    return held, order[~np.isin(order, held)]


def _tokenised(job: _Job, source: Source, cache: Path) -> Dataset:
    """Its documents as input_ids, length and digest; from the cache where they were tokenised before."""
    records, column = open_source(source, job.recipe.data, streaming=False)
    key = _key(_FORMAT, records._fingerprint, column, job.tokenizer_key)
    return records.map(
        functools.partial(tokenise, column=column, tokenizer=job.tokenizer, source=source.name),
        batched=True,
        batch_size=_BATCH,
        writer_batch_size=_BATCH,
        remove_columns=[column],
        features=token_features(),
        new_fingerprint=key,
        cache_file_name=str(cache / f"inplace-ttt-tokens-{key}.arrow"),
        desc=f"Tokenising {source.name}",
    )


def _rows(job: _Job, documents: Dataset, order: np.ndarray, lengths: np.ndarray, cache: Path) -> Dataset:
    """The packed rows of `documents` in that order, as a file in the cache; `lengths` are theirs in that order."""
    import numpy as np
    from datasets import Dataset

    length = job.recipe.data.sequence_length
    ends = ((row[0].document, row[0].start, row[-1].document + 1) for row in lay_out(lengths.tolist(), length, job.align))
    plan = np.fromiter(ends, np.dtype((np.int64, 3)))
    key = _key(_FORMAT, documents._fingerprint, hashlib.sha256(order.tobytes()).hexdigest(), length, job.pad_token, job.align)
    chosen = documents.select(order).select_columns([TOKENS]).with_format("numpy")
    columns = {"first": plan[:, 0], "start": plan[:, 1], "stop": plan[:, 2]}
    return Dataset.from_dict(columns).map(
        functools.partial(_pack_rows, documents=chosen, length=length, pad_token=job.pad_token, align=job.align),
        batched=True,
        batch_size=_BATCH,
        writer_batch_size=_BATCH,
        remove_columns=list(columns),
        features=_row_features(),
        new_fingerprint=key,
        cache_file_name=str(cache / f"inplace-ttt-rows-{key}.arrow"),
        desc="Packing",
    )


def _pack_rows(plan: Mapping[str, list[int]], documents: Dataset, length: int, pad_token: int, align: int) -> dict[str, np.ndarray]:
    """Rows [batch, length], each of documents first:stop, from token `start` of the first on."""
    import numpy as np

    rows = []
    for first, start, stop in zip(plan["first"], plan["start"], plan["stop"], strict=True):
        head, *others = documents[first:stop][TOKENS]
        rows.append(next(pack([head[start:], *others], length, pad_token, align)))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _streamed(job: _Job) -> TrainingData:
    """Rows made while training; only validation is made beforehand."""
    from datasets import Dataset, IterableDataset

    data, length = job.recipe.data, job.recipe.data.sequence_length
    sources, held_sources = find(data.train, data.format, "train"), find(data.validation, data.format, "validation")
    documents = _stream(job, sources, data.shuffle)
    kept = _stream(job, held_sources, False) if held_sources else documents.take(data.validation_documents)
    held = list(_readable(kept, held_sources or sources, data))
    make_rows = functools.partial(pack, row_length=length, pad_token=job.pad_token, align=job.align)
    reader = _Reader(documents, sources, data, frozenset(document["digest"] for document in held), make_rows)
    rows = list(make_rows(document[TOKENS] for document in held))
    validation = Dataset.from_list(rows, features=_row_features()) if rows else None
    sizes = _sizes([document["length"] for document in held], job)
    lengths, sha, room = [], hashlib.sha256(), SAMPLED_ROWS * length
    for document in reader.documents_to_train_on():
        lengths.append(document["length"])
        sha.update(document["digest"].encode())
        room -= document["length"]
        if room <= 0:
            break
    counts = count(lengths, length, job.chunk_size, job.align)
    tally = Tally(len(lengths), sha256=sha.hexdigest(), sampled=room <= 0)
    report = make_report(job.recipe, counts, tally, [*sources, *held_sources], sizes)
    return TrainingData(IterableDataset.from_generator(reader, features=_row_features()), validation, report)


@dataclass(frozen=True)
class _Reader:
    """The rows of a stream, from its start whenever it is called."""

    documents: IterableDataset
    sources: list[Source]
    data: Data
    held: frozenset[str]
    make_rows: Callable[[Iterable[Sequence[int]]], Iterator[dict[str, np.ndarray]]]

    def documents_to_train_on(self) -> Iterator[dict[str, Any]]:
        return (d for d in _readable(self.documents, self.sources, self.data) if d["digest"] not in self.held)

    def __call__(self) -> Iterator[dict[str, list[int]]]:
        for row in self.make_rows(document[TOKENS] for document in self.documents_to_train_on()):
            yield {name: values.tolist() for name, values in row.items()}


def _stream(job: _Job, sources: Iterable[Source], shuffle: bool) -> IterableDataset:
    """Documents that are not empty as input_ids, length and digest, tokenised as they are read; shuffled sources take turns."""
    from datasets import concatenate_datasets, interleave_datasets

    streams = []
    for source in sources:
        records, column = open_source(source, job.recipe.data, streaming=True)
        if shuffle:
            records = records.shuffle(seed=job.recipe.data.seed, buffer_size=SHUFFLE_BUFFER)
        to_tokens = functools.partial(tokenise, column=column, tokenizer=job.tokenizer, source=source.name)
        streams.append(records.map(to_tokens, batched=True, batch_size=_STREAM_BATCH, remove_columns=[column], features=token_features()))
    stopping: Any = "all_exhausted_without_replacement"
    documents = interleave_datasets(streams, stopping_strategy=stopping) if shuffle else concatenate_datasets(streams)
    return documents.filter(_has_tokens)


def _has_tokens(document: Mapping[str, Any]) -> bool:
    return document["length"] > 0


def _readable(documents: IterableDataset, sources: Sequence[Source], data: Data) -> Iterator[dict[str, Any]]:
    """The documents of a stream; where it breaks off, the error names the file."""
    try:
        yield from documents
    except InPlaceTTTError:
        raise
    except Exception as error:
        raise read_error(sources, data, error) from None


def _sizes(lengths: list[int], job: _Job) -> dict[str, int] | None:
    """What the report says of validation."""
    counts = count(lengths, job.recipe.data.sequence_length, job.chunk_size, job.align)
    return {"documents": len(lengths), "tokens": counts.tokens, "rows": counts.rows} if lengths else None


def _column(documents: Dataset, name: str) -> Iterator[Any]:
    """The values of a column, a few thousand at a time."""
    for batch in documents.select_columns([name]).iter(batch_size=4096):
        yield from batch[name]


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _row_features() -> Features:
    from datasets import Features, List, Value

    return Features({name: List(Value("int32")) for name in ("input_ids", "position_ids", "labels")})
