"""The from-scratch comparison: what its models see, that they are matched, and its tool on a tiny recipe."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import scratch_memories
import torch
import torch.nn.functional as F
from from_scratch import training
from from_scratch.model import CausalModel, WindowAttention
from from_scratch.settings import Model, Recall, Scratch, Text, Training
from from_scratch.tasks import TextTask, task_of

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.settings import read_settings
from inplace_ttt.memories import MEMORIES
from inplace_ttt.tasks import IGNORED

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "memories"
RECIPES = sorted(FOLDER.glob("scratch-*.yaml"))
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    **{name: {"heads": 2} for name in MEMORIES if name != "in-place"},
    "lact": {"heads": 2, "chunk": 8},
    "in-place": {"chunk": 8, "std": 0.3},
}
SIZE = Model(dim=16, blocks=2, heads=2, window=4, width=128)
TINY = Scratch(
    OPTIONS,
    Training(steps=12, length=32, batch_size=4, learning_rate=1e-2, warmup_steps=2),
    Recall(2, 16, 4),
    None,
    SIZE,
    [0],
)

every_system = pytest.mark.parametrize("system", OPTIONS)


def model_of(system: str, size: Model = SIZE, vocabulary: int = 16, seed: int = 0) -> CausalModel:
    return training.build(dataclasses.replace(TINY, model=size), vocabulary, system, seed).double()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
def test_window_attention_is_masked_attention(length: int) -> None:
    torch.manual_seed(0)
    attention, x = (
        WindowAttention(16, heads=2, window=4).double(),
        torch.randn(2, length, 16, dtype=torch.float64),
    )
    q, k, v = attention.to_qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    ago = torch.arange(length)[:, None] - torch.arange(length)
    y = F.scaled_dot_product_attention(
        attention.rotated(q), attention.rotated(k), v, attn_mask=(ago >= 0) & (ago < 4)
    )
    assert attention(x).allclose(attention.to_out(y.transpose(1, 2).flatten(2)), atol=1e-12)


def test_positions_are_relative() -> None:
    """⟨rotated q at t, rotated k at s⟩ depends on t − s, and does depend on it."""
    attention, (q, k) = (
        WindowAttention(16, heads=2, window=4),
        torch.randn(2, 1, 2, 1, 8).expand(-1, -1, -1, 9, -1),
    )
    scores = attention.rotated(q) @ attention.rotated(k).mT
    assert scores[..., 1:, 1:].allclose(scores[..., :-1, :-1], atol=1e-5) and not scores[..., 4, 1].allclose(
        scores[..., 4, 3], atol=1e-3
    )


@every_system
def test_the_window_limits_attention_and_only_attention(system: str) -> None:
    """Two blocks of window 4 see 6 tokens back; beyond, there is the memory alone. And nothing sees what
    comes later."""
    torch.manual_seed(1)
    model, at = model_of(system), 3
    for name, parameter in model.named_parameters():
        if ".ttt." in name:  # as converted, it writes nothing yet
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(16, (1, 30))
    changed = ids.clone()
    changed[0, at] = (ids[0, at] + 1) % 16
    difference = (model(ids) - model(changed)).detach().abs().amax(dim=(0, 2))
    assert difference[:at].max() == 0 and difference[at : at + 7].min() > 1e-9
    assert (difference[at + 7 :].max() == 0) if system == "none" else (difference[at + 7 :].min() > 1e-12)


def test_the_short_convolution_looks_back_as_far_as_it_has_taps() -> None:
    """Two blocks of window 4 after 3 taps see 2 (3 + 2) tokens back, and nothing ahead."""
    torch.manual_seed(1)
    model, ids, at = model_of("none", dataclasses.replace(SIZE, taps=3)), torch.randint(16, (1, 30)), 12
    changed = ids.clone()
    changed[0, at] = (ids[0, at] + 1) % 16
    difference = (model(ids) - model(changed)).detach().abs().amax(dim=(0, 2))
    assert difference[:at].max() == 0 == difference[at + 11 :].max() and difference[at : at + 11].min() > 1e-9


def test_in_place_is_the_mlp_and_the_others_stand_beside_attention() -> None:
    for system in OPTIONS:
        kinds = [
            (type(getattr(block.memory, "memory", None)).__name__, type(block.mlp).__name__)
            for block in model_of(system).blocks
        ]
        other = "NoneType" if system == "none" else MEMORIES[system].__name__
        assert kinds == [("NoneType", "InPlaceTTT") if system == "in-place" else (other, "GatedMLP")] * 2


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_shipped_recipes_are_matched(file: Path) -> None:
    settings = read_settings(Scratch, file)
    assert (
        list(settings.systems) == ["none", *(name for name in MEMORIES if name != "gla")]
        and len(settings.seeds) == 3
    )
    vocabulary = 256 if settings.recall is None else settings.recall.vocabulary
    wanted = training.build(settings, vocabulary, "none", 0).parameter_count()
    for system in settings.systems:
        assert abs(training.build(settings, vocabulary, system, 0).parameter_count() / wanted - 1) < 0.005, (
            system
        )
    written = settings.systems["in-place"]["chunk"], settings.systems["lact"]["chunk"]
    assert written[0] == written[1] <= settings.training.length // 8


def test_a_memory_that_leaves_no_mlp_is_refused() -> None:
    with pytest.raises(
        InPlaceTTTError, match="ttt-mlp alone has more parameters than an MLP of width 8; raise"
    ):
        model_of("ttt-mlp", dataclasses.replace(SIZE, width=8))


def test_every_system_reads_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per seed, in the same order; another seed has others."""
    read: dict[tuple[str, int], list[torch.Tensor]] = {}

    def learn(
        model: CausalModel, ids: torch.Tensor, labels: torch.Tensor, optimizer: torch.optim.Adam, *_: Any
    ) -> float:
        rows.append(ids)
        optimizer.step()
        return 0.0

    monkeypatch.setattr(training, "learn", learn)
    for system, seed in (("none", 0), ("deltanet", 0), ("none", 1)):
        rows = read[system, seed] = []
        training.train_one(TINY, task_of(TINY), system, seed)
    first, second, other = (torch.stack(rows) for rows in read.values())
    assert first.shape == (12, 4, 31) and first.equal(second) and not first.equal(other)
    assert len({tuple(row) for row in first.flatten(0, 1).tolist()}) == 48


