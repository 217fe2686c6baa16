"""RULER's scores are those of lm-eval, and the means over samples and tasks."""

import pytest

from inplace_ttt.evaluation.ruler.scoring import average, mean_of, score


def test_scores_are_those_of_lm_eval() -> None:
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all, string_match_part

    for prediction in ("", " 123, then\x07456", "the Whale", "1234 and 45"):
        for answers in (["123"], ["123", "456"], ["whale", "the ship", "45"]):
            cleaned = postprocess_pred([prediction])
            assert score(prediction, answers, any_answer=False) == pytest.approx(
                100 * string_match_all(cleaned, [answers])
            )
            # of several, lm-eval gives the share where the benchmark's own code gives the best
            if len(answers) == 1:
                assert score(prediction, answers, any_answer=True) == 100 * string_match_part(
                    cleaned, [answers]
                )


def test_means() -> None:
    assert mean_of([100.0]) == {"mean": 100, "stderr": None, "n": 1}
    assert mean_of([0.0, 100.0, 100.0, 0.0]) == {
        "mean": 50,
        "stderr": pytest.approx((1e4 / 3 / 4) ** 0.5),
        "n": 4,
    }
    two = average([{"mean": 50, "stderr": 3.0, "n": 4}, {"mean": 100, "stderr": 4.0, "n": 9}])
    assert two == {"mean": 75, "stderr": 2.5, "n": 2}
    assert average([{"mean": 50, "stderr": None, "n": 1}])["stderr"] is None
