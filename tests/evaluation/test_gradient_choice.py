"""Layers and η of loss gradients: what is tried, and which choice is taken."""

import copy
import dataclasses
import itertools

import pytest
import torch
from families import build
from models import random_ids

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, calibrate, convert
from inplace_ttt.evaluation.gradient_choice import Tried, choose, table
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.surgery import fast_weights, is_converted
from inplace_ttt.tasks.passages import Passage

CONFIG = InPlaceTTTConfig(chunk_size=16, target="gradient")
ROWS = [random_ids(1, 136, seed=seed) for seed in (1, 2)]
HOW = {"layers": [(0,), (0, 2)], "etas": (0.01, 0.3, 30.0)}


def test_a_choice_is_what_it_changes_of_the_losses() -> None:
    """Measured anew by a plain conversion; the model that was given is as before."""
    model = build("llama").eval()
    before = copy.deepcopy(model.state_dict())
    found = choose(model, CONFIG, ROWS, **HOW)
    best, tried = found.best, found.tried
    assert not is_converted(model) and all(
        torch.equal(x, before[name]) for name, x in model.state_dict().items()
    )
    assert best in tried and [one.layers for one in tried] == sorted(one.layers for one in tried)
    passage = Passage(32, 64)
    texts = torch.cat([passage.repeat(row[0], 8)[None] for row in ROWS])
    off = token_losses(model, texts, piece=16, window=32)
    for one in tried:
        other = convert(copy.deepcopy(model), dataclasses.replace(CONFIG, layers=one.layers, eta=one.eta))
        calibrate(other, ROWS)
        change = token_losses(other, texts, piece=16, window=32) - off
        assert float(change[:, 40:103].mean()) == pytest.approx(one.text, abs=1e-5)
        assert float(change[:, 104:135].mean()) == pytest.approx(one.again, abs=1e-5)
        assert one.worst >= one.text
        if one is best:
            assert found.tensors.keys() == fast_weights(other).keys()
            for index, layer in fast_weights(other).items():
                assert found.tensors[index].keys() == layer.ttt.state_dict().keys()
                for name, x in layer.ttt.state_dict().items():
                    torch.testing.assert_close(found.tensors[index][name], x)


def test_a_set_of_layers_is_left_at_the_first_harm() -> None:
    tried = choose(build("llama").eval(), CONFIG, ROWS, **HOW).tried
    for one, after in itertools.pairwise(tried):
        assert after.layers != one.layers or not one.harms


def test_the_harmless_choice_that_recalls_most_is_taken() -> None:
    kind, rash = Tried((0,), 0.1, -0.02, -0.01, -0.3), Tried((0,), 0.2, -0.05, 0.01, -0.9)
    lines = table(kind, [kind, rash])
    assert lines[2].endswith("-0.020   -0.010   -0.300  taken") and lines[3].endswith("a text gets harder")
    worse = dataclasses.replace(kind, worst=0.5)
    assert "every choice makes a text harder" in table(worse, [worse, rash])[-1]


def test_a_text_without_room_for_a_passage_is_refused() -> None:
    with pytest.raises(
        InPlaceTTTError,
        match=r"needs texts of 72 tokens, but one has 71; give longer texts, or --layers and --eta",
    ):
        choose(build("llama").eval(), CONFIG, [random_ids(1, 71)])
