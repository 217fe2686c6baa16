"""The tables and the drawing of the memory evidence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from memory_models import (
    BESIDES,
    FAR,
    LONG,
    RIVAL,
    TOKENS,
)
from memory_record import COLUMNS, LOSSES, Record
from memory_rules import MAIN, RULES


def print_tables(record: Record) -> None:
    differences = (
        "on - off",
        "on - base",
        "mismatched - off",
        "document gain: on - mismatched",
        "the same, unseen",
        "repeated passage",
        "between",
    )
    print(f"| rule | seeds | {' | '.join((*LOSSES, *differences))} |")
    print("|---" * (2 + len(LOSSES) + len(differences)) + "|")
    for row in record.rows():
        cells = [*(f"{row[key]:.4f}" for key in LOSSES), *(_cell(row[key]) for key in COLUMNS)]
        print(f"| {row['rule']} | {len(row['seeds'])} | {' | '.join(cells)} |")
    print("\nMean over seeds; ± the larger of two standard errors, over documents and over seeds.\n")
    print_beside_training(record.rows())
    print_rival(record)
    beside = record.having(*BESIDES)
    if not beside:
        return
    full = record.having("full_attention")
    for where, key in (("all documents", "off"), ("the unseen ones", "off_unseen")):
        gains = [
            values[key] - values["full_attention"][key]
            for _, values in full
            if key in values and key in values["full_attention"]
        ]
        if gains:
            print(f"On {where}, full attention gains {gains[0]:.4f} over the window.")
    print(
        f"\nSeed 0, on - off and document gain: full attention, at and past {TOKENS} of {LONG} tokens; the "
        f"window, past {TOKENS} of {FAR}:\n"
    )
    print(f"| rule | {'on - off | document gain | ' * len(BESIDES)}document gain at {TOKENS}, at the end |")
    print("|---" * (2 + 2 * len(BESIDES)) + "|")
    for name, values in beside:
        pairs = [
            values.get(where, {}).get(key) for where in BESIDES for key in ("difference", "document_gain")
        ]
        cells = [
            "not read yet" if pair is None else with_error(pair["mean"], pair["stderr"]) for pair in pairs
        ]
        rows = values.get("far_beyond", {}).get("positions", [])
        known = [_memory(row) for row in rows if row["stop"] <= TOKENS]
        cells.append(f"{known[-1]:+.4f}, {_memory(rows[-1]):+.4f}" if known else "not read yet")
        print(f"| {name} | {' | '.join(cells)} |")


def print_rival(record: Record) -> None:
    """Prints dynamic evaluation of the same down-projections, by learning rate."""
    columns = ("difference", "document_gain", "on_minus_dynamic")
    for name, values in record.having(RIVAL):
        print(
            f"\nDynamic evaluation of the layers of {name}:\n\n| rate | {' | '.join(columns)} |\n|---|---|---|---|"
        )
        for row in values[RIVAL]:
            cells = (with_error(row[key]["mean"], row[key]["stderr"]) for key in columns)
            print(f"| {row['rate']:g} | {' | '.join(cells)} |")


def print_beside_training(rows: list[dict[str, Any]]) -> None:
    """Prints the gain of the rules beside models that were trained alike without writes.

    Errors are computed as if the two had read different documents, so they are too large.
    """
    for other in rows:
        if not RULES[other["rule"]].writes:
            gains = (
                f"{row['rule']} {_less(row['gain'], other['gain'])}" for row in rows if row["rule"] in MAIN
            )
            print(f"Beside {other['rule']}, on - base: {', '.join(gains)}.\n")


def _less(value: dict[str, float], other: dict[str, float]) -> str:
    return with_error(value["mean"] - other["mean"], math.hypot(_error(value), _error(other)))


def draw(record: Record, file: Path) -> None:
    """Draws on - off and document gain by position, behind the window, up to and beyond the length of the
    training rows."""
    read = record.having("far_beyond")
    if not read:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.4), sharex=True, layout="constrained")
    for name, values in read:
        rows = values["far_beyond"]["positions"]
        middle = [(row["start"] + row["stop"]) / 2 for row in rows]
        for axes, heights in zip(
            panels, ([row["difference"] for row in rows], [_memory(row) for row in rows]), strict=True
        ):
            axes.plot(middle, heights, marker="o", markersize=3, label=name)
    for axes, title in zip(panels, ("on - off", "document gain: on - mismatched"), strict=True):
        axes.axhline(0, color="#8a8f98", linewidth=1)
        axes.axvline(
            TOKENS, color="#8a8f98", linewidth=1, linestyle=":", label=f"rows of {TOKENS:,} tokens end"
        )
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set(
            xlabel="position in the document (tokens)",
            ylabel="nats per token",
            title=title,
        )
    figure.suptitle("Behind the window, seed 0")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=130)


def _memory(position: dict[str, Any]) -> float:
    return float(position["difference"] - position["generic_gain"])


def _cell(value: dict[str, float]) -> str:
    return with_error(value["mean"], _error(value))


def _error(value: dict[str, float]) -> float:
    return max(value["stderr_documents"], value["stderr_seeds"])


def with_error(mean: float, error: float) -> str:
    return f"{mean:+.4f} ± {error:.4f}"
