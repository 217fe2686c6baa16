"""Passages that come again: where, in which rows, and that a run with them and a window trains."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from inplace_ttt import InPlaceTTTError
from inplace_ttt.training.data_settings import Data, Repeat
from inplace_ttt.training.model import build_model
from inplace_ttt.training.repeated_passages import repeat_passage, with_repeated_passages
from inplace_ttt.training.sources import find
from inplace_ttt.training.streams import Documents, RowStream, open_stream

from .recipes import CONFIG, tiny_recipe

REPEAT = Repeat(share=0.5, length=10, gap=15)


def row(documents: list[int], seed: int) -> dict[str, list[int]]:
    ids = torch.randint(3, 97, (sum(documents),), generator=torch.Generator().manual_seed(seed)).tolist()
    positions = [i for length in documents for i in range(length)]
    labels = [-100 if position == 0 else token for token, position in zip(ids, positions, strict=True)]
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


@pytest.mark.parametrize("documents", [[64], [20, 44], [5, 40, 19]])
def test_a_passage_stands_again_inside_the_longest_document(documents: list[int]) -> None:
    changed = 0
    for seed in range(40):
        before = row(documents, seed)
        after = repeat_passage(before, REPEAT, seed=0)
        assert after == repeat_passage(before, REPEAT, seed=0), "a function of the row"
        if after == before:
            continue
        changed += 1
        moved = [i for i, (a, b) in enumerate(zip(before["input_ids"], after["input_ids"], strict=True)) if a != b]
        start = sum(documents[: documents.index(max(documents))])
        assert start + 25 <= moved[0] and moved[-1] < start + max(documents)
        ids = after["input_ids"]
        assert any(ids[first : first + 10] == ids[first + 25 : first + 35] for first in range(start, start + max(documents) - 34))
        assert after["labels"] == [-100 if old == -100 else new for old, new in zip(before["labels"], ids, strict=True)]
    assert 10 <= changed <= 30, "half of the rows"


def test_no_document_has_room() -> None:
    short = [row([30, 34], seed) for seed in range(20)]
    assert all(repeat_passage(r, Repeat(1.0, 10, 15), 0) == r for r in short)


def test_stored_and_streamed_rows_are_the_same(tmp_path: Path) -> None:
    rows = Dataset.from_list([row([64], seed) for seed in range(12)])
    stored = list(with_repeated_passages(rows, REPEAT, 3))
    rows.select_columns(["input_ids"]).to_parquet(tmp_path / "a.parquet")
    data = Data(train=[str(tmp_path / "a.parquet")])
    opened = open_stream(find(data.train, "auto", "train")[0], data, range(100), shuffle=False)
    streamed = list(with_repeated_passages(RowStream(Documents((opened,), data), 64, 0, 1), REPEAT, 3))
    assert stored == streamed == [repeat_passage(r, REPEAT, 3) for r in rows] != list(rows)
    assert with_repeated_passages(rows, None, 3) is rows


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.repeat={share: 0}", "above 0"),
        ("data.repeat={length: 40, gap: 0}", "takes 80 tokens"),
        ("model.window={size: 0}", "at least 1"),
        ("model.window={size: 4, sinks: 4}", "below size"),
    ],
)
def test_settings_are_checked(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=says):
        tiny_recipe(tmp_path, override)


def test_a_preset_that_measures_is_converted_first(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "surgery.preset=compact")
    with pytest.raises(InPlaceTTTError, match="convert MODEL OUT --calibrate TEXT"):
        build_model(recipe)


def test_a_window_is_set_on_the_model(tmp_path: Path) -> None:
    config = {**{k: v for k, v in CONFIG.items() if k != "sliding_window"}, "model_type": "llama"}
    model = build_model(tiny_recipe(tmp_path, f"model.config={json.dumps(config)}", "model.window={size: 8, sinks: 2}")).eval()
    ids = torch.arange(3, 43)[None]
    other = ids.clone()
    other[0, 4] = 90
    with torch.no_grad():
        first = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
        seen: list[torch.Tensor] = []
        first.register_forward_hook(lambda m, args, out: seen.append(out[0]))
        for row_ids in (ids, other):
            model(input_ids=row_ids, use_cache=False)
    changed = (seen[0] != seen[1]).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(4, 12)), "token 4 is seen by eight tokens, itself among them"
