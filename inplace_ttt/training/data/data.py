"""Builds the rows of a run from a recipe's documents: tokenize once, hold out documents, pack."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InPlaceTTTError
from ...files.text import KNOWN_IDS, begins_of
from ...tasks.recall import recall_data
from ...texts.json_lines import TOKENS
from ...texts.records import open_source, root_cause
from ...texts.sources import Source, find
from ..recipe.data_section import Data
from ..recipe.recipe import Recipe
from ..ulysses import check_sharing
from .mixture import Given, describe, mixed
from .packing import Size, count, lay_out, pack
from .report import DataReport, Tally, make_report
from .streams import Documents, RowStream, open_stream
from .tokenizing import digest_of, token_features, tokenize

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset, Features

SAMPLED_ROWS = 16
"""Number of a stream's first rows that its report counts."""
_FORMAT = 3
"""Part of every cache key. Increase it when the code makes other tokens or rows from the same input."""
_BATCH = 32
"""Documents, or rows, per batch. It is small because one document may have a million tokens."""
_BYTES_A_PROCESS = 32_000_000
"""Bytes of a source that justify one more process."""


@dataclass(frozen=True)
class TrainingData:
    """The rows of a run and the documents behind them.

    A row holds `input_ids`, `position_ids` and `labels`, each a list of `sequence_length` integers.

    Attributes:
        train: rows to train on. With `data.streaming` they are a stream, which yields the same order each
            time.
        validation: held-out rows; None if nothing is held out.
        report: counts and warnings about the data.
        documents: returns an iterator over the token ids of the training documents, in the order of packing.
        align: each document starts on a multiple of this many tokens in its row.
        begins: token ids of the special tokens that begin every text. If a document
            begins with them, so does each of its pieces.
    """

    train: Dataset | RowStream
    validation: Dataset | None
    report: DataReport
    documents: Callable[[], Iterator[Sequence[int]]]
    align: int = 1
    begins: tuple[int, ...] = ()


def build_data(recipe: Recipe, tokenizer: Any, chunk_size: int) -> TrainingData:
    """Returns the rows of a run.

    Every process of a run calls it. Among the processes that share a cache, one tokenizes and packs. The
    others wait for the cache's lock without a time limit, and then read the cache.

    Args:
        recipe: the run's recipe.
        tokenizer: the model's tokenizer; unused with `data.recall`.
        chunk_size: tokens per chunk.

    Raises:
        InPlaceTTTError: if the data cannot be read, cannot train conv and P, or does not fit the ranks that
            share rows.
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
        raise InPlaceTTTError(
            f"data.recall.vocabulary is {task.vocabulary}, but model.config.vocab_size is {known}; make "
            "them equal."
        )
    make = functools.partial(
        recall_data, pairs=task.pairs, vocabulary=task.vocabulary, length=data.sequence_length, seed=data.seed
    )
    train = make(task.rows)
    validation = make(data.validation_documents, held_out=True) if data.validation_documents else None
    counts = count([Size(data.sequence_length)] * task.rows, data.sequence_length, job.chunk_size)
    sha256 = hashlib.sha256("".join(map(digest_of, train[TOKENS])).encode()).hexdigest()
    sizes = _held_out_sizes([Size(data.sequence_length)] * data.validation_documents, job)
    report = make_report(job.recipe, counts, Tally(task.rows, sha256=sha256), [], sizes)
    return TrainingData(train, validation, report, lambda: iter(train[TOKENS]))


@dataclass(frozen=True)
class _Job:
    """The inputs of every step of building the data."""

    recipe: Recipe
    tokenizer: Any
    chunk_size: int

    @property
    def align(self) -> int:
        return self.chunk_size if self.recipe.parallel.sequence_parallel_size > 1 else 1

    @property
    def pad_token(self) -> int:
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        return tuple(begins_of(self.tokenizer))

    @functools.cached_property
    def tokenizer_key(self) -> str:
        """A key that differs for tokenizers that encode a text differently."""
        t = self.tokenizer
        backend = getattr(t, "backend_tokenizer", None)
        inner: Any = sorted(t.get_vocab().items())
        if backend is not None:
            inner = {
                key: value
                for key, value in json.loads(backend.to_str()).items()
                if key not in ("truncation", "padding")
            }
        return _key(
            type(t).__name__,
            inner,
            t.eos_token_id,
            t.bos_token_id,
            getattr(t, "add_bos_token", None),
            getattr(t, KNOWN_IDS, None),
        )


def _cached(job: _Job) -> TrainingData:
    """Writes tokens and rows to files in the cache, from which training reads them."""
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
        raise InPlaceTTTError(
            f"cannot keep the tokenized data in {cache}: {cause.strerror or cause}; set data.cache."
        ) from None


def _from_files(job: _Job, cache: Path) -> TrainingData:
    import numpy as np
    from datasets import concatenate_datasets

    data = job.recipe.data
    sources, held_sources = (
        _sources(data, "train"),
        _sources(data, "validation"),
    )
    tokenized = [_tokenized(job, source, cache) for source in sources]
    documents, source_ends = concatenate_datasets(tokenized), np.cumsum([len(part) for part in tokenized])
    order, empty = _order(documents, data.shuffle, data.seed)
    if held_sources:
        held = concatenate_datasets([_tokenized(job, source, cache) for source in held_sources])
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
    all_sizes, held_sizes = _sizes_of(documents), _sizes_of(held)[held_order]
    if data.weights:
        own = np.searchsorted(source_ends, order, side="right")
        orders = [order[own == number] for number in range(len(sources))]
        order = mixed(orders, all_sizes[:, 0], data.weights, data.seed if data.shuffle else None)
    sizes = all_sizes[order]
    counts = count(map(Size._make, sizes.tolist()), data.sequence_length, job.chunk_size, job.align)
    mixture = _mixture(sources, data, sizes[:, 0], np.searchsorted(source_ends, order, side="right"))
    tally = Tally(
        len(order), empty, _unbegun(sizes[:, 1], job), len(repeated), sha.hexdigest(), mixture=mixture
    )
    report = make_report(
        job.recipe,
        counts,
        tally,
        [*sources, *held_sources],
        _held_out_sizes([*map(Size._make, held_sizes.tolist())], job),
    )
    validation = _rows(job, held, held_order, held_sizes, cache) if len(held_order) else None
    return TrainingData(
        _rows(job, documents, order, sizes, cache),
        validation,
        report,
        lambda: (documents[int(number)][TOKENS] for number in order),
        job.align,
        job.begins,
    )


def _sources(data: Data, role: str) -> list[Source]:
    """Returns the sources that `data.train` or `data.validation` (the role) names."""
    return [find(name, data.reading, f"data.{role}") for name in getattr(data, role)]


def _order(documents: Dataset, shuffle: bool, seed: int) -> tuple[np.ndarray, int]:
    """Returns the indices of the nonempty documents in the order of packing, and the count of empty ones."""
    import numpy as np

    (filled,) = np.nonzero(np.fromiter(_column(documents, "length"), np.int64))
    order = np.random.default_rng([seed, 0]).permutation(filled) if shuffle else filled
    return order, len(documents) - len(filled)


def _hold_out(order: np.ndarray, wanted: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of `wanted` documents, drawn with the seed, and the other ones in their order."""
    import numpy as np

    if 0 < len(order) <= wanted:
        raise InPlaceTTTError(
            f"data.validation_documents holds out {wanted} of {len(order)} documents, which leaves none to "
            "train on; lower it."
        )
    held = np.sort(np.random.default_rng([seed, 1]).permutation(np.sort(order))[:wanted])
    return held, order[~np.isin(order, held)]


