"""Converted checkpoints through lm-evaluation-harness, offline: an ordinary HF model, TTT on and off, any
batch size."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, Session, convert, disable_ttt, load
from inplace_ttt.evaluation.babilong.stories import KINDS
from inplace_ttt.families import CACHE

MODEL = Path(__file__).parents[2] / ".cache" / "smollm2-135m"
TASKS = {
    "choice": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{answer}}"
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]""",
    "text": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: bits_per_byte}]""",
    "continuation": """
        output_type: generate_until
        doc_to_text: "{{text}}"
        doc_to_target: "whale"
        generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on local files, a base, and it converted. Prompts take several chunks, and each its own
    number of tokens."""
    folder = tmp_path_factory.mktemp("lm-eval")
    texts = [tiny.text(180 + 7 * i, seed=i) for i in range(5)]
    choices = ["whale", "a ship", "sea of it"]
    rows = [
        {"text": text, "question": text, "choices": choices, "answer": i % 3} for i, text in enumerate(texts)
    ]
    tiny.write_lines(folder / "rows.jsonl", rows)
    for name, body in TASKS.items():
        data = (
            "dataset_path: json\ndataset_kwargs: {data_files: {test: "
            f"{folder / 'rows.jsonl'}}}}}\ntest_split: test\n"
        )
        lines = "\n".join(line.strip() for line in body.strip().splitlines())
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{lines}\nmetadata: {{version: 1.0}}\n")
    tiny.save_converted(tiny.save_base(folder / "base"), folder / "ttt")
    return folder


def evaluate(
    place: Path, model: Any, tasks: tuple[str, ...] = tuple(TASKS), **settings: Any
) -> dict[str, list[Any]]:
    """What each task's samples came to."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, device="cpu", **settings)
    manager = TaskManager(include_path=str(place), include_defaults=False)
    results = lm_eval.simple_evaluate(lm, tasks=list(tasks), task_manager=manager, limit=5, bootstrap_iters=0)
    return {task: [sample["filtered_resps"] for sample in rows] for task, rows in results["samples"].items()}


def test_on_off_and_base_in_any_batch(place: Path) -> None:
    words, model = AutoTokenizer.from_pretrained(place / "ttt"), load(place / "ttt")
    on = evaluate(place, model, tokenizer=words, batch_size=1)
    batched = evaluate(place, model, tokenizer=words, batch_size=3)
    with disable_ttt(model):
        off = evaluate(place, model, tokenizer=words, batch_size=3)
    base = evaluate(
        place, AutoModelForCausalLM.from_pretrained(place / "base"), tokenizer=words, batch_size=3
    )
    for task in TASKS:
        assert numbers(batched[task]) == pytest.approx(numbers(on[task]), rel=1e-4)
        assert numbers(off[task]) == pytest.approx(numbers(base[task]), rel=1e-4)
    assert batched["continuation"] == on["continuation"] != off["continuation"] == base["continuation"]
    assert numbers(on["text"]) != pytest.approx(numbers(off["text"]), rel=1e-2)
    assert numbers(on["choice"]) != pytest.approx(numbers(off["choice"]), rel=1e-2)


def numbers(responses: list[Any]) -> list[float]:
    """Every number in the answers of a task, in order."""
    if isinstance(responses, (list, tuple)):
        return [number for response in responses for number in numbers(response)]  # type: ignore[arg-type]
    return [] if isinstance(responses, (str, bool)) else [float(responses)]


@torch.no_grad()
def test_its_likelihoods_are_the_models(place: Path) -> None:
    """A text's log-likelihood by lm-eval against one plain forward, which writes while it reads."""
    words, model = AutoTokenizer.from_pretrained(place / "ttt"), load(place / "ttt")
    found = numbers(evaluate(place, model, ("text",), tokenizer=words, batch_size=2)["text"])
    texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
    for likelihood, text in zip(found, texts, strict=True):
        ids = torch.tensor([[words.bos_token_id, *words(text, add_special_tokens=False).input_ids]])
        assert ids.shape[1] > 2 * tiny.CHUNK
        logs = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        assert likelihood == pytest.approx(logs.gather(1, ids[0, 1:, None]).sum().item(), rel=1e-4)


