"""Measures how often a model answers questions about invented facts that it read before.

Every document states its own facts (`tasks.facts`), spread over its beginning, and continues with text. After
each distance the questions are put to copies of the session, so that no question reads an earlier answer.
exact_match counts the answers with which greedy decoding would begin. multiple_choice counts the answers that
are likelier, per token, than every other one that the document states.

The readings:

- on: with writes.
- off: without writes.
- state_only: the fast weights of on, with an empty KV cache.
- mismatched: the next document's fast weights and window, which hold other facts.
- bm25 (only with a window): without writes; BM25 retrieves a piece of text for the question.
- full (only with a window): without writes, with full attention.

Wherever attention begins anew, the special tokens that begin every text (a BOS) come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError, how_to_install
from ..layer.overrides import with_config
from ..reports.statistics import Mean, wilson
from ..surgery import config_of, fast_weights
from ..tasks.facts import CHANGED, KINDS, NEVER_TOLD, Encode, Facts, apart, invent
from .fact_sessions import Answer, sessions
from .protocol import Protocol, progress_bar

READINGS = ("on", "state_only", "mismatched", "off", "bm25", "full")


def recall_of_facts(
    model: PreTrainedModel,
    fillers: Sequence[Tensor],
    encode: Encode,
    records: int,
    distances: Sequence[int],
    protocol: Protocol,
    *,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Measures shares of exact matches and right choices, by reading, distance and kind of question.

    Where a model's positions end, a reading drops its KV cache and continues at position 0. The reading full
    ends there.

    Args:
        model: a converted model.
        fillers: token ids [T] of a text per document, about `document_tokens` of them; more are cut off.
        encode: turns text into token ids without special tokens.
        records: number of invented places per document.
        distances: numbers of tokens between the stated facts and the questions.
        protocol: settings of the reading.
        seed: seed of the facts.
        progress: show a bar on stderr.

    Returns:
        JSON object with the keys of docs/evaluate.md.

    Raises:
        InPlaceTTTError: if a text is too short, or rank-bm25 is not installed.
    """
    if protocol.window is not None and find_spec("rank_bm25") is None:
        raise InPlaceTTTError(f"the reading bm25 needs the package rank-bm25; {how_to_install('eval')}.")
    distances = sorted(dict.fromkeys(distances))
    told = _invented(records, len(fillers), seed)
    beginning = _beginning(told, encode, config_of(model).chunk_size)
    length = beginning + distances[-1]
    documents = [
        _document(facts, filler, encode, beginning, length)
        for facts, filler in zip(told, fillers, strict=True)
    ]
    if missing := length - min(map(len, documents)):
        raise InPlaceTTTError(
            f"{records} records and a distance of {distances[-1]:,} need documents of {length:,} tokens, "
            f"but one lacks {missing:,} "
            f"of them; give more text, fewer --facts, or a shorter distance."
        )
    rows = torch.stack(documents)
    found: dict[tuple[str, int], list[list[Answer]]] = {}  # document by document
    longest = max(
        len(encode(apart(f"{q.prompt} {option}")))
        for facts in told
        for q in facts.questions
        for option in q.compared
    )
    total = (
        sum(len(facts.questions) for facts in told)
        * len(distances)
        * (len(READINGS) - 2 * (protocol.window is None))
    )
    with (
        progress_bar("facts", total, progress, unit="question") as bar,
        with_config(fast_weights(model).values(), prompt_write=None),  # the text holds no prompt
    ):
        for group in torch.arange(len(rows)).tensor_split(_groups(len(rows), protocol.batch_size)):
            for session in sessions(model, protocol, longest):
                for distance in distances:
                    if not session.read(rows[group, : beginning + distance]):
                        break
                    for name, asked, shift in session.readings(len(group)):
                        answers = found.setdefault((name, distance), [])
                        for place, number in enumerate(group.tolist()):
                            questions = told[number].questions
                            answers.append(asked.answers((place + shift) % len(group), questions, encode))
                            bar.update(len(questions))
    names = [name for name in READINGS if (name, distances[0]) in found]
    readings = {
        name: [_summary(found[name, d], d) for d in distances if (name, d) in found] for name in names
    }
    return {
        "records": records,
        "told_tokens": beginning,
        "documents": len(rows),
        "seed": seed,
        "readings": readings,
        "gains": {
            f"on - {name}": _gains(found, name, distances) for name in names if name not in ("on", "full")
        },
    }


