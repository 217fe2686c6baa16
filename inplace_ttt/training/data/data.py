"""Builds the rows of a run from a recipe's documents: tokenize once, hold out documents, pack."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

from ...errors import InPlaceTTTError
from ...tasks.recall import recall_data
from ...texts.json_lines import TOKENS
from ...texts.sources import Source
from ..recipe.recipe import Recipe
from ..ulysses import check_sharing
from .building import Job, TrainingData, count_unbegun, held_out_sizes, mixture_of, row_features, sources_of
from .cached import from_cache
from .packing import Size, count, pack
from .report import Tally, make_report
from .streams import Documents, RowStream, open_stream
from .tokenizing import digest_of

SAMPLED_ROWS = 16
"""Number of a stream's first rows that its report counts."""


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
    build = _recall if data.recall is not None else _streamed if data.streaming else from_cache
    return build(Job(recipe, tokenizer, chunk_size))


def _recall(job: Job) -> TrainingData:
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
    sizes = held_out_sizes([Size(data.sequence_length)] * data.validation_documents, job)
    report = make_report(job.recipe, counts, Tally(task.rows, sha256=sha256), [], sizes)
    return TrainingData(train, validation, report, lambda: iter(train[TOKENS]))


def _streamed(job: Job) -> TrainingData:
    """Makes the rows while training; only validation is made beforehand."""
    from datasets import Dataset

    data, length = job.recipe.data, job.recipe.data.sequence_length
    sources, held_sources = (
        sources_of(data, "train"),
        sources_of(data, "validation"),
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
    validation = Dataset.from_list(rows, features=row_features()) if rows else None
    read, of_source, sha, room = list[Size](), [], hashlib.sha256(), SAMPLED_ROWS * length
    for _, source, document in documents.read():
        read.append(_size(document))
        of_source.append(source)
        sha.update(document["digest"].encode())
        room -= document["length"]
        if room <= 0:
            break
    mixture = mixture_of(sources, data, [size.length for size in read], of_source)
    unbegun = count_unbegun((size.lead for size in read), job)
    tally = Tally(len(read), unbegun=unbegun, sha256=sha.hexdigest(), sampled=room <= 0, mixture=mixture)
    counts = count(read, length, job.chunk_size, job.align)
    sizes = held_out_sizes([_size(document) for document in held], job)
    report = make_report(job.recipe, counts, tally, [*sources, *held_sources], sizes)
    return TrainingData(
        RowStream(documents, length, job.pad_token, job.align, job.begins),
        validation,
        report,
        lambda: (document[TOKENS] for _, _, document in documents.read()),
        job.align,
        job.begins,
    )


def _size(document: Mapping[str, Any]) -> Size:
    return Size(document["length"], document["lead"])
