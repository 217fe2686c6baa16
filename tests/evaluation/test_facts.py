"""Facts told and asked for: the questions fit what is told, and every answer is what a reading in one call
would give."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import build
from models import CHUNK, LAYERS, random_ids, turn_writer_on
from rank_bm25 import BM25Okapi
from tiny import byte_level
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, Session, convert, disable_ttt
from inplace_ttt.attention_window import attention_window
from inplace_ttt.evaluation.fact_sessions import Answer, Reader, Retrieval, _answer
from inplace_ttt.evaluation.facts import READINGS, _document, _groups, document_tokens, recall_of_facts
from inplace_ttt.evaluation.protocol import Protocol
from inplace_ttt.families import CACHE
from inplace_ttt.reports.statistics import Mean
from inplace_ttt.tasks.facts import (
    CHANGED,
    DECLINED,
    KINDS,
    MOST,
    NEVER_TOLD,
    PARAPHRASED,
    REVERSED,
    TWO_HOPS,
    VERBATIM,
    Question,
    invent,
)

TOKENIZER = byte_level()
RECORDS = 3


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("records", [1, RECORDS, MOST])
def test_questions_fit_what_is_told(records: int) -> None:
    facts = invent(records, "7 0")
    assert facts == invent(records, "7 0") != invent(records, "7 1")
    told = "\n".join(facts.sentences)
    assert len(facts.sentences) == 5 * records and len(set(facts.sentences)) == 5 * records
    by_kind = {kind: [q for q in facts.questions if q.kind == kind] for kind in KINDS}
    for kind, its in by_kind.items():
        assert len(its) == records * (3 if kind in (VERBATIM, PARAPHRASED, REVERSED) else 1)
    for question in facts.questions:
        assert len(set(question.options)) == len(question.options) and all(
            option in told for option in question.options
        )
        stated = f"{question.prompt} {question.answer}." in facts.sentences
        assert stated == (question.kind in (VERBATIM, CHANGED)), (
            "other questions are asked in words that were not told"
        )
        assert (question.answer is None) == (question.kind == NEVER_TOLD) and question.answer in (
            None,
            *question.options,
        )
    for question in by_kind[CHANGED]:
        earlier, later = (
            facts.sentences.index(f"{question.prompt} {name}.")
            for name in (question.earlier, question.answer)
        )
        assert earlier < later
    for question in by_kind[TWO_HOPS]:
        keeper = question.prompt.removesuffix(" was born in")
        (name,) = (
            s.removeprefix(f"{keeper} is ")[:-1] for s in facts.sentences if s.startswith(f"{keeper} is ")
        )
        assert f"{name} was born in {question.answer}." in facts.sentences
    unknown = {question.prompt.split()[-2] for question in by_kind[NEVER_TOLD]}
    assert not any(place in told for place in unknown)


def model_and_rows(distance: int) -> tuple[PreTrainedModel, list[Tensor], Tensor, int]:
    base = build("llama", vocab_size=len(TOKENIZER), max_position_embeddings=4096)
    model = convert(base, InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK))
    turn_writer_on(model)
    tokens = document_tokens(RECORDS, 2, distance, encode, CHUNK)
    fillers = list(random_ids(2, tokens))
    rows = torch.stack(
        [
            _document(invent(RECORDS, f"0 {i}"), f, encode, tokens - distance, tokens)
            for i, f in enumerate(fillers)
        ]
    )
    return model, fillers, rows, tokens


def plainly(model: PreTrainedModel, before: Tensor | Session, question: Question) -> Answer:
    """What text and a question, read in one call, give for each option; or the question alone after a
    state."""
    prompt = torch.tensor(encode(f"\n\n{question.prompt}"))
    said, scores, first = [], [], torch.empty(0)
    for option in question.compared:
        ids = torch.tensor(encode(f"\n\n{question.prompt} {option}"))[len(prompt) :]
        with torch.no_grad():
            if isinstance(before, Tensor):
                logits = model(torch.cat([before, prompt, ids])[None], use_cache=False).logits[0]
            else:
                logits = model(torch.cat([prompt, ids])[None], **{CACHE: before.fork().cache}).logits[0]
        steps = logits[-len(ids) - 1 : -1].float().log_softmax(-1)
        said += [option] * bool((steps.argmax(-1) == ids).all())
        scores.append(float(steps.gather(1, ids[:, None]).mean()))
        if option == question.answer:
            first = steps[0] > steps[0, ids[0]]
    if question.answer is None:
        invented = any(option in said for option in question.options)
        return Answer(question.kind, len(question.options), hallucinated=invented, declined=DECLINED in said)
    chosen = question.options[max(range(len(scores)), key=scores.__getitem__)] == question.answer
    return Answer(
        question.kind,
        len(scores),
        question.answer in said,
        chosen,
        int(first.sum()) + 1,
        question.earlier in said,
    )


@pytest.mark.parametrize(("window", "begins"), [(None, ()), (24, (5, 6))], ids=str)
@pytest.mark.full
def test_answers_are_those_of_one_call(window: int | None, begins: tuple[int, ...]) -> None:
    model, _, rows, _ = model_and_rows(distance=5 * CHUNK + 3)
    protocol = Protocol(window, 2, 0, 2, begins)
    for name in ("on", "off", "full"):
        session = Reader(name, model, protocol)
        assert session.read(rows[:, :70]) and session.read(rows), "in two parts"
        for reading, asked, shift in session.readings(len(rows)):
            assert shift == (reading == "mismatched"), "another document's row"
            questions = invent(RECORDS, "0 1").questions
            row = (1 + shift) % 2
            found = asked.answers(row, questions, encode)
            assert found == asked.answers(row, questions, encode), "asking leaves no trace"
            before = rows[row]
            with (
                attention_window(model, None if name == "full" else window, 2),
                nullcontext() if name == "on" else disable_ttt(model),
            ):
                if reading == "state_only":
                    state = Session(model)
                    state.read(rows[row : row + 1])
                    before = state.drop_kv_cache()
                    if begins:
                        before.read(torch.tensor([begins]))
                expected = [plainly(model, before, question) for question in questions]
            assert found == expected, (reading, window)


@pytest.mark.parametrize("begins", [(), (5,)], ids=str)
def test_retrieval_puts_the_best_piece_into_the_window(begins: tuple[int, ...]) -> None:
    model, _, rows, _ = model_and_rows(distance=5 * CHUNK + 3)
    session = Retrieval("bm25", model, Protocol(160, 2, 0, 2, begins))
    session.read(rows)
    facts = invent(RECORDS, "0 1")
    found, told = session.answers(1, facts.questions, encode), 0
    for question, answer in zip(facts.questions, found, strict=True):
        pieces = [rows[1, start : start + 80] for start in range(0, rows.shape[1] - 79, 40)]
        scores = BM25Okapi([piece.tolist() for piece in pieces]).get_scores(encode(f"\n\n{question.prompt}"))
        best = pieces[max(range(len(pieces)), key=scores.__getitem__)]
        with attention_window(model, 160, 2), disable_ttt(model):
            assert answer == plainly(
                model, torch.cat([torch.tensor(begins, dtype=torch.long), best]), question
            )
        told += question.kind == VERBATIM and f"{question.prompt} {question.answer}" in TOKENIZER.decode(best)
    assert told > RECORDS, "it finds what was told"


def test_retrieval_asks_for_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fillers, _, _ = model_and_rows(distance=CHUNK)
    monkeypatch.setattr("inplace_ttt.evaluation.facts.find_spec", lambda name: None)
    with pytest.raises(
        InPlaceTTTError, match=r"rank-bm25; in a checkout of inplace-ttt, pip install -e '.\[eval\]'"
    ):
        recall_of_facts(model, fillers, encode, RECORDS, [CHUNK], Protocol(24, 2, 0, 2))


def test_a_table_of_all_readings() -> None:
    model, fillers, _, tokens = model_and_rows(distance=6 * CHUNK)
    found = recall_of_facts(model, fillers, encode, RECORDS, [6 * CHUNK, CHUNK], Protocol(24, 2, 0, 2))
    assert (
        tuple(found["readings"]) == READINGS
        and found["told_tokens"] == tokens - 6 * CHUNK
        and found["documents"] == 2
    )
    for rows in found["readings"].values():
        assert [row["distance"] for row in rows] == [CHUNK, 6 * CHUNK]
        verbatim = rows[0]["kinds"][VERBATIM]
        assert verbatim["n"] == 2 * 3 * RECORDS and verbatim["options"] == RECORDS and verbatim["rank"] >= 1
        assert (
            0
            <= verbatim["multiple_choice"]["low"]
            <= verbatim["multiple_choice"]["share"]
            <= verbatim["multiple_choice"]["high"]
            <= 1
        )
    on, off = (
        found["readings"][name][1]["kinds"][VERBATIM]["multiple_choice"]["share"] for name in ("on", "off")
    )
    assert found["gains"]["on - off"][1]["kinds"][VERBATIM]["multiple_choice"]["mean"] == pytest.approx(
        on - off
    )
    never = found["readings"]["on"][0]["kinds"][NEVER_TOLD]
    assert never["n"] == 2 * RECORDS and never["options"] == RECORDS
    assert 0 <= never["declined"]["low"] <= never["declined"]["share"] <= never["declined"]["high"] <= 1
    assert "declined" not in verbatim and "exact_match" not in never
    alone = recall_of_facts(model, fillers[:1], encode, RECORDS, [CHUNK], Protocol(None, 4, 0, 2))
    assert alone["readings"].keys() == {"on", "state_only", "off"}, (
        "nobody to lend, and nothing that attends to more"
    )


@pytest.mark.parametrize("begins", [(), (5,)], ids=str)
@pytest.mark.full
def test_where_positions_end_a_session_forgets_and_full_ends(
    begins: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are left for the questions, and what goes on from position 0 begins as every text does."""
    model, fillers, _, tokens = model_and_rows(distance=30 * CHUNK)
    model.config.max_position_embeddings = known = tokens - CHUNK
    furthest, first = 0, []

    def watched(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal furthest
        if kwargs[CACHE].get_seq_length() == 0:
            first.append(tuple(ids[0, : len(begins)].tolist()))
        given = forward(ids, *args, **kwargs)
        furthest = max(furthest, kwargs[CACHE].get_seq_length())
        return given

    forward = model.forward
    monkeypatch.setattr(model, "forward", watched)
    rows = [torch.cat([torch.tensor(begins, dtype=torch.long), filler]) for filler in fillers]
    found = recall_of_facts(model, rows, encode, RECORDS, [CHUNK, 30 * CHUNK], Protocol(24, 2, 0, 2, begins))
    assert {name: len(rows) for name, rows in found["readings"].items()} == {
        **dict.fromkeys(READINGS, 2),
        "full": 1,
    }
    assert furthest <= known and (set(first) == {begins} or not begins)


def test_batches_have_another_document_to_borrow_from() -> None:
    sizes = {
        (n, at_once): len(torch.arange(n).tensor_split(_groups(n, at_once))[0])
        for n in range(1, 30)
        for at_once in (1, 2, 4, 8)
    }
    for (n, at_once), largest in sizes.items():
        smallest = len(torch.arange(n).tensor_split(_groups(n, at_once))[-1])
        assert smallest >= min(2, n) and largest <= max(at_once, 3 if n % 2 else 2), (n, at_once)


def test_declined_is_the_fixed_phrase_where_nothing_was_stated() -> None:
    """Greedy decoding that begins with the phrase is declined; with a keeper, hallucinated; else neither."""
    asked = next(q for q in invent(RECORDS, "0 1").questions if q.kind == NEVER_TOLD)
    assert asked.compared == (*asked.options, DECLINED)
    for decoded, hallucinated, declined in ((DECLINED, 0, 1), (asked.options[1], 1, 0), ("", 0, 0)):
        scores = [(option == decoded, -1.0) for option in asked.compared]
        answer = _answer(asked, scores, torch.zeros(5), [0] * len(scores))
        assert (answer.hallucinated, answer.declined) == (bool(hallucinated), bool(declined))
        assert answer.options == len(asked.options)
    stated = next(q for q in invent(RECORDS, "0 1").questions if q.kind == VERBATIM)
    assert stated.compared == stated.options


def test_errors_are_over_documents() -> None:
    """One session answers all of a document's questions, so that they are no independent ones."""
    model, fillers, _, _ = model_and_rows(distance=CHUNK)
    found = recall_of_facts(model, fillers, encode, RECORDS, [CHUNK], Protocol(24, 2, 0, 2))
    on, off = (found["readings"][name][0]["kinds"][VERBATIM]["multiple_choice"] for name in ("on", "off"))
    gains = [a - b for a, b in zip(on["by_document"], off["by_document"], strict=True)]
    assert len(gains) == 2 and sum(on["by_document"]) / 2 == pytest.approx(on["share"])
    assert found["gains"]["on - off"][0]["kinds"][VERBATIM]["multiple_choice"] == pytest.approx(
        vars(Mean.of(gains))
    )


def test_texts_that_are_too_short_are_refused() -> None:
    model, fillers, _, _ = model_and_rows(distance=CHUNK)
    with pytest.raises(
        InPlaceTTTError,
        match=r"3 records and a distance of .* need documents of .* tokens, but one lacks .*; give more",
    ):
        recall_of_facts(model, fillers, encode, RECORDS, [99 * CHUNK], Protocol(24, 2, 0, 2))
