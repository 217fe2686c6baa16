"""`inplace-ttt evaluate --tasks`: its table, batches, interruptions, and what it says to a reader."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, cli, convert, disable_ttt, load
from inplace_ttt.evaluation.harness import prompt_lm
from inplace_ttt.evaluation.harness.generated import lm_eval_tasks
from inplace_ttt.evaluation.harness.names import TASKS
from inplace_ttt.evaluation.harness.prompt_lm import PromptLM
from inplace_ttt.evaluation.prompt import Prompter, samples
from inplace_ttt.evaluation.ruler.material import Material

from .task_runs import BASIC, LENGTH, QUICK, evaluate, kept, predictions

MINE = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
"""
KINDS = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: [whale, a ship]\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "text": "output_type: loglikelihood_rolling\n"
    "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n",
    "continuation": "output_type: generate_until\n"
    'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}\n'
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
}


@pytest.fixture(autouse=True)
def _there(tasks_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tasks_folder)


def test_one_table_for_on_off_and_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = evaluate(capsys, *BASIC, "--base", "base", "--out", tmp_path / "out")
    assert [row["task"] for row in result["rows"]] == result["tasks"] == BASIC[1].split(",")
    for row in result["rows"]:
        assert all(0.98 * LENGTH <= n + TASKS[row["task"]].budget <= LENGTH for n in row["tokens"])
        assert ("chance" in row) == ("shallow" in row) == row["task"].startswith("babilong")
        for name in ("on", "off", "base"):
            assert 0 <= row[name]["low"] <= row[name]["mean"] <= row[name]["high"] <= 1
        assert row["on"]["n"] == row["difference"]["n"] == 3
        assert row["difference"]["mean"] == pytest.approx(row["on"]["mean"] - row["off"]["mean"])
    assert [(average["family"], average["on"]["n"]) for average in result["averages"]] == [
        ("ruler", 9), ("babilong", 6),
    ]  # fmt: skip
    assert result["warnings"] == []
    said = predictions(tmp_path / "out")
    for name in result["tasks"]:
        on, off, base = (said[f"{column}-{name}-{LENGTH}"] for column in ("on", "off", "base"))
        assert off == base != on
    assert cli.main(["evaluate", "ttt", *BASIC, "--base", "base", "--out", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == f"{LENGTH:,} tokens chance shallow on off base on - off".split()
    assert table[6].startswith("average of 3 ruler") and table[7].startswith("average of 2 babilong")


def test_the_figures_are_those_of_what_was_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TTT on two of three are answered rightly, with TTT off the first alone."""
    right = iter([True, True, False, True, False, False])

    def known(self: PromptLM, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        return [f" {request.doc['answers'][0]}.\n" if next(right) else "the sea" for request in requests]

    monkeypatch.setattr(PromptLM, "generate_until", known)
    arguments = ["--tasks", "babilong_qa4", "--lengths", LENGTH, "--samples", 3, "--text", "book.txt"]
    out = tmp_path / "out"
    (row,) = evaluate(capsys, *arguments, "--out", out)["rows"]
    assert row["on"]["mean"] == pytest.approx(2 / 3) and row["on"]["n"] == 3
    assert (row["on"]["low"], row["on"]["high"]) == pytest.approx((0.2077, 0.9385), abs=1e-4)
    assert row["off"]["mean"] == pytest.approx(1 / 3) and row["difference"]["mean"] == pytest.approx(1 / 3)
    assert row["chance"] == 0.5
    file = kept(out)[f"on-babilong_qa4-{LENGTH}"]
    assert file["metrics"]["score"]["scores"] == [1, 1, 0] and file["samples"][2]["prediction"] == "the sea"
    for sample in file["samples"]:
        assert len(sample["options"]) == 2 and sample["answers"][0] in sample["options"]
    best = max(
        sum(sample["guesses"][rule] == sample["answers"][0] for sample in file["samples"])
        for rule in range(3)
    )
    assert row["shallow"] == pytest.approx(best / 3)
    assert file["asked"]["task"] == "babilong_qa4" and len(file["asked"]["text"]) == 64
    assert cli.main(["evaluate", "ttt", *map(str, arguments), "--out", str(out)]) == 0
    line = " ".join(capsys.readouterr().out.splitlines()[1].split())
    assert line == (
        f"babilong_qa4 0.500 {best / 3:.3f} 0.667 (0.21 to 0.94) 0.333 (0.06 to 0.79) +0.333 ± 0.333"
    )


def test_a_batch_answers_as_its_rows_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for size in (1, 2, 3):
        evaluate(capsys, *QUICK, "--batch-size", size, "--out", tmp_path / str(size))
    assert kept(tmp_path / "1") == kept(tmp_path / "2") == kept(tmp_path / "3")


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: list[int], budget: int) -> list[int]:
    """Without a cache, padding or pieces: one whole forward a token."""
    row = torch.tensor([ids])
    for _ in range(budget):
        token = model(row, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        if token.item() == 2:
            break
        row = torch.cat([row, token], dim=1)
    return row[0, len(ids) :].tolist()


@pytest.mark.parametrize("ttt", ["on", "off"])
def test_answers_are_greedy_whatever_the_checkpoint_sets_for_chatting(
    ttt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lm, "_PREFILL", 100)  # pieces that end inside chunks
    model = load("ttt")
    model.generation_config.update(
        repetition_penalty=3.0, do_sample=True, temperature=2.0, no_repeat_ngram_size=2
    )
    before = model.generation_config.to_dict()
    prompter = Prompter(AutoTokenizer.from_pretrained("ttt"))
    (task,) = lm_eval_tasks(["ruler_fwe"], [LENGTH], prompter.tokenizer, samples=3)
    task.config.generation_kwargs["max_gen_toks"] = 12
    task.build_all_requests()
    rows = [prompter.ids(request.args[0]) for request in task.instances]
    assert [len(row) for row in rows] == [doc["tokens"] for doc in task.test_docs()]
    assert len({*map(len, rows)}) > 1, "nothing is padded"
    with torch.no_grad(), disable_ttt(model) if ttt == "off" else torch.no_grad():
        expected = [
            prompter.tokenizer.decode(greedy(model, row, 12), skip_special_tokens=True) for row in rows
        ]
        assert PromptLM(model, prompter, 3).generate_until(task.instances) == expected
    assert model.generation_config.to_dict() == before


def test_tasks_for_lm_eval_itself() -> None:
    """With lm-eval's own class of a model, and its own aggregation."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    words = AutoTokenizer.from_pretrained("ttt")
    tasks = lm_eval_tasks(["ruler_vt", "babilong_qa1"], [1500, 1600], words, texts=["book.txt"], samples=2)
    found = lm_eval.simple_evaluate(HFLM(pretrained=load("ttt"), tokenizer=words), tasks=tasks)
    assert {*found["results"]} == {
        f"{name}-{n}" for name in ("ruler_vt", "babilong_qa1") for n in (1500, 1600)
    }
    assert 0 <= found["results"]["ruler_vt-1500"]["score,none"] <= 1
    assert found["results"]["ruler_vt-1500"]["score_stderr,none"] != "N/A"


def task_file(folder: Path, kind: str) -> str:
    """The name of a file with a task of five texts."""
    rows = [{"text": tiny.text(180 + 7 * i, seed=i), "answer": i % 2} for i in range(5)]
    tiny.write_lines(folder / "rows.jsonl", rows)
    body = KINDS[kind] if kind != "text" else KINDS[kind] + 'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    own = MINE if kind != "text" else MINE.partition("doc_to_text")[0]
    (folder / f"{kind}.yaml").write_text(own + body)
    return f"{kind}.yaml"


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_lm_eval(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, tasks_folder: Path
) -> None:
    arguments = [
        "--tasks",
        task_file(tasks_folder, kind),
        "--samples",
        4,
        "--base",
        "base",
        "--batch-size",
        2,
    ]
    result = evaluate(capsys, *arguments, "--out", tmp_path / "out")
    (row,), files = result["rows"], kept(tmp_path / "out")
    said = predictions(tmp_path / "out")
    assert (row["task"], row["length"], row["on"]["n"]) == ("mine", None, 4) and result["tasks"] == ["mine"]
    assert said["on-mine"] != said["off-mine"] and len(said["on-mine"]) == 4
    assert str(said["off-mine"])[:7] == str(said["base-mine"])[:7]
    assert row["higher_is_better"] == (kind != "text")
    if kind == "text":  # a mean over bytes, not over samples
        assert files["on-mine"]["metrics"]["bits_per_byte"]["scores"] is None and "low" not in row["on"]
        assert row["difference"]["stderr"] is None and row["on"]["mean"] != row["off"]["mean"]
        assert cli.main(["evaluate", "ttt", *map(str, arguments), "--out", str(tmp_path / "out")]) == 0
        assert "mine bits_per_byte (lower is better)" in capsys.readouterr().out
    else:
        assert row["difference"]["mean"] == pytest.approx(row["on"]["mean"] - row["off"]["mean"])
        assert row["difference"]["stderr"] is not None and "low" in row["on"]


def test_a_model_that_writes_its_prompt_writes_only_before_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tasks_folder: Path
) -> None:
    write = {"conv": "next", "target": "hidden_states", "prompt_write": {"eta": 1.0, "cap": 0.3}}
    model = convert(AutoModelForCausalLM.from_pretrained("base"), InPlaceTTTConfig(layers=(0,), **write))
    model.save_pretrained("prompted")
    AutoTokenizer.from_pretrained("base").save_pretrained("prompted")
    silent, asked = (task_file(tasks_folder, kind) for kind in ("choice", "continuation"))
    for file, warned in ((silent, True), (asked, False)):
        arguments = ["evaluate", "prompted", "--tasks", file, "--samples", "2", "--out", str(tmp_path / file)]
        assert cli.main([*arguments, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        said = predictions(tmp_path / file)
        assert ("writes only before it answers" in str(result["warnings"])) == warned
        assert (said["on-mine"] == said["off-mine"]) == warned


def test_a_run_that_was_stopped_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(capsys, *QUICK, "--out", tmp_path / "whole")
    answered: list[int] = []
    generate = PromptLM._model_generate

    def counted(self: PromptLM, context: torch.Tensor, *given: Any, **settings: Any) -> torch.Tensor:
        if len(answered) == stop:
            raise KeyboardInterrupt
        answered.append(len(context))
        return generate(self, context, *given, **settings)

    monkeypatch.setattr(PromptLM, "_model_generate", counted)
    stop = 8
    assert cli.main(["evaluate", "ttt", *QUICK, "--out", str(tmp_path / "part")]) == 130
    assert list(kept(tmp_path / "part")) == [f"off-ruler_fwe-{LENGTH}", f"on-ruler_fwe-{LENGTH}"]
    stop = -1
    answered.clear()
    assert evaluate(capsys, *QUICK, "--out", tmp_path / "part") == whole
    assert len(answered) == 3 * 2, "what was there has been made again"
    answered.clear()
    wider = evaluate(capsys, *QUICK, "--lengths", f"{LENGTH},1600", "--out", tmp_path / "part")
    assert wider["rows"][:2] == whole["rows"] and len(answered) == 3 * 4


def test_the_samples_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those that the model is asked; a base will do, without lm-eval."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)
        assert cli.main(["evaluate", "base", *QUICK, "--write-samples", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == 6
    evaluate(capsys, *QUICK, "--out", tmp_path / "out")
    for name in ("ruler_fwe", "babilong_qa4"):
        lines = [
            json.loads(line) for line in (tmp_path / "s" / f"{name}-{LENGTH}.jsonl").read_text().splitlines()
        ]
        asked = kept(tmp_path / "out")[f"on-{name}-{LENGTH}"]["samples"]
        assert [line["outputs"] for line in lines] == [sample["answers"] for sample in asked]
        assert [line.get("options", []) for line in lines] == [sample["options"] for sample in asked]
        assert [line["length"] - line["tokens_to_generate"] for line in lines] == [
            sample["tokens"] for sample in asked
        ]


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    plain, chat = (evaluate(capsys, *QUICK, *more) for more in ([], ["--chat"]))
    assert [row["tokens"] for row in plain["rows"]] != [row["tokens"] for row in chat["rows"]]


def test_what_a_reader_must_know_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A length beyond the model's positions is read whole; one within a chunk shows no fast weight."""
    tiny.save_converted(tiny.save_base(tmp_path / "base", positions=900), tmp_path / "ttt")
    command = [
        "evaluate",
        str(tmp_path / "ttt"),
        "--tasks",
        "ruler_fwe",
        "--lengths",
        "1000",
        "--samples",
        "1",
    ]
    assert cli.main([*command, "--text", "book.txt", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["rows"][0]["tokens"][0] > 900
    assert "--text does nothing: none of these tasks" in result["warnings"][0]
    assert "1,000 tokens exceed the 900 positions" in result["warnings"][1] and result["warnings"][1] in err
    config = json.loads((tmp_path / "ttt" / "config.json").read_text())
    config["inplace_ttt"]["config"]["chunk_size"] = 1000
    (tmp_path / "ttt" / "config.json").write_text(json.dumps(config))
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "on and off are the same" in result["warnings"][1]
    assert result["rows"][0]["on"] == result["rows"][0]["off"]


def test_a_prompt_ends_where_the_answer_begins() -> None:
    """A tokenizer may close every text that it reads."""
    words = tiny.tokenizer()
    plain = Prompter(words)
    closing = tiny.tokenizer()
    closing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    sample = next(samples(TASKS["ruler_fwe"], LENGTH, 1, 0, Material(), plain))
    text = plain.text(sample.draft)
    assert closing("a").input_ids[-1] == 2 and Prompter(closing).ids(text) == [1, *plain.ids(text)]
    assert sample.ids == plain.ids(text)
