"""Explains a gradient of the target generator that was 50,000 times below W_down's.

    python tools/experiments/gradient_table.py --model .cache/smollm2-135m --text FILE [--out FILE.json]

Two causes are separated: a small start, and clipping in training. The table has gradient norms of conv, P and
W_down, over all TTT layers, on one text. Its rows are three starts of conv and P, with and without clipping
every delta to 1e-5: both drawn from N(0, 1e-4²); the paper's; and the paper's after one step of Adam, from
which on it writes. The lines at the end are factors between these cells.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, UpdateClip, convert
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.diagnostics.diagnosed_model import DiagnosedModel
from inplace_ttt.diagnostics.gradients import Gradients, Rates, first_step, gradients, summed
from inplace_ttt.diagnostics.overrides import with_values
from inplace_ttt.layer.overrides import with_config
from inplace_ttt.texts.documents import documents_in, joined_tokens

SMALL, TAU = 1e-4, 1e-5
LEARNING_RATE = 1e-4
"""Learning rate of the run that the table explains."""

Start = Mapping[nn.Parameter, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m")
    parser.add_argument("--text", default=".cache/text/sotu/1995_william_j._clinton_d.txt")
    parser.add_argument("--layers", default="12,18,24")
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = tuple(int(layer) for layer in args.layers.split(","))
    model = convert(
        load_base(args.model, dtype=torch.float32),
        InPlaceTTTConfig(layers=layers, chunk_size=args.chunk_size),
    )
    ids = joined_tokens(documents_in([args.text]), AutoTokenizer.from_pretrained(args.model), args.tokens)
    cells = measure(DiagnosedModel.of(model, {"input_ids": ids}))
    result = {
        "command": "python tools/experiments/gradient_table.py " + " ".join(sys.argv[1:]),
        "model": Path(args.model).name,
        "text": Path(args.text).name,
        "tokens": ids.shape[1],
        "chunk_size": args.chunk_size,
        "layers": layers,
        "eta": 1.0,
        "small": SMALL,
        "tau": TAU,
        "learning_rate": LEARNING_RATE,
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cells": cells,
        "factors": factors(cells),
    }
    print(render(cells))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(model: DiagnosedModel) -> dict[str, dict[str, float | None]]:
    """Returns norms and their ratios by `START, CLIP`."""
    rates = Rates(LEARNING_RATE, LEARNING_RATE, LEARNING_RATE)
    cells: dict[str, dict[str, float | None]] = {}
    with tqdm(total=6, desc="gradients", file=sys.stderr, disable=None) as bar:

        def cell(name: str, start: Start) -> Gradients:
            found = {}
            for clip, said in ((None, "no clip"), (UpdateClip(TAU, mode="always"), "clipped")):
                with with_values(start), with_config(model.layers.values(), clip=clip):
                    found[said] = gradients(model, rates, keep=("conv",))
                cells[f"{name}, {said}"] = _norms(found[said])
                bar.update()
            return found["no clip"]

        paper = cell("the paper's start", {})
        cell("the paper's after one step", first_step(model, paper, rates))
        small = {
            p: torch.randn_like(p) * SMALL
            for (_, name), p in model.parameters().items()
            if name in ("conv", "proj")
        }
        cell("both N(0, 1e-4²)", small)
    return cells


def factors(cells: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Returns factors by which each cause lowers the gradient of conv and P, relative to W_down's.

    They are for each cause alone, for the clip after a small start, and for both.
    """
    small, after = "both N(0, 1e-4²)", "the paper's after one step"

    def share(cell: str) -> float:
        return cells[cell]["writer_over_weight"] or 0.0

    reference = share(f"{after}, no clip")
    return {
        "small start alone": reference / share(f"{small}, no clip"),
        "clip alone": reference / share(f"{after}, clipped"),
        "clip, given the small start": share(f"{small}, no clip") / share(f"{small}, clipped"),
        "both": reference / share(f"{small}, clipped"),
        "W_down over the writer, both": 1 / share(f"{small}, clipped"),
    }


def render(cells: Mapping[str, Mapping[str, float | None]]) -> str:
    lines = [f"{'':38} {'conv':>9} {'P':>9} {'W_down':>9} {'conv/W':>9} {'P/W':>9}  clipped"]
    for name, cell in cells.items():
        numbers = " ".join(
            f"{cell[key] or 0:9.2e}"
            for key in ("conv", "proj", "weight", "conv_over_weight", "proj_over_weight")
        )
        lines.append(f"{name:38} {numbers}  {cell['clipped']:.0%}")
    return "\n".join([*lines, *(f"{name}: {value:,.3g}" for name, value in factors(cells).items())])


def _norms(found: Gradients) -> dict[str, float | None]:
    conv, proj, weight = (summed(found.norms, name) or 0.0 for name in ("conv", "proj", "weight"))
    return {
        "conv": conv,
        "proj": proj,
        "weight": weight,
        "conv_over_weight": conv / weight,
        "proj_over_weight": proj / weight,
        "writer_over_weight": max(conv, proj) / weight,
        "clipped": sum(found.clipped.values()) / len(found.clipped),
        "loss": found.loss,
    }


if __name__ == "__main__":
    sys.exit(main())
