"""What reports share: a mean with its error, and pages that escape what they are given."""

import math

import pytest

from inplace_ttt.audit import Report
from inplace_ttt.reports.statistics import Mean, wilson


def test_a_mean_has_a_standard_error() -> None:
    assert Mean.of([1.0, 2.0, 3.0]) == Mean(2.0, pytest.approx(1 / 3**0.5), 3)
    assert vars(Mean.of(x for x in (5, 5))) == {"mean": 5, "stderr": 0, "n": 2}


def test_a_single_value_has_none() -> None:
    assert Mean.of([1.0]) == Mean(1.0, None, 1) and Mean.of([1.0], alone=0.0) == Mean(1.0, 0.0, 1)


def test_a_share_has_wilson_s_interval() -> None:
    """Of 2 in 20 and of none in 10: Newcombe 1998, Statistics in Medicine 17, and the rule's closed form."""
    assert wilson([True] * 2 + [False] * 18) == pytest.approx(
        {"share": 0.1, "low": 0.0279, "high": 0.3010}, abs=1e-4
    )
    for n in range(1, 120):
        for hits in range(n + 1):
            interval = wilson([True] * hits + [False] * (n - hits))
            assert 0.0 <= interval["low"] <= interval["share"] <= interval["high"] <= 1.0, (hits, n)
    assert wilson([False] * 10) == pytest.approx({"share": 0.0, "low": 0.0, "high": 1.96**2 / (10 + 1.96**2)})


def test_what_is_not_finite_shows() -> None:
    found = Mean.of([1.0, math.inf, -math.inf])
    assert math.isnan(found.mean) and found.stderr is not None and math.isnan(found.stderr)


def test_names_are_escaped_in_a_page_and_not_in_text() -> None:
    report = Report("<script>alert('a')</script> & b", "paper", [])
    assert (
        "<script>alert" not in report.to_html()
        and "&lt;script&gt;alert" in report.to_html()
        and "&amp; b" in report.to_html()
    )
    assert "<script>alert('a')</script> & b" in report.to_markdown()
