"""A diagnosis as a folder: one self-contained page, its plots as PNG, and the numbers as JSON."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..audit.page_assets import STYLE
from ..files.folders import new_folder
from . import plots
from .diagnosis import Diagnosis
from .findings import Finding

PAGE, NUMBERS = "report.html", "diagnose.json"

_OWN_STYLE = """
.card.warning { border-left-color: var(--unspecified); }
.card.info { border-left-color: var(--link); }
table.figures { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 8px 0 18px; }
table.figures th, table.figures td { text-align: right; padding: 5px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
table.figures th { font-weight: 600; border-bottom-width: 2px; }
table.figures td:first-child, table.figures th:first-child { text-align: left; padding-left: 0; }
figure.plot { margin: 18px 0 26px; }
figure.plot img { display: block; width: 100%; max-width: 1040px; height: auto; border: 1px solid var(--line); border-radius: 4px; }
figure.plot figcaption { color: var(--soft); max-width: 90ch; margin-top: 6px; }
.scroll { overflow-x: auto; }
"""
_TITLES = {"severe": "Severe", "warning": "Warnings", "info": "Good to know"}
_GROUPS = {"conv": "conv", "proj": "P", "weight": "W_down (TTT layers)", "embeddings": "embeddings"}


def write_report(diagnosis: Diagnosis, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `out`/report.html, diagnose.json and the plots, whole or not at all."""
    with new_folder(out, overwrite=overwrite) as folder:
        write_into(folder, diagnosis)
    return Path(out)


def write_into(folder: Path, diagnosis: Diagnosis) -> None:
    """The same into a folder that is there."""
    drawn = plots.draw_all(diagnosis, folder) if plots.available() else []
    images = [(plot.caption, (folder / plot.file).read_bytes()) for plot in drawn]
    (folder / PAGE).write_text(page(diagnosis, images), encoding="utf-8")
    (folder / NUMBERS).write_text(json.dumps(diagnosis.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def summary(diagnosis: Diagnosis) -> str:
    """One sentence."""
    severe, warnings = diagnosis.of("severe"), diagnosis.of("warning")
    if severe:
        causes = ", ".join(dict.fromkeys(finding.id for finding in severe))
        return f"{len(severe)} severe finding{'s' * (len(severe) > 1)}: {causes}."
    return f"Nothing severe{f', {len(warnings)} warning' + 's' * (len(warnings) > 1) if warnings else ''}."


def page(diagnosis: Diagnosis, images: Sequence[tuple[str, bytes]]) -> str:
    """The whole page as HTML, the plots inside it."""
    values = diagnosis.to_dict()
    title = f"In-Place TTT diagnosis: {escape(diagnosis.subject)}"
    missing = (
        "" if images else '<p class="note">Plots are left out, since matplotlib is not installed (pip install inplace-ttt[plots]).</p>'
    )
    sections = [
        f"<h1>{title}</h1>",
        f'<p class="summary {"bad" if diagnosis.of("severe") else "good"}">{escape(summary(diagnosis))}</p>',
        _facts(values),
        *(_cards(_TITLES[severity], diagnosis.of(severity)) for severity in _TITLES),
        "<h2>Parameters</h2>",
        _table(
            ["", "‖parameter‖", "‖gradient‖", "gradient / W_down's", "Adam's first step", "step / parameter", "trained"],
            [
                [name, *(_number(group[key]) for key in _COLUMNS), "yes" if group["trained"] else "no"]
                for key_name, name in _GROUPS.items()
                if (group := values["groups"][key_name])["parameter"] is not None
            ],
        ),
        "<h2>Layers</h2>",
        _table(_LAYER_HEADS, [_layer_row(layer) for layer in values["layers"]]),
        missing,
        *(_figure(caption, image) for caption, image in images),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}{_OWN_STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


_COLUMNS = ("parameter", "gradient", "gradient_over_weight", "adam_step", "step_over_parameter")
_LAYER_HEADS = ["layer", "eta", "∇ conv", "∇ P", "∇ W_down", "η‖S‖/‖W0‖", "growth", "clipped", "rank of S", "alignment"]
_LAYER_HEADS += ["keys span", "collision", "loss on − off", "logits moved", "state"]


def _layer_row(layer: dict[str, Any]) -> list[str]:
    writes, keys, effect = layer["writes"] or {}, layer["keys"] or {}, layer["effect"] or {}
    change = "" if not effect else f"{effect['loss_change']:+.2g}" + (f" ± {effect['stderr']:.1g}" if effect["stderr"] is not None else "")
    return [
        str(layer["layer"]),
        _number(layer["eta"]),
        *(_number(layer["parameters"].get(name, {}).get("gradient")) for name in ("conv", "proj", "weight")),
        *(_number(writes.get(name)) for name in ("state_ratio", "growth", "clipped", "effective_rank", "alignment")),
        _number(keys.get("effective")),
        _number(keys.get("collision")),
        change,
        _number(effect.get("logit_change")),
        ", ".join(layer["precision"]["state"]),
    ]


def _facts(values: dict[str, Any]) -> str:
    rows, length = values["rows"]
    facts = {
        "rows": f"{rows} of {length:,} tokens",
        "chunks": f"{values['chunk_size']} tokens each, {values['chunks_read']} written and read",
        "loss": f"{_number(values['loss'])} nats a token, in training mode",
    }
    if values["effect_of_all_writes"] is not None:
        change = values["effect_of_all_writes"]
        error = "" if change["stderr"] is None else f" ± {change['stderr']:.1g}"
        facts["writes on − off"] = f"{_number(change['loss'])}{error} nats a token, over the tokens that can read a write"
    return '<dl class="facts">' + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()) + "</dl>"


def _cards(title: str, findings: list[Finding]) -> str:
    if not findings:
        return ""
    cards = []
    for finding in findings:
        rows = [("Found", finding.message), ("What it does", finding.kind.meaning), ("What to do", finding.kind.remedy)]
        body = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows)
        heading = f"<h3>{escape(finding.kind.title)} <code>{finding.id}</code></h3>"
        cards.append(f'<section class="card {finding.severity}">{heading}<dl>{body}</dl></section>')
    return f"<h2>{title}</h2>" + "\n".join(cards)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="figures"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(caption: str, image: bytes) -> str:
    data = base64.b64encode(image).decode()
    return (
        f'<figure class="plot"><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
