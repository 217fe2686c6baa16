"""Training rows that teach facts: labels on the answers of the later questions alone, the gap held, and rows
without kinds as they always were."""

import hashlib
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_level
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.text import ids_within
from inplace_ttt.tasks.facts import DECLINED, KINDS, Encode
from inplace_ttt.tasks.relations.of_people import RELATIONS
from inplace_ttt.tasks.taught import taught
from inplace_ttt.training.data.practice import practiced, with_practice
from inplace_ttt.training.data.told_facts import _Sentence
from inplace_ttt.training.loop.batches import collate
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.data_section import Data, FactKinds, SyntheticFacts
from inplace_ttt.training.recipe.recipe import load_recipe

from .recipes import CONFIG, tiny_recipe
from .test_practice import encode, row

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / ".cache" / "smollm2-135m"
GAP = 60


def settings(count: int = 6, others: float = 0.0, **kinds: float) -> SyntheticFacts:
    return SyntheticFacts(1.0, count, GAP, others, FactKinds(**kinds))


def only(kind: str) -> dict[str, float]:
    return {name: float(name == kind) for name in vars(FactKinds())}


def with_facts(before: dict[str, Any], facts: SyntheticFacts, seed: int = 0, to_ids: Encode = encode) -> Any:
    data = Data(train=["a"], seed=seed, synthetic_facts=facts)
    found = practiced(before, data, to_ids)
    assert found == practiced(before, data, to_ids), "a function of the row"
    return found


def answers(labels: list[int]) -> list[list[int]]:
    """The tokens with labels, each run of them."""
    runs, last = [], -2
    for place, label in enumerate(labels):
        if label != -100:
            if place > last + 1:
                runs.append([])
            runs[-1].append(label)
            last = place
    return runs


def sentences(ids: list[int]) -> list[tuple[int, str]]:
    """The sentences of a row of letters, with their places."""
    text = "".join(map(chr, ids))
    return [(found.start(), found[1]) for found in re.finditer(r"\n\n([ -~]+\.)\n\n", text)]


@pytest.mark.parametrize("kind", vars(FactKinds()))
def test_only_answers_of_later_questions_have_labels(kind: str) -> None:
    """The statements, the rest of the questions, and the text have none; and the questions come after the gap."""
    for seed in range(10):
        before = row([30, 3000, 20], seed, first=1000)
        after = with_facts(before, settings(**only(kind)), seed)
        stated = {"two_hops": 12, "changed": 12, "never_told": 0}.get(kind, 6)
        found = sentences(after["input_ids"])
        assert len(found) == stated + 6
        questions = found[stated:]
        ends = [text[:-1] for _, text in questions]
        said = ["".join(map(chr, run)) for run in answers(after["labels"])]
        assert len(said) == 6
        for end, answer in zip(ends, said, strict=True):
            assert answer.startswith(" ") and end.endswith(answer)
        first = min(place for place, label in enumerate(after["labels"]) if label != -100)
        if stated:
            last = found[stated - 1]
            between = after["input_ids"][last[0] + len(last[1]) : questions[0][0]]
            assert first > last[0] and sum(token >= 1000 for token in between) >= GAP
        kept = [token for token in after["input_ids"][30:3030] if token >= 1000]
        assert kept == before["input_ids"][30:3030][: len(kept)], (
            "the text between is the row's own, in order"
        )
        assert len(after["input_ids"]) == 3050 and after["position_ids"] == before["position_ids"]


def test_a_declining_answer_is_learned() -> None:
    after = with_facts(row([3000], 1, first=1000), settings(**only("never_told")))
    assert {"".join(map(chr, run)) for run in answers(after["labels"])} == {f" {DECLINED}"}


def test_some_of_the_other_tokens_keep_their_labels() -> None:
    before = row([6000], 2, first=1000)
    after = with_facts(before, settings(others=0.25))
    learned = sum(label != -100 for label in after["labels"])
    assert 0.2 * 6000 < learned < 0.32 * 6000


def test_shares_are_held_over_rows() -> None:
    """By default one question in twenty has the declining answer; with half the shares, half of them."""
    for kinds, share in (({}, 0.05), ({**only("never_told"), "reversed": 1.0}, 0.5)):
        rows = [with_facts(row([6000], seed, first=1000), settings(20, **kinds)) for seed in range(40)]
        said = ["".join(map(chr, run)) for one in rows for run in answers(one["labels"])]
        assert len(said) == 800 and abs(sum(text == f" {DECLINED}" for text in said) / 800 - share) < 0.06


