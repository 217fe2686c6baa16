"""Rows that practice recall: which, and where in them passages come again and facts are told and said
again."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from families import WINDOW, build
from tiny import word_level

from inplace_ttt import InPlaceTTTError
from inplace_ttt.attention_window import attention_reach
from inplace_ttt.texts.sources import find
from inplace_ttt.training.data.packing import pack
from inplace_ttt.training.data.practice import practiced, seen_anyway, with_practice
from inplace_ttt.training.data.streams import Documents, RowStream, open_stream
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.data_section import Data, RepeatedPassages, SyntheticFacts

from .recipes import CONFIG, tiny_recipe

REPEAT = RepeatedPassages(fraction=0.5, length=10, gap=15)
FACTS = SyntheticFacts(fraction=1.0, count=3, min_gap=40)


def encode(text: str) -> list[int]:
    """A letter a token, so that what a row tells can be read."""
    return [ord(letter) for letter in text]


def changed_row(
    before: dict[str, list[int]], seed: int = 0, **practice: RepeatedPassages | SyntheticFacts
) -> dict[str, list[int]]:
    after = practiced(before, Data(train=["a"], seed=seed, **practice), encode)
    assert after == practiced(before, Data(train=["a"], seed=seed, **practice), encode), (
        "a function of the row"
    )
    return after


def row(documents: list[int], seed: int, first: int = 3) -> dict[str, list[int]]:
    ids = torch.randint(
        first, first + 94, (sum(documents),), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    positions = [i for length in documents for i in range(length)]
    labels = [-100 if position == 0 else token for token, position in zip(ids, positions, strict=True)]
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


@pytest.mark.parametrize("documents", [[64], [20, 44], [5, 40, 19]])
def test_a_passage_stands_again_inside_the_longest_document(documents: list[int]) -> None:
    changed = 0
    for seed in range(40):
        before = row(documents, seed)
        after = changed_row(before, repeated_passages=REPEAT)
        if after == before:
            continue
        changed += 1
        moved = [
            i for i, (a, b) in enumerate(zip(before["input_ids"], after["input_ids"], strict=True)) if a != b
        ]
        start = sum(documents[: documents.index(max(documents))])
        assert start + 25 <= moved[0] and moved[-1] < start + max(documents)
        ids = after["input_ids"]
        assert any(
            ids[first : first + 10] == ids[first + 25 : first + 35]
            for first in range(start, start + max(documents) - 34)
        )
        assert after["labels"] == [
            -100 if old == -100 else new for old, new in zip(before["labels"], ids, strict=True)
        ]
    assert 10 <= changed <= 30, "half of the rows"


def test_facts_and_passages_are_not_put_into_padding() -> None:
    """A row that is mostly padding: the document tells what it has room for, and the padding is as it was."""
    (packed,) = pack([list(range(1000, 1600))], 2048, 7)
    before = {name: values.tolist() for name, values in packed.items()}
    for practice in (
        {"synthetic_facts": SyntheticFacts(1.0, 3, 40, loss_on_other_tokens=0.0)},
        {"repeated_passages": RepeatedPassages(1.0, 100, 100)},
    ):
        after = changed_row(before, **practice)
        assert after["input_ids"][:600] != before["input_ids"][:600]
        assert (
            after["input_ids"][600:] == before["input_ids"][600:]
            and after["labels"][600:] == before["labels"][600:]
        )
        assert any(label != -100 for label in after["labels"])


def test_no_document_has_room() -> None:
    short = [row([30, 34], seed) for seed in range(20)]
    assert all(changed_row(r, repeated_passages=RepeatedPassages(1.0, 10, 15)) == r for r in short)
    assert all(changed_row(r, synthetic_facts=FACTS) == r for r in short)


@pytest.mark.parametrize("others", [1.0, 0.25, 0.0])
def test_facts_are_told_and_said_again_inside_the_longest_document(others: float) -> None:
    for seed in range(20):
        before = row([30, 700, 20], seed, first=1000)
        after = changed_row(before, synthetic_facts=SyntheticFacts(1.0, 3, 40, others))
        ids, labels = after["input_ids"], after["labels"]
        assert len(ids) == 750 and after["position_ids"] == before["position_ids"]
        assert ids[:30] == before["input_ids"][:30] and ids[730:] == before["input_ids"][730:]
        text = "".join(map(chr, ids))
        sentences = re.findall(r"\n\n([ -~]+\.)\n\n", text)
        first, again = sentences[:3], sentences[3:]
        assert len(set(first)) == 3 and sorted(first) == sorted(again)
        assert text.rindex(again[0]) - (text.index(first[-1]) + len(first[-1])) >= 40
        assert [token for token in ids[30:730] if token >= 1000] == before["input_ids"][30:730][
            : sum(t >= 1000 for t in ids[30:730])
        ]
        learned = [i for i, label in enumerate(labels) if label != -100]
        assert all(labels[i] == ids[i] for i in learned)
        answers = [" " + sentence.rsplit(" ", 1)[1].rstrip(".") for sentence in again]
        if others == 0:
            assert "".join(chr(labels[i]) for i in learned) == "".join(answers)
            assert learned[0] > text.index(first[-1])
        elif others == 1:
            assert [label == -100 for label in labels] == [label == -100 for label in before["labels"]]
        else:
            assert 0.15 * 750 < len(learned) - len("".join(answers)) < 0.35 * 750
            assert all(before["labels"][i] != -100 for i in learned)


def test_rows_without_room_for_facts_are_refused() -> None:
    data = Data(train=["a"], synthetic_facts=SyntheticFacts(1.0, 16, 256), sequence_length=512)
    with pytest.raises(
        InPlaceTTTError,
        match=r"data.synthetic_facts: 16 statements, 16 questions, and a min_gap of 256 take about [\d,]+ "
        r"tokens, but rows have 512",
    ):
        with_practice([], data, encode)


def test_shares_of_both_kinds() -> None:
    rows = [row([700], seed, first=1000) for seed in range(200)]
    both = {
        "synthetic_facts": SyntheticFacts(0.25, 3, 40),
        "repeated_passages": RepeatedPassages(0.5, 10, 15),
    }
    after = [changed_row(r, **both) for r in rows]
    told = sum(any(token < 1000 for token in r["input_ids"]) for r in after)
    same = sum(a == b for a, b in zip(after, rows, strict=True))
    assert 30 <= told <= 70 and 30 <= same <= 70, (told, same)
    assert all(
        changed_row(r, repeated_passages=REPEAT)
        == changed_row(r, repeated_passages=REPEAT, synthetic_facts=SyntheticFacts(1e-9, 3, 40))
        for r in rows
    )


def test_stored_and_streamed_rows_are_the_same(tmp_path: Path) -> None:
    rows = Dataset.from_list([row([64], seed) for seed in range(12)])
    data = Data(
        train=[str(tmp_path / "a.parquet")],
        repeated_passages=REPEAT,
        synthetic_facts=SyntheticFacts(0.3, 1, 0),
        seed=3,
    )
    stored = list(with_practice(rows, data, encode))
    rows.select_columns(["input_ids"]).to_parquet(tmp_path / "a.parquet")
    opened = open_stream(
        find(data.train[0], data.reading, "data.train"),
        data,
        word_level(f"w{n}" for n in range(97)),
        shuffle=False,
    )
    streamed = list(with_practice(RowStream(Documents((opened,), data), 64, 0, 1), data, encode))
    assert stored == streamed == [practiced(r, data, encode) for r in rows] != list(rows)
    assert with_practice(rows, Data(train=["a"]), encode) is rows


@pytest.mark.parametrize(
    ("practice", "length"),
    [({"repeated_passages": REPEAT}, 50), ({"synthetic_facts": FACTS}, 700)],
    ids=["repeat", "facts"],
)
def test_what_begins_a_text_stays_there(
    practice: dict[str, RepeatedPassages | SyntheticFacts], length: int
) -> None:
    """And comes nowhere else, however many facts are told right behind it, or where a passage begins."""
    begins, moved = (1001, 1002), 0
    for seed in range(300):
        plain = row([length], seed)
        marked = {
            name: [*start, *plain[name]]
            for name, start in zip(plain, (begins, (0, 1), (-100, begins[1])), strict=True)
        }
        marked["position_ids"] = list(range(length + 2))
        found = practiced(marked, Data(train=["a"], seed=seed, **practice), encode, begins)
        moved += found != marked
        assert (*found["input_ids"][:2],) == begins and not {*found["input_ids"][2:]} & {*begins}
    assert moved > 100


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.repeated_passages={fraction: 0}", "above 0"),
        ("data.repeated_passages={length: 40, gap: 0}", "takes 80 tokens"),
        ("data.synthetic_facts={fraction: 1.5}", "at most 1"),
        ("data.synthetic_facts={count: 0}", "at least 1"),
        ("data.synthetic_facts={count: 3000}", "synthetic_facts.count: must be at most 1,000"),
        ("data.synthetic_facts={loss_on_other_tokens: 2}", "from 0 to 1"),
        ("model.window={size: 0}", "at least 1"),
        ("model.window={size: 4, sinks: 4}", "below size"),
    ],
)
def test_settings_are_checked(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=says):
        tiny_recipe(tmp_path, override)


def test_a_preset_that_measures_is_converted_first(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "ttt.preset=ridge")
    with pytest.raises(InPlaceTTTError, match="convert MODEL OUT --calibrate TEXT"):
        build_model(recipe)


def test_a_window_is_set_on_the_model(tmp_path: Path) -> None:
    config = {**{k: v for k, v in CONFIG.items() if k != "sliding_window"}, "model_type": "llama"}
    model = build_model(
        tiny_recipe(tmp_path, f"model.config={json.dumps(config)}", "model.window={size: 8, sinks: 2}")
    ).eval()
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


def test_what_attention_sees_anyway_is_said() -> None:
    both = Data(
        train=["a"], repeated_passages=REPEAT, synthetic_facts=dataclasses.replace(FACTS, fraction=0.5)
    )
    assert seen_anyway(both, 25) == [] and seen_anyway(Data(train=["a"]), math.inf) == []
    (one,) = seen_anyway(both, 26)
    assert one.startswith(
        "data.repeated_passages repeats text after 25 tokens, but attention sees the last 26"
    )
    assert [warning.split()[0] for warning in seen_anyway(both, math.inf)] == [
        "data.repeated_passages",
        "data.synthetic_facts",
    ]


def test_how_far_attention_sees() -> None:
    full, mixed, windows = (build(name).config for name in ("llama", "gemma3", "mistral"))
    assert [attention_reach(text, None) for text in (full, mixed, windows)] == [math.inf, math.inf, WINDOW]
    assert [attention_reach(text, 5) for text in (full, mixed, windows)] == [5, 5, 5] and attention_reach(
        windows, 99
    ) == WINDOW
