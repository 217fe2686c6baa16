"""Does a model answer what it read? Facts that no corpus has are told in a text and asked for after more of it.

Every document tells facts of its own (`tasks.facts`), spread over its beginning, and goes on with text. After each distance the questions
are put to copies of the session, so that no answer is read by the next question. A question's answer is *said* where greedy
decoding from its prompt would begin with it, and *chosen* where it is likelier, a token, than every other that the document tells.

The readings: on and off, behind the window if there is one; written, with the fast weights of on and nothing to attend to; foreign, with
the next document's fast weights and window, which was told other facts. And what one would pick instead of a memory, without writes:
retrieved, with the piece of the text that BM25 finds for the question in the window; full, with all of the text to attend to.
Where attention begins anew, the tokens that begin every text (a BOS) come first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from math import inf
from statistics import fmean, median
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel

from ..attention_window import attention_window, window_cache
from ..errors import InPlaceTTTError
from ..families import CACHE
from ..layer.cache import only_written
from ..layer.overrides import with_config
from ..reports.statistics import Mean, wilson
from ..surgery import config_of, fast_weights, ttt_disabled
from ..tasks.facts import CHANGED, KINDS, NEVER_TOLD, Encode, Facts, Question, apart, invent
from .protocol import Protocol, progress_bar

READINGS = ("on", "written", "foreign", "off", "retrieved", "full")
_ROWS = 32
"""Options that are read at once."""


@dataclass(frozen=True)
class Answer:
    """To one question. said: greedy decoding begins with it; chosen: of `options`; rank: of its first token, 1 the likeliest.

    earlier: what no longer counts is said instead. invented: where nothing was told, one of the options is said.
    """

    kind: str
    options: int
    said: bool = False
    chosen: bool = False
    rank: int | None = None
    earlier: bool = False
    invented: bool = False


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
    """What is said and chosen, by reading, distance and kind of question; JSON keys as docs/evaluate.md has them.

    fillers: a text's token ids [T] for each document, `document_tokens` of them or nearly; more is left out.
    distances: tokens between that part and the questions. Where positions end, a reading forgets what it attends to and goes on from
    position 0; full is not read so far. Raises InPlaceTTTError for texts that are too short.
    """
    if protocol.window is not None and find_spec("rank_bm25") is None:
        raise InPlaceTTTError("what retrieval finds instead is read by the package rank-bm25; pip install 'inplace-ttt[eval]'.")
    distances = sorted(dict.fromkeys(distances))
    told = _invented(records, len(fillers), seed)
    beginning = _beginning(told, encode, config_of(model).chunk_size)
    length = beginning + distances[-1]
    documents = [_document(facts, filler, encode, beginning, length) for facts, filler in zip(told, fillers, strict=True)]
    if missing := length - min(map(len, documents)):
        raise InPlaceTTTError(
            f"{records} records and a distance of {distances[-1]:,} take documents of {length:,} tokens, and one lacks {missing:,} of "
            "them; give more text, fewer --facts, or a shorter distance."
        )
    rows = torch.stack(documents)
    found: dict[tuple[str, int], list[list[Answer]]] = {}  # document by document
    longest = max(len(encode(apart(f"{q.prompt} {option}"))) for facts in told for q in facts.questions for option in q.options)
    total = sum(len(facts.questions) for facts in told) * len(distances) * (len(READINGS) - 2 * (protocol.window is None))
    with (
        progress_bar("facts", total, progress, unit="question") as bar,
        with_config(fast_weights(model).values(), prompt_write=None),  # in a text no prompt ends
    ):
        for group in torch.arange(len(rows)).tensor_split(_groups(len(rows), protocol.batch_size)):
            for session in _sessions(model, protocol, longest):
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
    readings = {name: [_summary(found[name, d], d) for d in distances if (name, d) in found] for name in names}
    return {
        "records": records,
        "told_tokens": beginning,
        "documents": len(rows),
        "seed": seed,
        "readings": readings,
        "gains": {f"on - {name}": _gains(found, name, distances) for name in names if name not in ("on", "full")},
    }


def _groups(documents: int, batch_size: int) -> int:
    """How many batches there are: none of one document alone, since it borrows another's state."""
    return max(1, min(-(-documents // max(2, batch_size)), documents // 2))


def document_tokens(records: int, documents: int, distance: int, encode: Encode, chunk_size: int, seed: int = 0) -> int:
    """Tokens of text that are enough for each document of `recall_of_facts`."""
    return _beginning(_invented(records, documents, seed), encode, chunk_size) + distance


def _invented(records: int, documents: int, seed: int) -> list[Facts]:
    return [invent(records, f"{seed} {number}") for number in range(documents)]


def _beginning(told: Sequence[Facts], encode: Encode, chunk_size: int) -> int:
    """Tokens of the part that tells the facts: half of it is text; whole chunks."""
    longest = max(sum(len(encode(apart(sentence))) for sentence in facts.sentences) for facts in told)
    return -(-2 * longest // chunk_size) * chunk_size


def _document(facts: Facts, filler: Tensor, encode: Encode, beginning: int, length: int) -> Tensor:
    """Token ids [length]: the sentences evenly within `beginning` tokens of text, then text alone. Shorter where the text ends before."""
    sentences = [torch.tensor(encode(apart(sentence, closed=True))) for sentence in facts.sentences]
    text = beginning - sum(map(len, sentences))
    places = [text * (number + 1) // (len(sentences) + 1) for number in range(len(sentences))]
    parts = torch.tensor_split(filler.cpu(), places)
    told = [part for pair in zip(parts, sentences, strict=False) for part in pair]
    return torch.cat([*told, parts[-1]])[:length]


@dataclass
class _Session:
    """Documents as one way of reading has them: a batch of one cache."""

    name: str
    model: PreTrainedModel
    protocol: Protocol
    asked: int = 0
    """Tokens of the longest question with its answer: positions that are left for it."""
    cache: Cache = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        self.cache = self._empty()

    @torch.no_grad()
    def read(self, rows: Tensor) -> bool:
        """Go on to the end of token ids [B, T]. False where positions end before and nothing may be forgotten."""
        known = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        positions = inf if known is None else known - self.asked
        if self.name == "full" and rows.shape[1] > positions:
            return False
        with self._as_it_reads():
            for part in rows[:, self.done :].to(self.model.device).split(config_of(self.model).chunk_size, dim=1):
                if self.cache.get_seq_length() + part.shape[1] > positions:
                    self.cache = only_written(self.cache, self._empty())
                    part = torch.cat([self._beginnings(len(part)), part], dim=1)
                self.model(part, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1)
        self.done = rows.shape[1]
        return True

    def readings(self, documents: int) -> Iterator[tuple[str, _Session, int]]:
        """What is asked of this session: the reading's name, its session, and how many rows further a document's questions are put."""
        yield self.name, self, 0
        if self.name == "on":
            yield "written", self._written(documents), 0
            if documents > 1:
                yield "foreign", self, 1

    @torch.no_grad()
    def _written(self, documents: int) -> _Session:
        """The fast weights alone, at the beginning of a text."""
        written = copy.copy(self)
        written.cache = only_written(self.cache, self._empty())
        if self.protocol.begins:
            with self._as_it_reads():
                self.model(self._beginnings(documents), **{CACHE: written.cache}, use_cache=True, logits_to_keep=1)
        return written

    def _beginnings(self, rows: int) -> Tensor:
        begins = torch.tensor(self.protocol.begins, dtype=torch.long, device=self.model.device)
        return begins.expand(rows, -1)

    @torch.no_grad()
    def answers(self, row: int, questions: Sequence[Question], encode: Encode) -> list[Answer]:
        """In the order of the questions, each put to what the row has read."""
        alone = self._alone(row)
        prompts = [encode(apart(question.prompt)) for question in questions]
        order = sorted(range(len(questions)), key=lambda i: len(prompts[i]))
        found: dict[int, Answer] = {}
        with self._as_it_reads():
            for _, alike in groupby(order, key=lambda i: len(prompts[i])):  # no padding before what counts
                together = list(alike)
                at_once = max(1, _ROWS // max(len(questions[i].options) for i in together))
                for first in range(0, len(together), at_once):
                    group = together[first : first + at_once]
                    given = alone._answers([(questions[i], prompts[i]) for i in group], encode)
                    found.update(zip(group, given, strict=True))
        return [found[i] for i in range(len(questions))]

    def _alone(self, row: int) -> Self:
        """The session of one row."""
        alone = copy.copy(self)
        alone.cache = copy.deepcopy(self.cache)
        alone.cache.batch_select_indices(torch.tensor([row], device=self.model.device))
        return alone

    def _before(self, prompts: Sequence[list[int]]) -> Cache:
        """What the one row has read before each prompt, as a batch of them."""
        cache = copy.deepcopy(self.cache)
        cache.batch_select_indices(torch.zeros(len(prompts), dtype=torch.long, device=self.model.device))
        return cache

    def _answers(self, asked: Sequence[tuple[Question, list[int]]], encode: Encode) -> Iterator[Answer]:
        """Of the one row, to questions whose prompts are of one length."""
        device, cache = self.model.device, self._before([prompt for _, prompt in asked])
        first = self._log_probabilities(torch.tensor([prompt for _, prompt in asked]), cache)[:, -1]
        asker = [number for number, (question, _) in enumerate(asked) for _ in question.options]
        options = [
            torch.tensor(encode(apart(f"{question.prompt} {option}"))[len(prompt) :])
            for question, prompt in asked
            for option in question.options
        ]
        cache.batch_select_indices(torch.tensor(asker, device=device))
        then = self._log_probabilities(
            pad_sequence(options, batch_first=True), cache
        )  # what stands behind an option's end comes after all that counts
        scores: list[list[tuple[bool, float]]] = [[] for _ in asked]
        begins: list[list[int]] = [[] for _ in asked]
        for number, ids, after in zip(asker, options, then, strict=True):
            steps = torch.cat([first[number][None], after[: len(ids) - 1]])
            likely = steps.gather(1, ids[:, None])[:, 0]
            scores[number].append((bool((steps.argmax(1) == ids).all()), float(likely.mean())))
            begins[number].append(int(ids[0]))
        for number, (question, _) in enumerate(asked):
            yield _answer(question, scores[number], first[number], begins[number])

    def _log_probabilities(self, ids: Tensor, cache: Cache) -> Tensor:
        """float32 [B, n, V] on the CPU, of token ids [B, n]."""
        logits = self.model(ids.to(self.model.device), **{CACHE: cache}, use_cache=True).logits.float()
        if not logits.isfinite().all():
            raise InPlaceTTTError(f"the model's logits are not finite in the reading `{self.name}`; `inplace-ttt diagnose` says why.")
        return logits.log_softmax(-1).cpu()

    @contextmanager
    def _as_it_reads(self) -> Iterator[None]:
        window = None if self.name == "full" else self.protocol.window
        writes = nullcontext() if self.name == "on" else ttt_disabled(self.model)
        with attention_window(self.model, window, self.protocol.sinks), writes:
            yield

    def _empty(self) -> Cache:
        if self.protocol.window is None or self.name == "full":
            return DynamicCache(config=self.model.config.get_text_config())
        return window_cache(self.model, self.protocol.window, self.protocol.sinks)


class _Retrieval(_Session):
    """Documents that are kept as token ids; a question is put behind the piece of them that BM25 finds for it, half a window long."""

    rows: Tensor
    pieces: Tensor
    index: Any

    def read(self, rows: Tensor) -> bool:
        self.rows = rows
        return True

    def _alone(self, row: int) -> Self:
        from rank_bm25 import BM25Okapi

        assert self.protocol.window is not None
        alone, size = copy.copy(self), min(max(1, self.protocol.window // 2), self.rows.shape[1])
        alone.pieces = self.rows[row].unfold(0, size, max(1, size // 2))  # overlapping, so that each sentence stands whole in one
        alone.index = BM25Okapi(alone.pieces.tolist())
        return alone

    def _before(self, prompts: Sequence[list[int]]) -> Cache:
        cache, best = self._empty(), torch.tensor([int(self.index.get_scores(prompt).argmax()) for prompt in prompts])
        pieces, own = best.unique(return_inverse=True)
        texts = torch.cat([self._beginnings(len(pieces)), self.pieces[pieces].to(self.model.device)], dim=1)
        self.model(texts, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        cache.batch_select_indices(own.to(self.model.device))
        return cache


def _sessions(model: PreTrainedModel, protocol: Protocol, asked: int) -> Iterator[_Session]:
    yield from (_Session(name, model, protocol, asked) for name in ("on", "off"))
    if protocol.window is not None:
        yield _Retrieval("retrieved", model, protocol, asked)
        yield _Session("full", model, protocol, asked)


def _answer(question: Question, scores: Sequence[tuple[bool, float]], first: Tensor, begins: Sequence[int]) -> Answer:
    """scores: for each option, whether greedy decoding gives it, and its log-probability a token; begins: its first token.

    first: log-probabilities [V] after the prompt.
    """
    said = [option for option, (greedy, _) in zip(question.options, scores, strict=True) if greedy]
    if question.answer is None:
        return Answer(question.kind, len(scores), invented=bool(said))
    right = question.options.index(question.answer)
    return Answer(
        question.kind,
        len(scores),
        said=question.answer in said,
        chosen=max(range(len(scores)), key=lambda i: scores[i][1]) == right,
        rank=int((first > first[begins[right]]).sum()) + 1,
        earlier=question.earlier in said,
    )


def _summary(documents: Sequence[Sequence[Answer]], distance: int) -> dict[str, Any]:
    """Shares by kind, with their 95 % intervals and document by document, and the median rank of an answer's first token."""
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        by_document = _of_kind(documents, kind)
        its = [answer for answers in by_document for answer in answers]
        kinds[kind] = {"n": len(its), "options": its[0].options}
        measured = ("invented",) if kind == NEVER_TOLD else ("said", "chosen", *(["earlier"] if kind == CHANGED else []))
        for name in measured:
            shares = [fmean(getattr(answer, name) for answer in answers) for answers in by_document]
            kinds[kind][name] = {**wilson([getattr(answer, name) for answer in its]), "by_document": shares}
        if kind != NEVER_TOLD:
            kinds[kind]["rank"] = median(answer.rank for answer in its if answer.rank is not None)
    return {"distance": distance, "kinds": kinds}


def _of_kind(documents: Sequence[Sequence[Answer]], kind: str) -> list[list[Answer]]:
    return [[answer for answer in answers if answer.kind == kind] for answers in documents]


def _gains(found: Mapping[tuple[str, int], Sequence[Sequence[Answer]]], other: str, distances: Sequence[int]) -> list[dict[str, Any]]:
    """What on says and chooses more than another reading: mean and error over documents, whose questions one session answers."""

    def gain(kind: str, name: str, distance: int) -> dict[str, Any]:
        pairs = zip(*(_of_kind(found[reading, distance], kind) for reading in ("on", other)), strict=True)
        return vars(Mean.of(fmean(getattr(a, name) - getattr(b, name) for a, b in zip(*pair, strict=True)) for pair in pairs))

    told = [kind for kind in KINDS if kind != NEVER_TOLD]
    return [
        {"distance": distance, "kinds": {kind: {name: gain(kind, name, distance) for name in ("said", "chosen")} for kind in told}}
        for distance in distances
    ]
