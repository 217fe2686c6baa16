"""The generated reference pages are current, do not depend on the terminal, and their examples are valid."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import cli_reference
import pages
import pytest
import recipe_reference

from inplace_ttt import cli
from inplace_ttt.cli import VERBS
from inplace_ttt.training.recipe import Recipe
from inplace_ttt.training.recipe.changes import NO_EFFECT, TAKES_EFFECT

OTHERWISE = {"auto": "the checkpoint's", str(4 << 30): "4 GiB"}
"""Defaults that a help states in other words."""


@pytest.mark.parametrize("reference", [cli_reference, recipe_reference], ids=lambda module: module.__name__)
def test_the_page_is_current(reference) -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), (
        f"run python tools/release/{reference.__name__}.py"
    )


def test_the_width_of_the_terminal_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for columns in ("20", "400"):
        monkeypatch.setenv("COLUMNS", columns)
        found.append(cli_reference.page())
    assert found[0] == found[1]


def test_check_exits_with_1_for_an_old_page(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert pages.main("", page, lambda: "new", ["--check"]) == 1 and not page.exists()
    assert pages.main("", page, lambda: "new", []) == 0 and page.read_text() == "new"
    assert pages.main("", page, lambda: "new", ["--check"]) == 0
    assert pages.main("", page, lambda: "newer", ["--check"]) == 1 and page.read_text() == "new"
    assert "without --check" in capsys.readouterr().out


def test_a_pipe_in_a_cell_is_escaped() -> None:
    assert pages.table(["a", "b"], [["x|y", "z"]]) == "| a | b |\n|---|---|\n| x\\|y | z |"


def parser_of(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"inplace-ttt {verb}")
    cli.add_options(parser, verb)
    return parser


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_parses(verb: str) -> None:
    parser = parser_of(verb)
    text = parser.epilog.partition("exit code:")[0].replace("\\\n", " ")
    lines = re.findall(rf"^ .*?\binplace-ttt {verb}\b(.*)$", text, re.MULTILINE)
    assert lines
    for line in lines:
        args = parser.parse_args(shlex.split(line))
        args.check(args)


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_states_the_parsers_default(verb: str) -> None:
    for action in parser_of(verb)._actions:
        stated = cli_reference.DEFAULT.search(action.help)
        if stated and action.default not in (None, []):
            default = str(action.default)
            begins = (default, default.removesuffix(".0"), OTHERWISE.get(default, default))
            assert stated[1].startswith(begins), (action.dest, default, stated[1])
        assert action.help and (action.nargs == 0 or action.default in (None, []) or stated), action.dest


def test_an_undescribed_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipe, "__doc__", "A recipe.")
    with pytest.raises(KeyError, match="model"):
        recipe_reference.page()


def test_a_section_without_a_table_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(recipe_reference, "PAGE", tmp_path / "recipe.md")
    recipe_reference.PAGE.write_text("<!-- settings: model -->\n<!-- end of settings -->\n")
    with pytest.raises(ValueError, match="has tables of"):
        recipe_reference.page()


@pytest.mark.parametrize(
    ("sentence", "settings"),
    [("Some settings may change", TAKES_EFFECT), ("Other settings may change", NO_EFFECT)],
    ids=["with effect", "without"],
)
def test_the_settings_that_may_change_are_those_of_the_code(sentence: str, settings: tuple[str, ...]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    listed = text.partition(sentence)[2].partition(":\n\n")[2].partition("\n\n")[0]
    assert sorted(re.findall("`([^`]+)`", listed)) == sorted(settings)
