"""Reads documents in several ways, and answers questions from copies of each reading's session."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel

from ..attention_window import attention_window
from ..errors import InPlaceTTTError
from ..families import CACHE
from ..layer.cache import only_written
from ..surgery import config_of, disable_ttt
from ..tasks.facts import DECLINED, Encode, Question, apart
from .protocol import Protocol
from .token_losses import reading_cache

_ROWS = 32
"""Number of options that are read in one batch."""


@dataclass(frozen=True)
class Answer:
    """Answer to one question.

    Attributes:
        kind: kind of the question.
        options: number of options.
        exact_match: greedy decoding begins with the right answer.
        multiple_choice: the right answer is likelier, per token, than every other option.
        rank: rank of the right answer's first token; 1 is the likeliest.
        stale: greedy decoding begins with an outdated answer.
        hallucinated: greedy decoding begins with an option, although the document states no answer.
        declined: greedy decoding begins with `tasks.facts.DECLINED`, and the document states no answer.
    """

    kind: str
    options: int
    exact_match: bool = False
    multiple_choice: bool = False
    rank: int | None = None
    stale: bool = False
    hallucinated: bool = False
    declined: bool = False


@dataclass
class Reader:
    """A batch of documents in one cache, read in one way (its `name`).

    Attributes:
        name: the reading: "on", "off", "bm25" or "full".
        model: a converted model.
        protocol: settings of the reading.
        asked: number of tokens of the longest question with its answer, for which positions are reserved.
        cache: KV cache and streams of the batch.
        done: number of tokens read so far.
    """

    name: str
    model: PreTrainedModel
    protocol: Protocol
    asked: int = 0
    cache: Cache = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        self.cache = self._empty()

    @torch.no_grad()
    def read(self, rows: Tensor) -> bool:
        """Continues reading to the end of token ids [B, T].

        If the model's positions end before that, the KV cache is dropped and reading continues at position 0.
        The reading "full" may not drop it; it then reads nothing.

        Returns:
            False if the reading is "full" and the positions do not suffice.
        """
        known = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        positions = inf if known is None else known - self.asked
        if self.name == "full" and rows.shape[1] > positions:
            return False
        with self._as_it_reads():
            for part in (
                rows[:, self.done :].to(self.model.device).split(config_of(self.model).chunk_size, dim=1)
            ):
                if self.cache.get_seq_length() + part.shape[1] > positions:
                    self.cache = only_written(self.cache, self._empty())
                    part = torch.cat([self._beginnings(len(part)), part], dim=1)
                self.model(part, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1)
        self.done = rows.shape[1]
        return True

    def readings(self, documents: int) -> Iterator[tuple[str, Reader, int]]:
        """Yields the readings that this session serves: name, session, and a shift of rows.

        The questions of a document go to the row that is `shift` rows further on.
        """
        yield self.name, self, 0
        if self.name == "on":
            yield "state_only", self._written(documents), 0
            if documents > 1:
                yield "mismatched", self, 1

    @torch.no_grad()
    def _written(self, documents: int) -> Reader:
        """Returns a session with the fast weights alone, at the beginning of a text."""
        written = copy.copy(self)
        written.cache = only_written(self.cache, self._empty())
        if self.protocol.begins:
            with self._as_it_reads():
                self.model(
                    self._beginnings(documents), **{CACHE: written.cache}, use_cache=True, logits_to_keep=1
                )
        return written

    def _beginnings(self, rows: int) -> Tensor:
        begins = torch.tensor(self.protocol.begins, dtype=torch.long, device=self.model.device)
        return begins.expand(rows, -1)

    @torch.no_grad()
    def answers(self, row: int, questions: Sequence[Question], encode: Encode) -> list[Answer]:
        """Puts each question to a copy of the session of one row.

        Args:
            row: row of the batch.
            questions: the questions.
            encode: turns text into token ids without special tokens.

        Returns:
            The answers, in the order of the questions.
        """
        alone = self._alone(row)
        prompts = [encode(apart(question.prompt)) for question in questions]
        order = sorted(range(len(questions)), key=lambda i: len(prompts[i]))
        found: dict[int, Answer] = {}
        with self._as_it_reads():
            for _, alike in groupby(
                order, key=lambda i: len(prompts[i])
            ):  # equal lengths, so that no padding precedes the answer
                together = list(alike)
                at_once = max(1, _ROWS // max(len(questions[i].compared) for i in together))
                for first in range(0, len(together), at_once):
                    group = together[first : first + at_once]
                    given = alone._answers([(questions[i], prompts[i]) for i in group], encode)
                    found.update(zip(group, given, strict=True))
        return [found[i] for i in range(len(questions))]

    def _alone(self, row: int) -> Self:
        """Returns the session of one row."""
        alone = copy.copy(self)
        alone.cache = copy.deepcopy(self.cache)
        alone.cache.batch_select_indices(torch.tensor([row], device=self.model.device))
        return alone

    def _before(self, prompts: Sequence[list[int]]) -> Cache:
        """Returns a batch of copies of the row's cache, one per prompt."""
        cache = copy.deepcopy(self.cache)
        cache.batch_select_indices(torch.zeros(len(prompts), dtype=torch.long, device=self.model.device))
        return cache

    def _answers(self, asked: Sequence[tuple[Question, list[int]]], encode: Encode) -> Iterator[Answer]:
        """Yields the answers to questions whose prompts have the same length."""
        device, cache = self.model.device, self._before([prompt for _, prompt in asked])
        first = self._log_probabilities(torch.tensor([prompt for _, prompt in asked]), cache)[:, -1]
        asker = [number for number, (question, _) in enumerate(asked) for _ in question.compared]
        options = [
            torch.tensor(encode(apart(f"{question.prompt} {option}"))[len(prompt) :])
            for question, prompt in asked
            for option in question.compared
        ]
        cache.batch_select_indices(torch.tensor(asker, device=device))
        then = self._log_probabilities(
            pad_sequence(options, batch_first=True), cache
        )  # padding follows an option, so it does not affect the option's tokens
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
        """Returns log-probabilities float32 [B, n, V] on the CPU, for token ids [B, n]."""
        logits = self.model(ids.to(self.model.device), **{CACHE: cache}, use_cache=True).logits.float()
        if not logits.isfinite().all():
            raise InPlaceTTTError(
                f"the model's logits are not finite in the reading `{self.name}`; run `inplace-ttt diagnose` "
                "to find the cause."
            )
        return logits.log_softmax(-1).cpu()

    @contextmanager
    def _as_it_reads(self) -> Iterator[None]:
        window = None if self.name == "full" else self.protocol.window
        writes = nullcontext() if self.name == "on" else disable_ttt(self.model)
        with attention_window(self.model, window, self.protocol.sinks), writes:
            yield

    def _empty(self) -> Cache:
        window = None if self.name == "full" else self.protocol.window
        return reading_cache(self.model, window, self.protocol.sinks)