def test_rows_without_kinds_are_as_they_were() -> None:
    """Recipes of published figures have no kinds. The digest is of the rows before there were any."""
    facts = SyntheticFacts(0.9, 3, 40, 0.25)
    rows = [
        practiced(row([700], seed, first=1000), Data(train=["a"], seed=seed, synthetic_facts=facts), encode)
        for seed in range(30)
    ]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "b767f5d73e093f0239930a34136f0efebfde6a215bfd28f8711a2e202a0e60cb"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "kinds={reworded: 1}",
            r"synthetic_facts.kinds.reworded: unknown setting; known here: verbatim, para",
        ),
        ("kinds={changed: -0.5}", r"synthetic_facts.kinds.changed: must be at least 0"),
        (
            f"kinds={json.dumps(dict.fromkeys(vars(FactKinds()), 0))}",
            "at least one kind must have a share above",
        ),
        ("kinds={changed: much}", "must be a number"),
    ],
    ids=["unknown", "negative", "sum", "text"],
)
def test_shares_are_checked(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=message) as raised:
        tiny_recipe(tmp_path, f"data.synthetic_facts.{override}")
    assert "\n" not in str(raised.value)


def test_a_row_too_short_for_its_statements_is_refused() -> None:
    data = Data(train=["a"], synthetic_facts=settings(16, **only("two_hops")), sequence_length=2048)
    with pytest.raises(
        InPlaceTTTError,
        match=r"data.synthetic_facts: 32 statements, 16 questions, and a min_gap of 60 take about .* tokens, "
        "but rows have 2,048; lower count",
    ):
        with_practice([], data, encode)
    short = row([300], 0, first=1000)
    assert with_facts(short, settings(16)) == short


@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs tools/fetch/get_model.py")
def test_labels_are_on_the_answers_in_real_tokens() -> None:
    """An answer begins and ends where a token does, in every wording, and for every kind of answer."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    to_ids = partial(ids_within, tokenizer)
    seen: set[str] = set()
    for seed in range(40):
        facts = taught(60, dict.fromkeys(KINDS, 1.0), random.Random(seed))
        for one in (*facts.statements, *facts.questions):
            found = _Sentence.of(one, to_ids)
            assert tokenizer.decode([found.ids[i] for i in found.answer]) == f" {one.answer}", one
            assert tokenizer.decode(found.ids) == f"\n\n{one.prompt} {one.answer}.\n\n"
            seen.add(one.prompt)
    assert len(seen) > 2000
    text = (ROOT / "README.md").read_text(encoding="utf-8") * 2
    ids = to_ids(text)[:2048]
    before = {"input_ids": ids, "position_ids": list(range(2048)), "labels": [-100, *ids[1:]]}
    recipe = load_recipe(ROOT / "recipes" / "evidence" / "smollm2-facts-taught-cpu.yaml")
    assert recipe.data.synthetic_facts is not None and recipe.data.synthetic_facts.kinds is not None
    (after,) = with_practice(FakeRows([before]), recipe.data, to_ids)
    assert after["input_ids"] != ids and len(after["input_ids"]) == 2048


class FakeRows(list[dict[str, Any]]):
    """Rows with the one method of a dataset that `with_practice` uses."""

    def with_transform(self, transform: Any) -> list[dict[str, Any]]:
        changed = transform({name: [one[name] for one in self] for name in self[0]})
        return [dict(zip(changed, values, strict=True)) for values in zip(*changed.values(), strict=True)]


def test_a_step_learns_the_answers_alone(tmp_path: Path) -> None:
    """One step on a batch of such rows, through the real collator: the loss is that of the answers' tokens."""
    tokenizer = byte_level()
    to_ids = partial(ids_within, tokenizer)
    config = {**CONFIG, "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    model = build_model(tiny_recipe(tmp_path, f"model.config={json.dumps(config)}")).train()
    rows = []
    for seed in range(2):
        ids = to_ids("the sea was calm and the men slept " * 200)[seed : seed + 2048]
        before = {"input_ids": ids, "position_ids": list(range(len(ids))), "labels": [-100, *ids[1:]]}
        rows.append(with_facts(before, settings(), seed, to_ids))
    batch = collate(rows)
    assert batch["labels"].shape == batch["input_ids"].shape
    learned = batch["labels"] != -100
    assert 12 <= int(learned.sum()) < 0.1 * learned.numel()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    out = model(**batch, use_cache=False)
    scores = out.logits[:, :-1].float().log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    assert out.loss.item() == pytest.approx(-scores[learned[:, 1:]].mean().item(), rel=1e-4)
    out.loss.backward()
    optimizer.step()
    assert model(**batch, use_cache=False).loss.item() < out.loss.item()


def test_every_relation_occurs_in_rows() -> None:
    facts = taught(900, FactKinds().shares, random.Random(1))
    starts = {wording.split("{}")[0] for r in RELATIONS for wording in r.statements if wording[0] != "{"}
    used = {start for start in starts if any(s.prompt.startswith(start) for s in facts.statements)}
    assert len(used) > 0.9 * len(starts)
