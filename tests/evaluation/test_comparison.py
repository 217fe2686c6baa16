"""On, off, base and cross-document state: each number is what a plain reading of the definition gives."""

import random

import pytest
import torch
from families import build
from models import CHUNK, converted, distance, random_ids
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTError, KeyWhitening, Session, disable_ttt
from inplace_ttt.attention_window import attention_window
from inplace_ttt.evaluation.comparison import Comparison, DocumentLosses, compare
from inplace_ttt.evaluation.growing_context import growing_context
from inplace_ttt.evaluation.protocol import Protocol
from inplace_ttt.evaluation.repeated_passage import repeated_passage
from inplace_ttt.evaluation.same_text import refuse_same_text
from inplace_ttt.evaluation.token_losses import mismatched_losses, token_losses
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams
from inplace_ttt.surgery import fast_weights
from inplace_ttt.tasks.passages import Passage

LENGTH = 6 * CHUNK + 3
RIDGE = {
    "whitening": KeyWhitening(),
    "update_rule": "ridge",
    "ridge": 0.5,
    "normalize_targets": True,
    "eta": 3.0,
}


@torch.no_grad()
def losses(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Token losses [T - 1] of one row in one call."""
    return cross_entropy(
        model(input_ids=row[None], use_cache=False).logits[0, :-1].float(), row[1:], reduction="none"
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("piece", [CHUNK, 4, 100])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "granite"])
def test_pieces_are_one_call(name: str, piece: int, window: int | None) -> None:
    model, rows = converted(name), random_ids(3, LENGTH)
    found = token_losses(model, rows, piece=piece, window=window, sinks=2)
    with attention_window(model, window, 2):
        expected = torch.stack([losses(model, row) for row in rows])
    assert found.dtype == torch.float32 and distance(found, expected) < 1e-4


@pytest.mark.parametrize("options", [{}, RIDGE], ids=["paper", "extensions"])
def test_foreign_is_the_state_another_document_had_at_that_chunk(options: dict) -> None:
    """By the definition: chunk by chunk, row r alone with W0 and, added by hand, what it reads of what row r
    + 1 had written."""
    model, rows = converted("llama", **options), random_ids(3, LENGTH)
    own, mismatched = (
        token_losses(model, rows, piece=CHUNK),
        mismatched_losses(model, rows, rows.roll(-1, 0), piece=CHUNK),
    )
    for r, row in enumerate(rows):
        assert distance(own[r], losses(model, row)) < 1e-4
        writer = rows[(r + 1) % len(rows)]
        reader_session, parts = Session(model), []
        for start in range(0, LENGTH, CHUNK):
            memory = Session(model)
            if start:
                memory.read(writer[None, :start])
            states = {layer: s.state for layer, s in streams(memory.cache).items()}
            with disable_ttt(model), reading(model, states):
                parts.append(
                    model(row[None, start : start + CHUNK], **{CACHE: reader_session.cache})
                    .logits[0]
                    .detach()
                )
        logits = torch.cat(parts)
        assert distance(mismatched[r], cross_entropy(logits[:-1], row[1:], reduction="none")) < 1e-4
    assert distance(mismatched, own) > 1e-3


def test_lenders_have_no_logits_made() -> None:
    model, rows, made = converted("llama"), random_ids(3, LENGTH), []
    model.get_output_embeddings().register_forward_hook(lambda head, args, out: made.append(out.shape[0]))
    mismatched_losses(model, rows, rows.roll(-1, 0), piece=CHUNK)
    assert set(made) == {3}


class reading:
    """Within it every TTT layer adds what it reads of given states to its output."""

    def __init__(self, model: PreTrainedModel, states: dict) -> None:
        self.layers, self.states = fast_weights(model), states

    def __enter__(self) -> None:
        def add(layer, args, out):
            state = self.states.get(layer.fast.layer)
            read = None if state is None else layer.readout(state[0]).to(out.dtype)
            return out if read is None else out + layer.eta * linear(layer.keys(args[0]), read)

        self.handles = [layer.register_forward_hook(add) for layer in self.layers.values()]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def test_the_four_numbers() -> None:
    model, base = converted("llama"), build("llama")
    documents = [
        random_ids(1, n, seed=n)[0] for n in (LENGTH, LENGTH - 5, 3 * CHUNK, LENGTH - 9, 2 * CHUNK + 1)
    ]
    skip = CHUNK
    result = compare(model, documents, Protocol(skip=skip, batch_size=2), base)
    for document, found in zip(documents, result.documents, strict=True):
        assert distance(found.on, losses(model, document)) < 1e-4
        assert distance(found.off, losses(base, document)) < 1e-4, "only conv and P were set: off is the base"
        assert torch.equal(found.off, found.base)
    values = result.to_dict()
    # up to which there is every reading
    ends = [len(found.mismatched) for found in result.documents if found.mismatched is not None]
    assert ends == [LENGTH - 5, LENGTH - 9, 2 * CHUNK + 1, 3 * CHUNK, 2 * CHUNK]
    on = [float(losses(model, d)[skip:end].mean()) for d, end in zip(documents, ends, strict=True)]
    off = [float(losses(base, d)[skip:end].mean()) for d, end in zip(documents, ends, strict=True)]
    assert values["on"] == pytest.approx(sum(on) / 5, abs=1e-4) and values["base"] == values["off"]
    differences = torch.tensor(on) - torch.tensor(off)
    assert values["difference"]["mean"] == pytest.approx(float(differences.mean()), abs=1e-4)
    assert values["difference"]["stderr"] == pytest.approx(float(differences.std() / 5**0.5), abs=1e-4)
    assert values["document_gain"]["n"] == 5 and values["gain"] == values["difference"]
    assert values["positions"][0]["start"] == 0 and values["positions"][-1]["stop"] == LENGTH - 1


UNEQUAL = (LENGTH, LENGTH - 5, 3 * CHUNK, LENGTH - 9, 2 * CHUNK + 1)


@pytest.mark.parametrize("lengths", [UNEQUAL, (LENGTH,) * 3], ids=["unequal", "equal"])
def test_one_number_is_the_others_difference(lengths: tuple[int, ...]) -> None:
    """Whatever the documents' lengths, and whatever is read at once."""
    model, documents = converted("llama"), [random_ids(1, n, seed=i)[0] for i, n in enumerate(lengths)]
    found = [
        compare(model, documents, Protocol(skip=CHUNK, batch_size=size)).to_dict() for size in (1, 2, 3, 8)
    ]
    for values in found:
        for name, (one, other) in {
            "difference": ("on", "off"),
            "document_gain": ("on", "mismatched"),
            "generic_gain": ("mismatched", "off"),
        }.items():
            assert values[name]["mean"] == pytest.approx(values[one] - values[other], abs=1e-6), name
            assert values[name]["mean"] == pytest.approx(found[0][name]["mean"], abs=1e-5), name
        assert values["document_gain"]["stderr"] == pytest.approx(
            found[0]["document_gain"]["stderr"], abs=1e-5
        )


@pytest.mark.parametrize("moved", [slice(0, None), slice(0, -9), slice(1, None), slice(7, None)], ids=str)
def test_a_text_is_no_control_for_itself(moved: slice) -> None:
    text, other = random_ids(1, LENGTH)[0], random_ids(1, LENGTH - 4, seed=5)[0]
    with pytest.raises(InPlaceTTTError, match=r"documents 1 and 3 hold the same text.*give each text once"):
        compare(converted("llama"), [text, other, text[moved]], Protocol())
    shares_a_start = torch.cat([text[: LENGTH // 3], other[LENGTH // 3 :]])
    assert (
        compare(converted("llama"), [text, other, shares_a_start], Protocol()).to_dict()["document_gain"]
        is not None
    )


def test_the_same_text_is_found_among_long_ones() -> None:
    """Where there are more windows than are looked at, the same ones of each text are."""
    long = random_ids(1, 3 * 2**20)[0]
    refuse_same_text([long[: 2**20], long[2**20 : 2**21]])
    with pytest.raises(InPlaceTTTError, match=r"documents 1 and 2 hold the same text"):
        refuse_same_text([long, long[12345:]])


def test_losses_by_position_are_of_the_same_documents() -> None:
    """Foreign ends where the other document does: what is beyond must not be compared with documents that
    still go on."""
    off = [torch.full((n,), loss) for n, loss in ((90, 5.0), (30, 1.0), (60, 3.0))]
    documents = [DocumentLosses(x - 0.1, x, (x - 0.3)[:n]) for x, n in zip(off, (30, 30, 60), strict=True)]
    rows = Comparison(documents, Protocol()).positions(9)
    assert len(rows) == 9 and {row["generic_gain"] is None for row in rows} == {False, True}
    for row in rows:
        lent = sum(len(d.mismatched) > row["start"] for d in documents)
        for name, mean in (("generic_gain", -0.3), ("document_gain", 0.2)):
            assert (row[name] is None) == (not lent)
            assert row[name] is None or (
                row[name]["mean"] == pytest.approx(mean, abs=1e-6) and row[name]["n"] == lent
            )


def test_losses_that_are_not_finite_are_refused() -> None:
    model = converted("llama")
    with torch.no_grad():
        next(iter(fast_weights(model).values())).ttt.proj.fill_(torch.inf)
    with pytest.raises(
        InPlaceTTTError,
        match=r"losses are not finite from token \d+ of a text on; run `inplace-ttt diagnose`",
    ):
        compare(model, list(random_ids(2, LENGTH)), Protocol())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_an_untrained_conversion_differs_by_nothing(dtype: torch.dtype, window: int | None) -> None:
    """On and off are read in the same pieces."""
    model = converted("llama", writes=False, dtype=dtype)
    documents = [random_ids(1, n, seed=i)[0] for i, n in enumerate(UNEQUAL)]
    values = compare(
        model, documents, Protocol(skip=CHUNK, window=window, batch_size=2), build("llama", dtype=dtype)
    ).to_dict()
    assert values["difference"]["mean"] == values["gain"]["mean"] == 0
    assert {row["difference"]["mean"] for row in values["positions"]} == {0}


def test_documents_must_be_long_enough() -> None:
    with pytest.raises(InPlaceTTTError, match=f"{CHUNK} tokens.*longer texts"):
        compare(converted("llama"), [random_ids(1, CHUNK)[0]] * 2, Protocol())


def test_one_document_has_no_foreign_memory() -> None:
    values = compare(converted("llama"), [random_ids(1, LENGTH)[0]], Protocol()).to_dict()
    assert values["mismatched"] is None and values["document_gain"] is None
    assert values["difference"]["n"] == 1 and values["difference"]["stderr"] is None


def test_repeated_passage_looks_where_the_copy_is() -> None:
    model, passage = converted("llama"), Passage(8, 10)
    documents = [random_ids(1, LENGTH, seed=s)[0] for s in range(3)]
    found = repeated_passage(model, documents, Protocol(batch_size=2), passage, seed=4)
    generator = random.Random(4)
    expected = []
    for document in documents:
        start = passage.random_start(LENGTH, generator)
        row = passage.repeat(document, start)
        assert torch.equal(row[start : start + 8], row[start + 18 : start + 26]) and torch.equal(
            row[: start + 18], document[: start + 18]
        )
        on = losses(model, row)
        with disable_ttt(model):
            difference = on - losses(model, row)
        expected.append(
            [
                float(difference[span].mean())
                for span in (slice(start + 18, start + 25), slice(start + 8, start + 17))
            ]
        )
    for name, values in zip(("repeated_passage", "between"), zip(*expected, strict=True), strict=True):
        assert (
            found[name]["mean"] == pytest.approx(sum(values) / 3, abs=1e-4)
            and abs(found[name]["mean"]) > 1e-3
        ), name
    with pytest.raises(InPlaceTTTError, match="shorter passage"):
        repeated_passage(model, documents, Protocol(), Passage(100, 100))


def test_growing_context_scores_the_same_block() -> None:
    model, base = converted("llama"), build("llama")
    documents = [random_ids(1, LENGTH, seed=s)[0] for s in range(3)]
    found = growing_context(model, documents, [10, 30], Protocol(batch_size=2), block=9, base=base)
    for row, context in zip(found, (10, 30), strict=True):
        on = [float(losses(model, d[30 - context : 39])[-9:].mean()) for d in documents]
        assert row["on"] == pytest.approx(sum(on) / 3, abs=1e-4) and row["off"] == pytest.approx(row["base"])
    with pytest.raises(InPlaceTTTError, match="shorter context"):
        growing_context(model, documents, [100], Protocol())
