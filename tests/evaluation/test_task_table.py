"""The means and intervals of a table, and RULER's scores against lm-eval's."""

from types import SimpleNamespace
from typing import Any

import pytest

from inplace_ttt.evaluation.harness.table import render, table
from inplace_ttt.evaluation.ruler.scoring import score


def test_scores_are_those_of_lm_eval() -> None:
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all, string_match_part

    for prediction in ("", " 123, then\x07456", "the Whale", "1234 and 45"):
        for answers in (["123"], ["123", "456"], ["whale", "the ship", "45"]):
            cleaned = postprocess_pred([prediction])
            assert score(prediction, answers, any_answer=False) == pytest.approx(
                string_match_all(cleaned, [answers])
            )
            # of several, lm-eval gives the share where the benchmark's own code gives the best
            if len(answers) == 1:
                assert score(prediction, answers, any_answer=True) == string_match_part(cleaned, [answers])


def made(scores: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The table of scores by task and column, at one length."""
    sample = {"tokens": 9, "answers": ["a"], "options": [], "guesses": []}
    known = {
        f"{column}-{task}": {
            "metrics": {"score": {"value": sum(of) / len(of), "scores": of, "higher_is_better": True}},
            "samples": [sample] * len(of),
        }
        for task, columns in scores.items()
        for column, of in columns.items()
    }
    cells = [SimpleNamespace(task=task, length=10, name=task) for task in scores]
    return table(cells, ["on", "off"], SimpleNamespace(known=known))  # type: ignore[arg-type]


def test_means_and_their_errors() -> None:
    result = made(
        {
            "ruler_a": {"on": [0.25, 1.0, 1.0, 0.0], "off": [0.25, 0.5, 1.0, 0.0]},
            "ruler_b": {"on": [0.0, 1.0, 1.0, 0.0], "off": [0.0, 0.0, 1.0, 0.0]},
        }
    )
    first, second = result["rows"]
    assert first["on"] == {"mean": 0.5625, "stderr": pytest.approx(0.2577, abs=1e-4), "n": 4}
    assert first["difference"] == {"mean": 0.125, "stderr": 0.125, "n": 4}
    assert second["on"]["stderr"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert (second["on"]["low"], second["on"]["high"]) == pytest.approx((0.15, 0.85), abs=0.01)
    (average,) = result["averages"]
    assert (average["family"], average["tasks"], average["on"]["n"]) == ("ruler", 2, 8)
    assert average["on"]["mean"] == pytest.approx(0.53125) and "low" not in average["on"]
    assert average["difference"]["stderr"] == pytest.approx((0.125**2 + 0.25**2) ** 0.5 / 2)
    text = render(result).splitlines()
    assert text[1].split() == [
        "ruler_a",
        "0.562",
        "±",
        "0.258",
        "0.438",
        "±",
        "0.213",
        "+0.125",
        "±",
        "0.125",
    ]
    assert text[2].split() == [
        "ruler_b",
        "0.500",
        "(0.15",
        "to",
        "0.85)",
        "0.250",
        "(0.05",
        "to",
        "0.70)",
        "+0.250",
        "±",
        "0.250",
    ]


def test_a_single_sample_has_no_error() -> None:
    (row,) = made({"ruler_a": {"on": [0.5], "off": [0.25]}})["rows"]
    assert row["on"] == {"mean": 0.5, "stderr": None, "n": 1}
    assert row["difference"] == {"mean": 0.25, "stderr": None, "n": 1}
