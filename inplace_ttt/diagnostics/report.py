"""Writes a diagnosis to a folder, as a self-contained page, with plots as PNG and the numbers as JSON."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.folders import new_folder
from ..files.manifest import DIAGNOSIS
from ..reports import charts
from ..reports.page import render
from . import plots
from .diagnosis import Diagnosis

PAGE, NUMBERS = "report.html", "diagnose.json"

_GROUPS = {"conv": "conv", "proj": "P", "weight": "W_down (TTT layers)", "embeddings": "embeddings"}


def write_report(diagnosis: Diagnosis, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Writes `report.html`, `diagnose.json` and the plots to a folder, completely or not at all.

    Args:
        diagnosis: the diagnosis to write.
        out: the folder.
        overwrite: replace an earlier diagnosis in `out`.

    Returns:
        The folder `out`.

    Raises:
        InPlaceTTTError: if `out` may not be replaced, or cannot be written.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.diagnostics import diagnose, write_report
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> diagnosis = diagnose(model, {"input_ids": torch.randint(32000, (2, 50))})
        >>> (write_report(diagnosis, "diagnosis") / "report.html").is_file()
        True
    """
    with new_folder(out, DIAGNOSIS, overwrite=overwrite) as folder:
        write_into(folder, diagnosis)
    return Path(out)


def write_into(folder: Path, diagnosis: Diagnosis) -> None:
    """Writes the files of `write_report` into an existing folder."""
    drawn = plots.draw_all(diagnosis, folder) if charts.available() else []
    images = [(plot.caption, (folder / plot.file).read_bytes()) for plot in drawn]
    (folder / PAGE).write_text(page(diagnosis, images), encoding="utf-8")
    (folder / NUMBERS).write_text(
        json.dumps(diagnosis.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )


def summary(diagnosis: Diagnosis) -> str:
    """Returns one sentence with the severe findings, or with the number of warnings if none is severe."""
    severe, warnings = diagnosis.of("severe"), diagnosis.of("warning")
    if severe:
        causes = ", ".join(dict.fromkeys(finding.id for finding in severe))
        return f"{len(severe)} severe finding{'s' * (len(severe) > 1)}: {causes}."
    return f"Nothing severe{f', {len(warnings)} warning' + 's' * (len(warnings) > 1) if warnings else ''}."


def page(diagnosis: Diagnosis, images: Sequence[tuple[str, bytes]]) -> str:
    """Renders the page as HTML with its plots embedded.

    Args:
        diagnosis: the diagnosis to show.
        images: caption and PNG bytes of each plot.
    """
    values = diagnosis.to_dict()
    return render(
        "diagnosis.html.j2",
        title=f"In-Place TTT diagnosis: {diagnosis.subject}",
        good=not diagnosis.of("severe"),
        summary=summary(diagnosis),
        diagnosis=diagnosis,
        facts=_facts(values),
        groups=[
            _group_row(name, values["groups"][key])
            for key, name in _GROUPS.items()
            if values["groups"][key]["parameter"] is not None
        ],
        layers=[_layer_row(layer) for layer in values["layers"]],
        images=[(caption, base64.b64encode(image).decode()) for caption, image in images],
    )


def _group_row(name: str, group: dict[str, Any]) -> list[str]:
    columns = ("parameter", "gradient", "gradient_over_weight", "adam_step", "step_over_parameter")
    return [name, *(_number(group[column]) for column in columns), "yes" if group["trained"] else "no"]


def _layer_row(layer: dict[str, Any]) -> list[str]:
    writes, keys, effect = layer["writes"] or {}, layer["keys"] or {}, layer["effect"] or {}
    return [
        str(layer["layer"]),
        _number(layer["eta"]),
        *(_number(layer["parameters"].get(name, {}).get("gradient")) for name in ("conv", "proj", "weight")),
        *(
            _number(writes.get(name))
            for name in ("state_ratio", "growth", "clipped", "effective_rank", "alignment")
        ),
        f"{writes['gate_mean']:.2g} ± {writes['gate_spread']:.2g}"
        if writes.get("gate_spread")
        else _number(writes.get("gate_mean")),
        _number(keys.get("effective")),
        _number(keys.get("collision")),
        _change(effect["loss_change"], effect["stderr"]) if effect else "",
        _number(effect.get("logit_change")),
        ", ".join(layer["precision"]["state"]),
    ]


def _facts(values: dict[str, Any]) -> dict[str, str]:
    rows, length = values["rows"]
    facts = {
        "rows": f"{rows} of {length:,} tokens",
        "chunks": f"{values['chunk_size']} tokens each, {values['chunks_read']} written and read",
        "loss": f"{_number(values['loss'])} nats per token, in training mode",
    }
    if values["effect_of_all_writes"] is not None:
        change = values["effect_of_all_writes"]
        facts["writes on − off"] = (
            f"{_change(change['loss'], change['stderr'])} nats per token, over the tokens that "
            "can read a write"
        )
    return facts


def _change(loss: float | None, stderr: float | None) -> str:
    return "–" if loss is None else f"{loss:+.2g}" + ("" if stderr is None else f" ± {stderr:.1g}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