def _tokenized(job: _Job, source: Source, cache: Path) -> Dataset:
    """Returns the documents as input_ids, length, lead and digest; from the cache if it holds them."""
    data = job.recipe.data
    records, column = open_source(source, data.reading, streaming=False)
    key = _key(_FORMAT, records._fingerprint, column, job.tokenizer_key)
    processes = data.processes or min(os.cpu_count() or 1, records.data.nbytes // _BYTES_A_PROCESS)
    return records.map(
        functools.partial(tokenize, column=column, tokenizer=job.tokenizer, source=source.name),
        batched=True,
        batch_size=_BATCH,
        writer_batch_size=_BATCH,
        remove_columns=[column],
        features=token_features(),
        num_proc=min(processes, len(records)) if processes > 1 else None,
        new_fingerprint=key,
        cache_file_name=str(cache / f"inplace-ttt-tokens-{key}.arrow"),
        desc=f"Tokenizing {source.name}",
    )


def _rows(job: _Job, documents: Dataset, order: np.ndarray, sizes: np.ndarray, cache: Path) -> Dataset:
    """Returns the packed rows of `documents`, as a file in the cache.

    Args:
        job: the inputs of building.
        documents: tokenized documents.
        order: int64 [n], numbers of the documents to pack.
        sizes: int64 [n, 2], length and lead of these documents, in this order.
        cache: folder of the file.
    """
    import numpy as np
    from datasets import Dataset

    length = job.recipe.data.sequence_length
    pieces = lay_out(map(Size._make, sizes.tolist()), length, job.align)
    ends = ((row[0].document, row[0].start, row[-1].document + 1) for row in pieces)
    plan = np.fromiter(ends, np.dtype((np.int64, 3)))
    key = _key(
        _FORMAT,
        documents._fingerprint,
        hashlib.sha256(order.tobytes()).hexdigest(),
        length,
        job.pad_token,
        job.align,
        job.begins,
    )
    chosen = documents.select(order).select_columns([TOKENS]).with_format("numpy")
    columns = {"first": plan[:, 0], "start": plan[:, 1], "stop": plan[:, 2]}
    return Dataset.from_dict(columns).map(
        functools.partial(
            _pack_rows,
            documents=chosen,
            length=length,
            pad_token=job.pad_token,
            align=job.align,
            begins=job.begins,
        ),
        batched=True,
        batch_size=_BATCH,
        writer_batch_size=_BATCH,
        remove_columns=list(columns),
        features=_row_features(),
        new_fingerprint=key,
        cache_file_name=str(cache / f"inplace-ttt-rows-{key}.arrow"),
        desc="Packing",
    )


def _pack_rows(
    plan: Mapping[str, list[int]],
    documents: Dataset,
    length: int,
    pad_token: int,
    align: int,
    begins: Sequence[int],
) -> dict[str, np.ndarray]:
    """Returns the packed rows [batch, length] of a batch of a plan.

    Args:
        plan: for each row the documents `first:stop` that it holds. It begins at token `start` of the first.
        documents: token ids of all documents, in the order of packing.
        length: tokens per row.
        pad_token: id that fills up a row.
        align: documents start on multiples of this many tokens.
        begins: special tokens that begin every text.
    """
    import numpy as np

    rows, before = [], plan["first"][0]
    held = documents[before : plan["stop"][-1]][TOKENS]  # one read for all rows: a book may span them
    for first, start, stop in zip(plan["first"], plan["start"], plan["stop"], strict=True):
        rows.append(
            next(pack(held[first - before : stop - before], length, pad_token, align, begins, used=start))
        )
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _streamed(job: _Job) -> TrainingData:
    """Makes the rows while training; only validation is made beforehand."""
    from datasets import Dataset

    data, length = job.recipe.data, job.recipe.data.sequence_length
    sources, held_sources = (
        _sources(data, "train"),
        _sources(data, "validation"),
    )

    def stream(sources: list[Source], shuffle: bool, **settings: Any) -> Documents:
        return Documents(
            tuple(open_stream(source, data, job.tokenizer, shuffle) for source in sources), data, **settings
        )

    documents = stream(sources, data.shuffle, weights=data.weights, turns=data.shuffle)
    kept = (
        stream(held_sources, False).read()
        if held_sources
        else itertools.islice(documents.read(), data.validation_documents)
    )
    held = [document for _, _, document in kept]
    digests = frozenset(document["digest"] for document in held)
    documents = dataclasses.replace(documents, wanted=lambda document: document["digest"] not in digests)
    rows = list(pack((document[TOKENS] for document in held), length, job.pad_token, job.align, job.begins))
    validation = Dataset.from_list(rows, features=_row_features()) if rows else None
    read, of_source, sha, room = list[Size](), [], hashlib.sha256(), SAMPLED_ROWS * length
    for _, source, document in documents.read():
        read.append(_size(document))
        of_source.append(source)
        sha.update(document["digest"].encode())
        room -= document["length"]
        if room <= 0:
            break
    mixture = _mixture(sources, data, [size.length for size in read], of_source)
    unbegun = _unbegun((size.lead for size in read), job)
    tally = Tally(len(read), unbegun=unbegun, sha256=sha.hexdigest(), sampled=room <= 0, mixture=mixture)
    counts = count(read, length, job.chunk_size, job.align)
    sizes = _held_out_sizes([_size(document) for document in held], job)
    report = make_report(job.recipe, counts, tally, [*sources, *held_sources], sizes)
    return TrainingData(
        RowStream(documents, length, job.pad_token, job.align, job.begins),
        validation,
        report,
        lambda: (document[TOKENS] for _, _, document in documents.read()),
        job.align,
        job.begins,
    )


def _mixture(
    sources: Sequence[Source], data: Data, lengths: Iterable[int], of_source: Iterable[int]
) -> list[dict[str, Any]]:
    """Returns the report's entry of each source, from the documents' lengths and source numbers."""
    import numpy as np

    sizes, numbers = np.fromiter(lengths, np.int64), np.fromiter(of_source, np.int64)
    given = [Given(int((numbers == n).sum()), int(sizes[numbers == n].sum())) for n in range(len(sources))]
    return describe(sources, data.weights, given)


def _held_out_sizes(sizes: list[Size], job: _Job) -> dict[str, int] | None:
    """Returns the report's counts of validation; None if nothing is held out."""
    counts = count(sizes, job.recipe.data.sequence_length, job.chunk_size, job.align)
    return {"documents": len(sizes), "tokens": counts.tokens, "rows": counts.rows} if sizes else None


def _unbegun(leads: Iterable[int], job: _Job) -> int:
    """Returns the number of documents that lack the special tokens that begin every text."""
    return sum(lead == 0 for lead in leads) if job.begins else 0


def _size(document: Mapping[str, Any]) -> Size:
    return Size(document["length"], document["lead"])


def _sizes_of(documents: Dataset) -> np.ndarray:
    """Returns length and lead of each document, int64 [documents, 2]."""
    import numpy as np

    return np.stack([np.fromiter(_column(documents, name), np.int64) for name in ("length", "lead")], axis=1)


def _column(documents: Dataset, name: str) -> Iterator[Any]:
    """Yields the values of a column, and loads a few thousand at a time."""
    for batch in documents.select_columns([name]).iter(batch_size=4096):
        yield from batch[name]


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _row_features() -> Features:
    from datasets import Features, List, Value

    return Features({name: List(Value("int32")) for name in ("input_ids", "position_ids", "labels")})
