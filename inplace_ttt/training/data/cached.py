"""Builds the rows as files in a cache: tokenizes once, then packs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InPlaceTTTError
from ...texts.json_lines import TOKENS
from ...texts.records import open_source, root_cause
from ...texts.sources import Source
from .building import (
    Job,
    TrainingData,
    count_unbegun,
    held_out_sizes,
    key_of,
    mixture_of,
    row_features,
    sources_of,
)
from .mixture import mixed
from .packing import Size, count, lay_out, pack
from .report import Tally, make_report
from .tokenizing import token_features, tokenize

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

_FORMAT = 3
"""Part of every cache key. Increase it when the code makes other tokens or rows from the same input."""
_BATCH = 32
"""Documents, or rows, per batch. It is small because one document may have a million tokens."""
_BYTES_A_PROCESS = 32_000_000
"""Bytes of a source that justify one more process."""


def from_cache(job: Job) -> TrainingData:
    """Writes tokens and rows to files in the cache, from which training reads them."""
    import datasets
    from filelock import FileLock

    data = job.recipe.data
    cache = Path(data.cache or datasets.config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"inplace-ttt-{key_of(dataclasses.asdict(data))}.lock"):
            return _from_files(job, cache)
    except InPlaceTTTError:
        raise
    except Exception as error:
        if not isinstance(cause := root_cause(error), OSError):
            raise
        raise InPlaceTTTError(
            f"cannot keep the tokenized data in {cache}: {cause.strerror or cause}; set data.cache."
        ) from None


def _from_files(job: Job, cache: Path) -> TrainingData:
    import numpy as np
    from datasets import concatenate_datasets

    data = job.recipe.data
    sources, held_sources = (
        sources_of(data, "train"),
        sources_of(data, "validation"),
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
    mixture = mixture_of(sources, data, sizes[:, 0], np.searchsorted(source_ends, order, side="right"))
    tally = Tally(
        len(order), empty, count_unbegun(sizes[:, 1], job), len(repeated), sha.hexdigest(), mixture=mixture
    )
    report = make_report(
        job.recipe,
        counts,
        tally,
        [*sources, *held_sources],
        held_out_sizes([*map(Size._make, held_sizes.tolist())], job),
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


def _tokenized(job: Job, source: Source, cache: Path) -> Dataset:
    """Returns the documents as input_ids, length, lead and digest; from the cache if it holds them."""
    data = job.recipe.data
    records, column = open_source(source, data.reading, streaming=False)
    key = key_of(_FORMAT, records._fingerprint, column, job.tokenizer_key)
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


def _rows(job: Job, documents: Dataset, order: np.ndarray, sizes: np.ndarray, cache: Path) -> Dataset:
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
    key = key_of(
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
        features=row_features(),
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


def _sizes_of(documents: Dataset) -> np.ndarray:
    """Returns length and lead of each document, int64 [documents, 2]."""
    import numpy as np

    return np.stack([np.fromiter(_column(documents, name), np.int64) for name in ("length", "lead")], axis=1)


def _column(documents: Dataset, name: str) -> Iterator[Any]:
    """Yields the values of a column, and loads a few thousand at a time."""
    for batch in documents.select_columns([name]).iter(batch_size=4096):
        yield from batch[name]
