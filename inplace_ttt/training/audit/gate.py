"""The audit of a training run (its model and its recipe), and the gate before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...audit.auditor import as_declarations, audit_model
from ...audit.report import Report
from ...audit.verdicts import Progress
from ...errors import InPlaceTTTError
from ...files.json_files import json_text, read_json
from ...surgery import config_of
from ..data.building import TrainingData
from ..model import meta_model
from ..recipe.recipe import Recipe, load_recipe
from .catalog import RECIPE
from .data_here import measured_data
from .probes import Run
from .small_model import small_model

REPORT = "audit"
"""Name, without ending, of the report's files in the run's output folder."""


def audit_recipe(
    recipe: Recipe | str | Path,
    *,
    data: TrainingData | None = None,
    profile: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Audits a recipe's settings, and its method on a narrow model of the same kind (`small_model`).

    The data is audited too if it is on this machine.

    Args:
        recipe: a recipe or its file.
        data: the run's rows, if they are built already.
        profile: the method to compare with; the default is the recipe's own, then "paper".
        seed: seed of the probes' inputs.
        progress: called before each item.

    Raises:
        InPlaceTTTError: if the recipe cannot be read, or its model cannot be built.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    whole, why = meta_model(recipe), ""
    if data is None:
        data, why = measured_data(recipe, config_of(whole).chunk_size)
    run, profile = Run(recipe, whole, data, why), profile or recipe.audit.profile or "paper"
    return _audit(small_model(recipe), run, profile, seed, progress)


def gate(
    model: nn.Module, recipe: Recipe, *, data: TrainingData | None = None, progress: Progress | None = None
) -> Report:
    """Audits a model in memory and the recipe that trains it. The recipe may declare deviations.

    It raises no error for an undeclared deviation; the caller decides.

    Args:
        model: the model to train.
        data: the run's rows, if they are built; without them the items about data are not checked.
        progress: called before each item.
    """
    return _audit(model, Run(recipe, model, data), recipe.audit.profile or "paper", 0, progress)


def write_report(report: Report, output: str | Path) -> Path:
    """Writes the report as audit.html, audit.md and audit.json into a run's folder.

    Returns:
        The path of the HTML page.

    Raises:
        InPlaceTTTError: if the folder cannot be written.
    """
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = json_text(report.to_dict(), indent=1) + "\n"
        for ending, text in (("md", report.to_markdown()), ("json", data), ("html", report.to_html())):
            (folder / f"{REPORT}.{ending}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InPlaceTTTError(f"cannot write the audit's report into {folder}: {error.strerror}.") from None
    return folder / f"{REPORT}.html"


def audited(output: str | Path) -> dict[str, Any] | None:
    """Returns the report in a run's folder as plain values; None if the run was not audited."""
    file = Path(output) / f"{REPORT}.json"
    return read_json(file, "the audit's report") if file.exists() else None


def _audit(model: nn.Module, run: Run, profile: str, seed: int, progress: Progress | None) -> Report:
    declared = as_declarations(run.recipe.audit.deviations, str(run.recipe.path or "the recipe"))
    extra = [(item, run) for item in RECIPE]
    return audit_model(model, profile=profile, declared=declared, seed=seed, progress=progress, extra=extra)
