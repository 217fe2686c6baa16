"""The sine-wave harness: what is trained on and asked for, and the table of a tiny run."""

import json
import math
from pathlib import Path

import pytest
import sine_waves
import torch
from sine import BUILDERS, Sine, Training, Waves, by_phase, error, table, train_one, waves

from inplace_ttt.files.settings import read_settings

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "memories" / "sine-cpu.yaml"
TINY = Sine(
    seeds=[0],
    waves=Waves(40, 4, 2, 2),
    training=Training(epochs=1, phases=2),
    dim=8,
    segment=8,
    mac={"feedforward": 8},
)


def test_waves_are_sines_of_the_asked_periods() -> None:
    settings = Waves(length=4000, noise=0.0, periods=[20.0, 50.0])
    x = waves(30, settings, seed=1).squeeze(-1)
    crossings = ((x[:, 1:] > 0) != (x[:, :-1] > 0)).sum(dim=1)
    assert (2 * 4000 / crossings).min() > 19 and (2 * 4000 / crossings).max() < 51
    assert x.abs().max() <= 1 and not waves(30, settings, seed=2).squeeze(-1).equal(x)
    assert (
        (waves(30, Waves(length=4000, periods=[20.0, 50.0]), seed=1).squeeze(-1) - x).std() - 0.1
    ).abs() < 0.01


@pytest.mark.parametrize("name", BUILDERS)
def test_a_prediction_sees_only_what_is_before_it(name: str) -> None:
    """And attention sees no more than the last C elements, the others do."""
    torch.manual_seed(0)
    model, x = BUILDERS[name](TINY).double(), waves(2, TINY.waves, seed=1).double()
    phases, changed = torch.arange(8), waves(2, TINY.waves, seed=2).double()
    y = model.every_next(x, phases).flatten(1, 2)[:, :32]  # of positions 8 … 39
    later = model.every_next(torch.cat([x[:, :30], changed[:, 30:]], dim=1), phases).flatten(1, 2)[:, :32]
    earlier = model.every_next(torch.cat([changed[:, :10], x[:, 10:]], dim=1), phases).flatten(1, 2)[:, :32]
    assert later[:, :23].allclose(y[:, :23]) and not later[:, 23:].isclose(y[:, 23:]).any()
    assert earlier[:, 10:].allclose(y[:, 10:]) == (name == "attention")


@pytest.mark.parametrize("name", BUILDERS)
def test_phases_choose_positions(name: str) -> None:
    """The error over all phases is the mean over positions, and a phase alone is the mean over its own."""
    torch.manual_seed(0)
    model, x = BUILDERS[name](TINY), waves(2, TINY.waves, seed=1)
    squared = (model.every_next(x, torch.arange(8)).flatten(1, 2)[:, :32] - x[:, 8:]) ** 2
    assert error(model, x, 8, torch.arange(8)).item() == pytest.approx(squared.mean().item(), rel=1e-5)
    assert error(model, x, 8, torch.tensor([3])).item() == pytest.approx(
        squared[:, 3::8].mean().item(), rel=1e-5
    )
    odd = waves(2, Waves(length=37), seed=1)
    error(model, odd, 8, torch.arange(8)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_by_phase_fills_up_behind_the_end() -> None:
    found = by_phase(torch.arange(5.0)[None], 4, torch.tensor([0, 2]), fill=math.nan)
    assert found[0, 0].tolist() == [0, 2] and found[0, 1, 0] == 4 and found[0, 1, 1].isnan()


def test_a_run_is_the_same_again() -> None:
    first, second = (train_one("mac-1", 0, TINY) for _ in range(2))
    assert first["test_mse"] == second["test_mse"] and math.isfinite(first["test_mse"])
    lines = table(
        [{"model": "lstm", "test_mse": e} for e in (1.0, 3.0)], Sine(models=["lstm"], published={"lstm": 0.5})
    )
    assert lines == [{"model": "lstm", "mean": 2.0, "stderr": 1.0, "n": 2, "published": 0.5}]


def test_the_tool_prints_the_table_and_takes_a_run_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sine.json"
    changes = [
        "waves.length=40",
        "waves.train=4",
        "waves.test=2",
        "training.epochs=1",
        "seeds=[0]",
        "models=[lstm,attention]",
    ]
    arguments = ["sine_waves.py", str(RECIPE), "--json", str(out), "--set", *changes]
    monkeypatch.setattr("sys.argv", arguments)
    assert sine_waves.main() == 0
    first, rows = capsys.readouterr().out, json.loads(out.read_text())["rows"]
    assert [row["model"] for row in rows] == ["lstm", "attention"] and "0.0156" in first and "0.0365" in first
    monkeypatch.setattr(sine_waves, "train_one", None)  # nothing is run again
    assert sine_waves.main() == 0 and capsys.readouterr().out == first
    monkeypatch.setattr("sys.argv", [*arguments, "waves.noise=0.3"])
    assert (
        sine_waves.main() == 2
        and "sine.json was made with waves.noise 0.1, not 0.3; name another file." in capsys.readouterr().err
    )
    monkeypatch.setattr("sys.argv", ["sine_waves.py", str(RECIPE), "--set", "models=[mamba]"])
    assert sine_waves.main() == 2 and "choose from attention, mac-1, mac-2, lstm" in capsys.readouterr().err


def test_the_shipped_recipe_is_the_proof_of_concept_s() -> None:
    settings = read_settings(Sine, RECIPE)
    assert (settings.dim, settings.segment, settings.waves.length) == (16, 16, 500)
    assert (settings.training.epochs, settings.training.batch_size, settings.training.learning_rate) == (
        50,
        4,
        1e-3,
    )
    assert set(settings.published) == set(settings.models) == set(BUILDERS) and len(settings.seeds) == 3