class Retrieval(Reader):
    """Documents kept as token ids, from which BM25 retrieves one piece per question.

    The piece is half a window long and precedes the question.
    """

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
        # overlapping, so that most sentences lie complete in one piece
        alone.pieces = self.rows[row].unfold(0, size, max(1, size // 2))
        alone.index = BM25Okapi(alone.pieces.tolist())
        return alone

    def _before(self, prompts: Sequence[list[int]]) -> Cache:
        cache, best = (
            self._empty(),
            torch.tensor([int(self.index.get_scores(prompt).argmax()) for prompt in prompts]),
        )
        pieces, own = best.unique(return_inverse=True)
        texts = torch.cat([self._beginnings(len(pieces)), self.pieces[pieces].to(self.model.device)], dim=1)
        self.model(texts, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        cache.batch_select_indices(own.to(self.model.device))
        return cache


def sessions(model: PreTrainedModel, protocol: Protocol, asked: int) -> Iterator[Reader]:
    """Yields a session for each way of reading: on and off, and with a window also bm25 and full."""
    yield from (Reader(name, model, protocol, asked) for name in ("on", "off"))
    if protocol.window is not None:
        yield Retrieval("bm25", model, protocol, asked)
        yield Reader("full", model, protocol, asked)


def _answer(
    question: Question, scores: Sequence[tuple[bool, float]], first: Tensor, begins: Sequence[int]
) -> Answer:
    """Evaluates one question.

    Args:
        question: the question.
        scores: for each compared answer, True if greedy decoding produces it, and its log-probability per
            token.
        first: log-probabilities [V] after the prompt.
        begins: first token of each compared answer.
    """
    decoded = [option for option, (greedy, _) in zip(question.compared, scores, strict=True) if greedy]
    if question.answer is None:
        return Answer(
            question.kind,
            len(question.options),
            hallucinated=any(option in decoded for option in question.options),
            declined=DECLINED in decoded,
        )
    right = question.options.index(question.answer)
    return Answer(
        question.kind,
        len(scores),
        exact_match=question.answer in decoded,
        multiple_choice=max(range(len(scores)), key=lambda i: scores[i][1]) == right,
        rank=int((first > first[begins[right]]).sum()) + 1,
        stale=question.earlier in decoded,
    )
