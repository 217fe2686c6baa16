"""The plots of docs/results/README.md show the raw results."""

import json
import shutil
from pathlib import Path

import pytest
import results_plots
from results_plots import PLOTS, RAW, RESULTS


def test_the_plots_are_current() -> None:
    assert results_plots.main(["--check"]) == 0


def test_the_page_has_these_plots_alone() -> None:
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [name for name in PLOTS if f"]({name})" in page] == [*PLOTS]
    assert page.count("![") == len(PLOTS)


@pytest.mark.parametrize("name", PLOTS)
def test_the_plots_are_small_files(name: str) -> None:
    assert (RESULTS / name).stat().st_size <= 80_000


def test_a_changed_result_or_a_missing_plot_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RAW, tmp_path / "raw", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.setattr(results_plots, "RAW", tmp_path / "raw")
    assert results_plots.main(["--check"]) == 0
    raw = tmp_path / "raw" / "memory.json"
    found = json.loads(raw.read_text(encoding="utf-8"))
    next(row for row in found["rules"] if row["rule"] == "ridge")["document_gain"]["mean"] += 0.001
    raw.write_text(json.dumps(found), encoding="utf-8")
    assert results_plots.main(["--check"]) == 1
    assert results_plots.numbers_in(tmp_path / "absent.png") is None


@pytest.mark.parametrize("name", PLOTS)
def test_figures_draw_the_numbers_that_are_kept(name: str) -> None:
    """Each number of a bar or a line lies on the figure."""
    collect, draw = PLOTS[name]
    data = collect()
    figure = draw(data)
    drawn = {
        round(float(number), 4)
        for axes in figure.axes
        for number in (
            *(bar.get_width() for bar in axes.patches if hasattr(bar, "get_width")),
            *(number for line in axes.lines for number in line.get_ydata()),
        )
    }
    results_plots.pyplot.close(figure)
    kept = {
        "gain-by-rule.png": lambda: [
            part[0] for panel in data.values() for rule in panel["rules"].values() for part in rule.values()
        ],
        "gain-by-position.png": lambda: [
            value for line in data.values() for value in (*line["on - off"], *line["document gain"])
        ],
        "facts-by-distance.png": lambda: [
            share for lines in data.values() for line in lines.values() for share in line["share"]
        ],
    }[name]()
    assert len(kept) > 10 and set(kept) <= drawn


def test_the_rules_of_the_headline_are_there() -> None:
    rules = results_plots.gain_by_rule()["SmolLM2-135M, attention window of 256"]["rules"]
    assert {"gradient", "ridge", "paper", "LoRA, eta 0"} <= rules.keys()