@every_system
@pytest.mark.sample(3)
def test_a_few_steps_lower_the_loss(system: str) -> None:
    model, (ids, labels) = model_of(system).float(), task_of(TINY).batch(0, 0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = [training.learn(model, ids, labels, optimizer, max_grad_norm=1.0) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_recall_task_asks_for_values() -> None:
    task = task_of(TINY)
    ids, labels = task.held_out(0)
    answers = labels[labels != IGNORED]
    assert ids.shape == labels.shape == (4, 31) and len(answers) == 8 and answers.min() >= 8
    right = torch.zeros(4, 31, dtype=torch.bool)
    right[:, -1] = True  # every row's second answer
    assert task.scores(torch.ones(4, 31), right, labels) == {"recall": 0.5, "loss": 1.0}


def texts(folder: Path) -> Text:
    for name, letters in (("a", "abc"), ("b", "def"), ("c", "xyz")):
        (folder / f"{name}.txt").write_text(letters * 40)
    return Text(train=[str(folder)], held_out=[str(folder / "c.txt")], rows=3, bounds=[0.2, 1.0])


def test_text_is_held_out_by_file(tmp_path: Path) -> None:
    task = TextTask(texts(tmp_path), length=11, batch_size=50)
    ids, labels = task.batch(seed=0, step=0)
    assert ids.shape == labels.shape == (50, 10) and labels[:, :-1].equal(ids[:, 1:])
    rows = [bytes(row).decode() for row in ids.tolist()]
    assert all(row in "abc" * 40 or row in "def" * 40 for row in rows) and {row[0] for row in rows} == set(
        "abcdef"
    )
    again = TextTask(texts(tmp_path), length=11, batch_size=50)
    assert (
        again.batch(0, 0)[0].equal(ids)
        and not again.batch(0, 1)[0].equal(ids)
        and not again.batch(1, 0)[0].equal(ids)
    )
    held_out = [bytes(row).decode() for row in task.held_out(0)[0].tolist()]
    assert held_out == [("xyz" * 40)[start : start + 10] for start in (0, 40, 80)] and task.held_out(1)[
        0
    ].equal(task.held_out(0)[0])
    scores = task.scores(torch.arange(10.0).expand(3, -1), torch.ones(3, 10), labels)
    assert scores == {"0–1": 0.5, "2–9": 5.5, "loss": 4.5}


def test_texts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    text = texts(tmp_path)
    for change, length, says in (
        ({"held_out": [str(tmp_path)]}, 11, "names every file"),
        ({}, 121, "no text of text.train has 121 bytes"),
        ({}, 41, "has 120 bytes, too few for 3 rows of 41"),
        ({"held_out": [str(tmp_path / "d.txt")]}, 11, r"d\.txt does not exist"),
    ):
        with pytest.raises(InPlaceTTTError, match=says):
            TextTask(dataclasses.replace(text, **change), length, batch_size=2)


def test_the_learning_rate_warms_up_and_falls() -> None:
    factors = [training.factor(step, Training(steps=100, length=2, warmup_steps=20)) for step in range(101)]
    assert (
        factors[0] == pytest.approx(0.05)
        and factors[19] == factors[20] == 1
        and factors[100] == pytest.approx(0.1)
    )
    assert sorted(factors[20:], reverse=True) == factors[20:]


def test_the_tool_prints_the_table_and_makes_no_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["training.steps=2", "training.length=68", "training.batch_size=2", "recall.held_out=2"]
    changes = [*tiny, "systems={none: , in-place: {chunk: 32}}"]
    recipe, out = str(FOLDER / "scratch-recall-cpu.yaml"), tmp_path / "table.json"
    arguments = [
        "scratch_memories.py",
        recipe,
        "--runs",
        str(tmp_path / "runs"),
        "--json",
        str(out),
        "--set",
        *changes,
        "seeds=[0, 1]",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    assert scratch_memories.main() == 0
    first, found = capsys.readouterr().out, json.loads(out.read_text())
    files = sorted((tmp_path / "runs").iterdir())
    assert [file.name for file in files] == [
        "in-place-0.json",
        "in-place-1.json",
        "none-0.json",
        "none-1.json",
    ]
    none, in_place = found["table"]
    assert (
        none["state_bytes"] == 0 < in_place["state_bytes"]
        and none["n"] == 2
        and "±" in first
        and "recall" in first
    )
    monkeypatch.setattr(scratch_memories, "train_one", None)  # nothing is run again
    assert scratch_memories.main() == 0 and capsys.readouterr().out == first
    files[0].unlink()
    with pytest.raises(TypeError):  # but what is missing is
        scratch_memories.main()
    monkeypatch.setattr("sys.argv", [*arguments, "training.learning_rate=1e-3"])
    assert scratch_memories.main() == 2
    assert (
        "none-0.json was made with training.learning_rate 0.004, not 0.001; name another folder"
        in capsys.readouterr().err
    )


def test_a_run_that_diverges_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = [
        "training.steps=3",
        "training.length=36",
        "training.batch_size=2",
        "recall.held_out=2",
        "seeds=[0]",
    ]
    changes = [*tiny, "systems={titans: {heads: 2, theta: 1.0e+30}, none: }"]
    recipe = str(FOLDER / "scratch-recall-cpu.yaml")
    monkeypatch.setattr(
        "sys.argv", ["scratch_memories.py", recipe, "--runs", str(tmp_path), "--set", *changes]
    )
    assert scratch_memories.main() == 2 and [file.name for file in tmp_path.iterdir()] == ["none-0.json"]
    assert "titans diverged with seed 0 at step 0; lower" in capsys.readouterr().err


def test_the_table_has_errors_over_seeds() -> None:
    shared = {"system": "none", "parameters": 5, "state_bytes": 0}
    rows = [{**shared, "scores": {"recall": score}, "tokens_per_second": score} for score in (1.0, 3.0)]
    (line,) = training.table(rows, TINY)
    assert line["scores"]["recall"] == {"mean": 2.0, "stderr": pytest.approx(1.0)} and (
        line["n"],
        line["tokens_per_second"],
    ) == (2, 2.0)
    assert math.isnan(training.table(rows[:1], TINY)[0]["scores"]["recall"]["stderr"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["systems.mamba=null"], "systems: there is no memory 'mamba'; choose from none, linear-attention"),
        (["systems.none={heads: 2}"], "systems: attention alone takes no options"),
        (["systems.lact={size: 2}"], "lact takes no option 'size'; it takes heads, chunk"),
        (["systems.lact=2"], "systems: lact must have a table of options, or nothing"),
        (["systems.lact.heads=two"], "systems: heads of lact must have the type of 1, got 'two'"),
        (["systems.in-place.hidden=64"], "systems: in-place takes its hidden width from model.width"),
        (["systems={}"], "systems: name some of none"),
        (["text={train: a, held_out: b}"], "recall: give one of the sections recall and text"),
        (["seeds=[1, 1]"], "--set, seeds: give some, each once"),
        (["model.heads=3"], "model.dim: must divide into 3 heads of an even width"),
        (
            ["model.width=40"],
            "linear-attention alone has more parameters than an MLP of width 40; raise model.width by",
        ),
        (["training.length=30"], "recall of 8 pairs needs at least 32 tokens"),
        (["training.stepz=1"], "--set, training.stepz: unknown setting"),
    ],
)
def test_a_bad_recipe_is_one_line(
    changes: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(FOLDER / "scratch-recall-cpu.yaml")
    monkeypatch.setattr(
        "sys.argv", ["scratch_memories.py", recipe, "--runs", str(tmp_path / "runs"), "--set", *changes]
    )
    assert scratch_memories.main() == 2 and not (tmp_path / "runs").exists()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("scratch_memories: ") and says in last
