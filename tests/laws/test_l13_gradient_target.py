"""L13: reading with `target: gradient` equals plain gradient steps on a copy of the model, one per chunk,
however the text comes."""

from typing import Any

import pytest
import torch
from models import NAMES, distance, random_ids
from plain_gradient_steps import LENGTH, SOLVED, SUM, TOLERANCE, plain_steps, read_in, reading
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt import (
    disable_ttt,
)

RULES = {
    "sum": SUM,
    "ridge": SOLVED,
    "row norms": {**SUM, "preserve_row_norms": True},
    "clip": {"eta": 3.0, "clip": {"max_norm": 0.3}},
}
SPLITS = {
    "whole": [40],
    "chunks": [7] * 5 + [5],
    "tokens": [1] * 40,
    "odd": [3, 10, 2, 25],
    "two chunks": [14, 26],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_takes_plain_gradient_steps(name: str) -> None:
    base, model = reading(name)
    ids = random_ids(1, LENGTH)
    wanted = plain_steps(base, model, ids)
    # Gemma 2's softmax is float32, and rounds rows of other lengths otherwise
    tolerance = 1e-6 if name == "gemma2" else TOLERANCE[torch.float64]
    for parts in SPLITS.values():
        assert distance(read_in(model, ids, parts), wanted) < tolerance
    with torch.no_grad():
        assert distance(model(input_ids=ids, use_cache=False).logits, wanted) < tolerance
        assert distance(base(input_ids=ids).logits, wanted) > 0.01, "the writes do not show"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_dtype(rule: str, dtype: torch.dtype) -> None:
    base, model = reading("llama", dtype, **RULES[rule])
    ids = random_ids(1, LENGTH)
    wanted = plain_steps(base, model, ids)
    for parts in (SPLITS["whole"], SPLITS["odd"]):
        assert distance(read_in(model, ids, parts).float(), wanted.float()) < TOLERANCE[dtype]
    assert distance(base(input_ids=ids).logits.detach().float(), wanted.float()) > 0.3, (
        "the writes do not show"
    )


@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_chunk_can_take_several_steps(name: str, rule: dict[str, Any]) -> None:
    """Each with the state that the step before left."""
    base, model = reading(name, **rule, steps_per_chunk=3)
    ids = random_ids(1, LENGTH)
    wanted = plain_steps(base, model, ids)
    for parts in SPLITS.values():
        assert distance(read_in(model, ids, parts), wanted) < TOLERANCE[torch.float64]
    once = plain_steps(*reading(name, **rule), ids)
    assert distance(once, wanted) > 0.01, "the further steps do not show"


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """The rows [1, n] as one batch with mask and positions."""
    room = [max(row.shape[1] for row in rows) - row.shape[1] for row in rows]
    pads = [(n, 0) if side == "left" else (0, n) for n in room]
    ids, mask = (
        torch.cat([torch.nn.functional.pad(row, pad) for row, pad in zip(them, pads, strict=True)])
        for them in (rows, [torch.ones_like(row) for row in rows])
    )
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_rows_of_a_padded_batch_are_as_alone(name: str, steps: int) -> None:
    """Each row has its own state, and its chunks begin at its own first token."""
    base, model = reading(name, **SUM, steps_per_chunk=steps)
    rows = [random_ids(1, n, seed=n) for n in (33, 29, 5)]
    with torch.no_grad():
        found = model(**padded(rows, "left")).logits
    for row, logits in zip(rows, found, strict=True):
        assert (
            distance(logits[33 - row.shape[1] :], plain_steps(base, model, row)[0]) < TOLERANCE[torch.float64]
        )


def packed(lengths: list[int]) -> tuple[list[Tensor], dict[str, Any]]:
    """Documents [1, n], and the row that packs them."""
    documents = [random_ids(1, n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return documents, {"input_ids": torch.cat(documents, 1), "position_ids": positions, "use_cache": False}


@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_packed_documents_are_as_alone(name: str, rule: dict[str, Any]) -> None:
    base, model = reading(name, **rule)
    documents, row = packed([9, 30, 3, 14, 22])
    with torch.no_grad():
        found = model(**row).logits
    wanted = torch.cat([plain_steps(base, model, document) for document in documents], 1)
    assert distance(found, wanted) < TOLERANCE[torch.float64]


def gradients(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    """Of a loss of these logits, for every parameter of the base."""
    model.zero_grad()
    logits.square().mean().backward()
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None and ".ttt." not in name
    }


def ways_of_reading(model: PreTrainedModel, documents: list[Tensor]) -> dict[str, list[Tensor]]:
    """Logits [n, V] of each document [1, n], by the way in which all of them are read."""
    lengths = [document.shape[1] for document in documents]
    longest = max(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        left = model(**padded(documents, "left")).logits
        row = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False).logits[0]
        equal = torch.cat([document[:, : min(lengths)] for document in documents])
        return {
            "alone": [model(input_ids=document).logits[0] for document in documents],
            "batch": [*model(input_ids=equal).logits],
            "left-padded": [left[row, longest - n :] for row, n in enumerate(lengths)],
            "packed": [*row.split(lengths)],
            "pieces": [
                read_in(model, document, [n - 9, 9])[0]
                for document, n in zip(documents, lengths, strict=True)
            ],
            "token by token": [
                read_in(model, document, [1] * n)[0] for document, n in zip(documents, lengths, strict=True)
            ],
        }


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "olmo2", "phi3"])
def test_every_way_of_reading(name: str, rule: dict[str, Any], dtype: torch.dtype) -> None:
    """Six families, two rules, three dtypes, six ways; errors are those of the logits over all documents."""
    base, model = reading(name, dtype, **rule)
    documents = [random_ids(1, n, seed=n) for n in (33, 24, 17)]
    wanted = [plain_steps(base, model, document)[0] for document in documents]
    # the norms of gemma3 are float32; half precision rounds rows of other lengths otherwise, and steps amplify it
    tolerance = {
        torch.float64: 1e-6 if name == "gemma3" else 1e-12,
        torch.float32: 1e-4,
        torch.bfloat16: 0.15,
    }
    for way, found in ways_of_reading(model, documents).items():
        pairs = [(logits, right[: len(logits)]) for logits, right in zip(found, wanted, strict=True)]
        off = distance(
            *(
                torch.cat(parts).float() if dtype == torch.bfloat16 else torch.cat(parts)
                for parts in zip(*pairs, strict=True)
            )
        )
        assert off < tolerance[dtype], (way, off)


@pytest.mark.sample(8)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "olmo2", "phi3"])
def test_training_is_first_order(name: str, rule: dict[str, Any], checkpointing: bool) -> None:
    """A forward in training mode gives what reading gives, and gradients of all of it but the targets, which
    are constants."""
    base, model = reading(name, **rule)
    ids = random_ids(1, LENGTH)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = not isinstance(module, torch.nn.Dropout)
    found = model(input_ids=ids).logits
    with_writes = gradients(model, found)
    wanted = plain_steps(base, model, ids, graph=True)
    assert distance(found.detach(), wanted.detach()) < TOLERANCE[torch.float64]
    expected = gradients(base, wanted)
    assert with_writes.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # its norms are float32
        assert distance(with_writes[parameter], gradient) < (1e-5 if name == "gemma3" else 1e-9), parameter
    with disable_ttt(model):
        without = gradients(model, model(input_ids=ids).logits)
    assert any(distance(without[parameter], gradient) > 1e-3 for parameter, gradient in expected.items()), (
        "the writes do not show"
    )


@pytest.mark.parametrize("rows", ["packed", "left", "right", "short"])
def test_rows_in_training_are_as_read_alone(rows: str) -> None:
    base, model = reading("llama")
    model.train()
    if rows == "packed":
        documents, given = packed([9, 30, 3, 14, 22])
        found = [part[None] for part in model(**given).logits[0].split([9, 30, 3, 14, 22])]
    else:
        documents = [random_ids(1, n, seed=n) for n in ((6, 3) if rows == "short" else (33, 29, 5))]
        given = padded(documents, "left" if rows == "left" else "right")
        found = [
            logits[mask.bool()][None]
            for logits, mask in zip(model(**given).logits, given["attention_mask"], strict=True)
        ]
    for document, logits in zip(documents, found, strict=True):
        assert distance(logits.detach(), plain_steps(base, model.eval(), document)) < TOLERANCE[torch.float64]


def test_no_output_depends_on_a_later_token() -> None:
    _, model = reading("llama")
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for place in (6, 7, 13, 20):
            changed = ids.clone()
            changed[0, place] = (changed[0, place] + 1) % model.config.vocab_size
            assert torch.equal(model(input_ids=changed).logits[:, :place], wanted[:, :place])