def _groups(documents: int, batch_size: int) -> int:
    """Returns the number of batches.

    No batch has only one document if there are more, because each document borrows another's state.
    """
    return max(1, min(-(-documents // max(2, batch_size)), documents // 2))


def document_tokens(
    records: int, documents: int, distance: int, encode: Encode, chunk_size: int, seed: int = 0
) -> int:
    """Returns the number of tokens of text that each document of `recall_of_facts` needs."""
    return _beginning(_invented(records, documents, seed), encode, chunk_size) + distance


def _invented(records: int, documents: int, seed: int) -> list[Facts]:
    return [invent(records, f"{seed} {number}") for number in range(documents)]


def _beginning(told: Sequence[Facts], encode: Encode, chunk_size: int) -> int:
    """Returns the length of the part that states the facts: complete chunks, at least half of them text."""
    longest = max(sum(len(encode(apart(sentence))) for sentence in facts.sentences) for facts in told)
    return -(-2 * longest // chunk_size) * chunk_size


def _document(facts: Facts, filler: Tensor, encode: Encode, beginning: int, length: int) -> Tensor:
    """Returns token ids [length]: sentences spread over the first `beginning` tokens, then text alone.

    The result is shorter if the text ends before.
    """
    sentences = [torch.tensor(encode(apart(sentence, closed=True))) for sentence in facts.sentences]
    text = beginning - sum(map(len, sentences))
    places = [text * (number + 1) // (len(sentences) + 1) for number in range(len(sentences))]
    parts = torch.tensor_split(filler.cpu(), places)
    told = [part for pair in zip(parts, sentences, strict=False) for part in pair]
    return torch.cat([*told, parts[-1]])[:length]


def _summary(documents: Sequence[Sequence[Answer]], distance: int) -> dict[str, Any]:
    """Returns shares by kind of question, with 95 % intervals and by document.

    It adds the median rank of an answer's first token.
    """
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        by_document = _of_kind(documents, kind)
        its = [answer for answers in by_document for answer in answers]
        kinds[kind] = {"n": len(its), "options": its[0].options}
        measured = (
            ("hallucinated", "declined")
            if kind == NEVER_TOLD
            else ("exact_match", "multiple_choice", *(["stale"] if kind == CHANGED else []))
        )
        for name in measured:
            shares = [fmean(getattr(answer, name) for answer in answers) for answers in by_document]
            kinds[kind][name] = {**wilson([getattr(answer, name) for answer in its]), "by_document": shares}
        if kind != NEVER_TOLD:
            kinds[kind]["rank"] = median(answer.rank for answer in its if answer.rank is not None)
    return {"distance": distance, "kinds": kinds}


def _of_kind(documents: Sequence[Sequence[Answer]], kind: str) -> list[list[Answer]]:
    return [[answer for answer in answers if answer.kind == kind] for answers in documents]


def _gains(
    found: Mapping[tuple[str, int], Sequence[Sequence[Answer]]], other: str, distances: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns shares of on minus those of another reading, with the standard error over documents.

    Questions of one document share a session, so documents are the independent units.
    """

    def gain(kind: str, name: str, distance: int) -> dict[str, Any]:
        pairs = zip(*(_of_kind(found[reading, distance], kind) for reading in ("on", other)), strict=True)
        return vars(
            Mean.of(
                fmean(getattr(a, name) - getattr(b, name) for a, b in zip(*pair, strict=True))
                for pair in pairs
            )
        )

    told = [kind for kind in KINDS if kind != NEVER_TOLD]
    return [
        {
            "distance": distance,
            "kinds": {
                kind: {name: gain(kind, name, distance) for name in ("exact_match", "multiple_choice")}
                for kind in told
            },
        }
        for distance in distances
    ]