def test_the_command_line_knows_nothing_of_us(place: Path, tmp_path: Path) -> None:
    """`lm_eval --model hf` with trust_remote_code, in a process that did not import this package, gives the
    same."""
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--device",
        "cpu",
        "--batch_size",
        "3",
        "--tasks",
        "text",
    ]
    paths = ["--include_path", str(place), "--output_path", str(tmp_path / "out"), "--limit", "5"]
    model = ["--model_args", f"pretrained={place / 'ttt'},trust_remote_code=True,dtype=float32"]
    places = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **places}
    done = subprocess.run(
        [*command, *paths, *model], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["text"]["bits_per_byte,none"]
    words = AutoTokenizer.from_pretrained(place / "ttt")
    expected = numbers(evaluate(place, load(place / "ttt"), ("text",), tokenizer=words)["text"])
    texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
    assert found == pytest.approx(
        -sum(expected) / sum(len(text.encode()) for text in texts) / math.log(2), rel=1e-4
    )


def test_its_own_babilong(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that it has, on stories of ours in the place of the ones it would download."""
    import datasets
    import lm_eval.tasks

    stories = [KINDS["babilong_qa1"].story(Random(f"{i}"), 60) for i in range(5)]
    rows = [
        {"input": " ".join(story.facts), "question": story.question, "target": story.answer}
        for story in stories
    ]
    asked: list[tuple[Any, ...]] = []

    def stand_in(path: str, *, name: str, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    words, model = AutoTokenizer.from_pretrained(place / "ttt"), load(place / "ttt")
    folder = Path(lm_eval.tasks.__file__).parent / "babilong"
    on = evaluate(folder, model, ("babilong_qa1",), tokenizer=words, batch_size=2, max_length=4096)
    with disable_ttt(model):
        off = evaluate(folder, model, ("babilong_qa1",), tokenizer=words, batch_size=2, max_length=4096)
    base = evaluate(
        folder,
        AutoModelForCausalLM.from_pretrained(place / "base"),
        ("babilong_qa1",),
        tokenizer=words,
        max_length=4096,
    )
    assert {*asked} == {("RMT-team/babilong-1k-samples", "0k", "qa1")} and len(on["babilong_qa1"]) == 5
    assert on != off == base


@pytest.fixture(scope="module")
def session(place: Path) -> Path:
    """A session that has read a text, with an unfinished chunk."""
    words, model = AutoTokenizer.from_pretrained(place / "ttt"), load(place / "ttt", dtype=torch.float32)
    read = Session(model)
    read.read(words(tiny.text(300, seed=9), return_tensors="pt").input_ids)
    assert read.chunks_written > 2 and read.unwritten
    read.save(place / "book.session")
    return place / "book.session"


@torch.no_grad()
def test_a_session_is_read_once_and_asked_many_times(place: Path, session: Path) -> None:
    """Likelihoods and answers under the session's fast weights, alone and in a batch."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from inplace_ttt.clients.lm_eval import SessionLM

    def asked(batch: int, **settings: Any) -> dict[str, list[Any]]:
        lm = SessionLM(str(place / "ttt"), dtype="float32", batch_size=batch, **settings)
        manager = TaskManager(include_path=str(place), include_defaults=False)
        found = lm_eval.simple_evaluate(
            lm, tasks=["text", "continuation"], task_manager=manager, limit=5, bootstrap_iters=0
        )
        return {
            task: [sample["filtered_resps"] for sample in rows] for task, rows in found["samples"].items()
        }

    alone, batched, without = asked(1, session=str(session)), asked(3, session=str(session)), asked(3)
    assert numbers(batched["text"]) == pytest.approx(numbers(alone["text"]), rel=1e-4)
    assert batched["continuation"] == alone["continuation"]
    assert numbers(without["text"]) != pytest.approx(numbers(alone["text"]), rel=1e-2)
    model = load(place / "ttt", dtype=torch.float32)
    words, read = AutoTokenizer.from_pretrained(place / "ttt"), Session.load(session, model).drop_kv_cache()
    texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
    for text, likelihood, (answer,) in zip(texts, numbers(alone["text"]), alone["continuation"], strict=True):
        ids = torch.tensor([[words.bos_token_id, *words(text, add_special_tokens=False).input_ids]])
        logs = model(ids, **{CACHE: read.fork().cache}).logits[0, :-1].log_softmax(-1)
        assert likelihood == pytest.approx(logs.gather(1, ids[0, 1:, None]).sum().item(), rel=1e-4)
        prompt = words(text, return_tensors="pt").input_ids
        new = read.fork().generate(prompt, max_new_tokens=8, do_sample=False)
        assert words.decode(new[0], skip_special_tokens=True).startswith(answer.rstrip())


@pytest.mark.full
def test_a_session_on_the_command_line(place: Path, session: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inplace_ttt.clients.lm_eval", "--model", "inplace-ttt"]
    how = ["--device", "cpu", "--tasks", "text", "--include_path", str(place), "--limit", "2"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(file: Path) -> subprocess.CompletedProcess[str]:
        model = ["--model_args", f"pretrained={place / 'ttt'},session={file},dtype=float32"]
        out = ["--output_path", str(tmp_path / "out")]
        return subprocess.run(
            [*command, *how, *model, *out],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert (done := run(session)).returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "out").rglob("results_*.json"))) == 1
    done = run(tmp_path / "missing.session")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("lm_eval: ")
    assert "missing.session" in done.stderr.splitlines()[-1]


@pytest.mark.real
@pytest.mark.full
def test_smollm2(place: Path) -> None:
    """Freshly converted, it is its base."""
    words, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    settings = {"tokenizer": words, "batch_size": 2}
    base = evaluate(place, model, ("choice",), **settings)
    converted = evaluate(place, convert(model, InPlaceTTTConfig(chunk_size=32)), ("choice",), **settings)
    assert numbers(converted["choice"]) == pytest.approx(numbers(base["choice"]), rel=1e-3)
