"""The recall task: its rows, its score, and that a fast weight solves it where attention cannot."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert, disable_ttt
from inplace_ttt.diagnostics import diagnose
from inplace_ttt.tasks.recall import recall_accuracy, recall_data

SHAPES = [(16, 128, 256), (1, 4, 4), (3, 13, 40), (4, 19, 17), (8, 32, 33)]


@pytest.mark.parametrize(("pairs", "vocabulary", "length"), SHAPES)
def test_rows(pairs: int, vocabulary: int, length: int) -> None:
    for row in recall_data(20, pairs, vocabulary, length, seed=3):
        ids, labels = row["input_ids"], row["labels"]
        assert row["position_ids"] == list(range(length)) and len(ids) == len(labels) == length
        told = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        asked = dict(zip(ids[-2 * pairs :: 2], ids[-2 * pairs + 1 :: 2], strict=True))
        assert told == asked and len(told) == pairs
        assert all(
            vocabulary // 4 <= key < vocabulary // 2 <= value < vocabulary for key, value in told.items()
        )
        assert all(token < max(vocabulary // 4, 1) for token in ids[2 * pairs : -2 * pairs])
        assert [label for label in labels if label != -100] == list(asked.values())
        assert all(label == token for label, token in zip(labels, ids, strict=True) if label != -100)
        assert set(labels[: -2 * pairs]) <= {-100}


def test_keys_are_asked_in_another_order() -> None:
    """Of 8 keys, an eighth comes back at its own place."""
    rows = recall_data(200, 8, 64, 40, seed=0)["input_ids"]
    same = sum(row[2 * i] == row[24 + 2 * i] for row in rows for i in range(8))
    reverse = sum(row[2 * i] == row[24 + 2 * (7 - i)] for row in rows for i in range(8))
    assert abs(same - 200) < 60 and abs(reverse - 200) < 60


def test_rows_are_those_of_the_seed() -> None:
    def rows(n: int = 8, seed: int = 0, held_out: bool = False) -> list[list[int]]:
        return recall_data(n, 4, 64, 40, seed, held_out)["input_ids"][:]

    assert rows() == rows() == rows(20)[:8]
    everything = [*rows(), *rows(seed=1), *rows(held_out=True), *rows(seed=1, held_out=True)]
    assert len({tuple(row) for row in everything}) == len(everything)


@pytest.mark.parametrize(
    ("pairs", "vocabulary", "length", "says"),
    [
        (5, 16, 64, "16 has 4 keys"),
        (1, 1, 64, "1 has 0 keys"),
        (5, 64, 19, "at least 20 tokens, but sequence_length is 19"),
    ],
)
def test_what_does_not_fit_is_refused(pairs: int, vocabulary: int, length: int, says: str) -> None:
    with pytest.raises(InPlaceTTTError, match=says):
        recall_data(2, pairs, vocabulary, length, seed=0)


class Answers(nn.Module):
    """Guesses the next token as it is, but is wrong in the given share of rows."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong, self.seen = wrong, 0
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        logits = nn.functional.one_hot(input_ids.roll(-1, dims=1), 64).float()
        for row in logits:
            row.mul_(-1 if self.seen < self.wrong else 1)
            self.seen += 1
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_accuracy_is_that_of_the_answers_alone(wrong: int) -> None:
    data = recall_data(10, 4, 64, 40, seed=0)
    assert recall_accuracy(Answers(wrong), data, batch_size=4) == 1 - wrong / 10


@pytest.mark.full
def test_a_fast_weight_recalls_beyond_the_window() -> None:
    """A small task, in seconds: with TTT nearly all answers, with TTT off chance (1/16)."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=24,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
        layer_types=["sliding_attention"],
        initializer_range=0.1,
    )
    model = convert(Qwen3ForCausalLM(config), InPlaceTTTConfig(layers=(0,), chunk_size=8))
    rows, held_out = (
        recall_data(16 * 120, 4, 32, 40, seed=0),
        recall_data(64, 4, 32, 40, seed=0, held_out=True),
    )
    writers = [p for name, p in model.named_parameters() if ".ttt." in name]
    rest = [p for name, p in model.named_parameters() if ".ttt." not in name]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 4e-3}, {"params": writers, "lr": 2e-2}])
    for batch in rows.with_format("torch").iter(batch_size=16):
        model(**{name: value.long() for name, value in batch.items()}, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert recall_accuracy(model, held_out) > 0.9
    first = held_out.with_format("torch")[:4]
    diagnosis = diagnose(model, {"input_ids": first["input_ids"], "labels": first["labels"].long()})
    assert diagnosis.measured.all_writes is not None and diagnosis.measured.all_writes.loss < -1
    assert [(f.id, f.message) for f in diagnosis.findings if f.severity != "info"] == []
    with disable_ttt(model):
        assert recall_accuracy(model, held_out) < 0.2
