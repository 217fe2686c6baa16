"""`inplace-ttt ruler`: its table, batches, interruptions, and what it says to a reader."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedModel

from inplace_ttt import cli, disable_ttt, load
from inplace_ttt.evaluation.long_context import answers
from inplace_ttt.evaluation.long_context.answers import answer
from inplace_ttt.evaluation.long_context.prompt import Prompter, Sample, samples
from inplace_ttt.evaluation.ruler.material import Material
from inplace_ttt.evaluation.ruler.tasks import TASKS

from .ruler_runs import BASIC, LENGTH, QUICK, command, predictions, ruler


@pytest.fixture(autouse=True)
def _there(ruler_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ruler_folder)


def test_one_table_for_on_off_and_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = ruler(capsys, *BASIC, "--base", "base", "--out", tmp_path / "out")
    assert [(row["task"], row["length"]) for row in result["rows"]] == [
        (name, LENGTH) for name in ("niah_single_2", "fwe", "qa_1")
    ]
    for row in result["rows"]:
        assert all(0.98 * LENGTH <= n + TASKS[row["task"]].budget <= LENGTH for n in row["tokens"])
        assert row["on"]["n"] == row["difference"]["n"] == 3
        assert row["difference"]["mean"] == pytest.approx(row["on"]["mean"] - row["off"]["mean"])
    assert result["averages"][0]["on"]["n"] == 3 and result["warnings"] == []
    said = predictions(tmp_path / "out")
    for name in ("niah_single_2", "fwe", "qa_1"):
        assert said[f"off-{name}-{LENGTH}"] == said[f"base-{name}-{LENGTH}"] != said[f"on-{name}-{LENGTH}"]
    assert cli.main(command(*BASIC, "--out", tmp_path / "out")) == 0
    assert "average of 3" in capsys.readouterr().out


def test_a_batch_answers_as_its_rows_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for size in (1, 2, 3):
        ruler(capsys, *QUICK, "--batch-size", size, "--out", tmp_path / str(size))
    assert predictions(tmp_path / "1") == predictions(tmp_path / "2") == predictions(tmp_path / "3")


@torch.no_grad()
def greedy(model: PreTrainedModel, sample: Sample, budget: int) -> list[int]:
    """Without a cache, padding or pieces: one whole forward a token."""
    ids = torch.tensor([sample.ids])
    for _ in range(budget):
        token = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        if token.item() == 2:
            break
        ids = torch.cat([ids, token], dim=1)
    return ids[0, len(sample.ids) :].tolist()


@pytest.mark.parametrize("ttt", ["on", "off"])
def test_answers_are_greedy_whatever_the_checkpoint_sets_for_chatting(
    ttt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_PREFILL", 100)  # pieces that end inside chunks
    model = load("ttt")
    model.generation_config.update(
        repetition_penalty=3.0, do_sample=True, temperature=2.0, no_repeat_ngram_size=2
    )
    before = model.generation_config.to_dict()
    words = AutoTokenizer.from_pretrained("ttt")
    batch = list(samples(TASKS["fwe"], LENGTH, 3, 0, Material(), Prompter(words)))
    assert len({len(sample.ids) for sample in batch}) > 1, "nothing is padded"
    with torch.no_grad(), disable_ttt(model) if ttt == "off" else torch.no_grad():
        expected = [words.decode(greedy(model, sample, 12), skip_special_tokens=True) for sample in batch]
        assert answer(model, words, batch, 12) == expected
    assert model.generation_config.to_dict() == before


def test_a_run_that_was_stopped_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ruler(capsys, *QUICK, "--out", tmp_path / "whole")
    answered: list[str] = []

    def counted(model: Any, tokenizer: Any, batch: Any, budget: int) -> list[str]:
        if len(answered) == 8:
            raise KeyboardInterrupt
        answered.extend(sample.task for sample in batch)
        return answer(model, tokenizer, batch, budget)

    monkeypatch.setattr(answers, "answer", counted)
    arguments = ["--haystack", "book.txt", "--qa", "questions.jsonl", *QUICK, "--out", str(tmp_path / "part")]
    assert cli.main(["ruler", "ttt", *arguments]) == 130
    assert list(predictions(tmp_path / "part")) == [f"off-fwe-{LENGTH}", f"on-fwe-{LENGTH}"]
    assert all(file.suffix == ".json" for file in (tmp_path / "part").iterdir())
    monkeypatch.setattr(
        answers,
        "answer",
        lambda *given: answered.extend(sample.task for sample in given[2]) or answer(*given),
    )
    answered.clear()
    assert ruler(capsys, *QUICK, "--out", tmp_path / "part") == whole
    assert len(answered) == 3 * 2, "what was there has been made again"
    answered.clear()
    wider = ruler(capsys, *QUICK, "--lengths", "1024,900", "--out", tmp_path / "part")
    assert wider["rows"][:2] == whole["rows"] and len(answered) == 3 * 4


def test_the_samples_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are those that the model is asked; a base will do."""
    arguments = [
        "ruler",
        "base",
        "--qa",
        "questions.jsonl",
        *QUICK,
        "--write-samples",
        str(tmp_path / "s"),
        "--json",
    ]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["written"] == 6
    ruler(capsys, *QUICK, "--out", tmp_path / "out")
    for name in ("fwe", "qa_1"):
        lines = [
            json.loads(line) for line in (tmp_path / "s" / f"{name}-{LENGTH}.jsonl").read_text().splitlines()
        ]
        asked = json.loads((tmp_path / "out" / f"on-{name}-{LENGTH}.json").read_text())
        assert [line["outputs"] for line in lines] == asked["answers"]
        assert [line["length"] - line["tokens_to_generate"] for line in lines] == asked["tokens"]


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    plain, chat = (ruler(capsys, *QUICK, *more) for more in ([], ["--chat"]))
    assert [row["tokens"] for row in plain["rows"]] != [row["tokens"] for row in chat["rows"]]


def test_what_a_reader_must_know_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A length beyond the model's positions is read whole; one within a chunk shows no fast weight."""
    tiny.save_converted(tiny.save_base(tmp_path / "base", positions=900), tmp_path / "ttt")
    assert (
        cli.main(
            [
                "ruler",
                str(tmp_path / "ttt"),
                "--lengths",
                "1000",
                "--tasks",
                "fwe",
                "--samples",
                "1",
                "--json",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["rows"][0]["tokens"][0] > 900
    assert "1,000 tokens exceed the 900 positions" in result["warnings"][0] and result["warnings"][0] in err
    config = json.loads((tmp_path / "ttt" / "config.json").read_text())
    config["inplace_ttt"]["config"]["chunk_size"] = 1000
    (tmp_path / "ttt" / "config.json").write_text(json.dumps(config))
    assert (
        cli.main(
            [
                "ruler",
                str(tmp_path / "ttt"),
                "--lengths",
                "1000",
                "--tasks",
                "fwe",
                "--samples",
                "1",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert "on and off are the same" in result["warnings"][1]
    assert result["averages"][0]["on"] == result["averages"][0]["off"]


def test_a_prompt_ends_where_the_answer_begins() -> None:
    """A tokenizer may close every text that it reads."""
    words = tiny.tokenizer()
    plain = Prompter(words)
    closing = tiny.tokenizer()
    closing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    sample = next(samples(TASKS["fwe"], LENGTH, 1, 0, Material(), plain))
    assert closing("a").input_ids[-1] == 2 and Prompter(closing).ids(sample.draft) == [
        1,
        *plain.ids(sample.draft),
    ]
