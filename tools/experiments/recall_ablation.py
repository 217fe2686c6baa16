"""Measures recall without parts of the method, as a table and a plot.

    python tools/experiments/recall_ablation.py --runs runs/recall-ablation \\
        --out docs/results/cpu-2026-11/recall-ablation

The variants are of recipes/recall-cpu.yaml, with some seeds each. They are trained in this process with plain
torch: the recipe's model, data, parameter groups and schedule, without the launcher, which would take longer
than the run. Each run has one JSON file. A run with a file is skipped.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from inplace_ttt import InPlaceTTTError, disable_ttt
from inplace_ttt.files.results import Results
from inplace_ttt.layer import fast_linear
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight
from inplace_ttt.rules import PAPER_RULE, Rule
from inplace_ttt.surgery import fast_weights
from inplace_ttt.tasks.recall import recall_accuracy, recall_data
from inplace_ttt.training.loop.parameters import parameter_groups, schedule
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "recall-cpu.yaml"


@dataclass(frozen=True)
class Variant:
    """One variant of the recipe.

    Attributes:
        name: name in the table.
        settings: settings that differ from the recipe.
        identity: parts that are held at the identity: conv, proj.
        state: dtype of the state; None for the recipe's.
    """

    name: str
    settings: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    state: str | None = None


VARIANTS = (
    *(Variant(f"chunks of {size}", (f"ttt.chunk_size={size}",)) for size in (8, 16)),
    Variant("chunks of 32 (the recipe)"),
    *(Variant(f"chunks of {size}", (f"ttt.chunk_size={size}",)) for size in (64, 128)),
    Variant("no conv", identity=("conv",)),
    Variant("no P", identity=("proj",)),
    Variant("neither", identity=("conv", "proj")),
    Variant("conv without look-ahead", ("ttt.conv=causal",)),
    Variant("target: hidden states", ("ttt.target=hidden_states",)),
    Variant("state in bfloat16", state="bfloat16"),
    Variant("no writes (η 0)", ("ttt.eta=0",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", default="runs/recall-ablation", help="folder of the runs, one JSON file each"
    )
    parser.add_argument(
        "--out",
        default="runs/recall-ablation/summary",
        help="path of the table (.json) and of the plot (.png)",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the recipe in every variant",
    )
    args = parser.parse_args()
    results = Results(args.runs, "choose another --runs")
    recipe = hashlib.sha256(RECIPE.read_bytes()).hexdigest()
    todo = [(seed, variant) for seed in range(args.seeds) for variant in VARIANTS]
    rows: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in VARIANTS}
    with tqdm(todo, unit="run", file=sys.stderr, disable=None) as bar:
        for seed, variant in bar:
            bar.set_postfix_str(f"{variant.name}, seed {seed}")
            asked = {
                "variant": asdict(variant),
                "seed": seed,
                "steps": args.steps,
                "set": args.set,
                "recipe_sha256": recipe,
            }
            name = f"{_slug(variant.name)}-{seed}"
            if results.get(name, asked=asked) is None:
                results.put(name, {"asked": asked, **_run(variant, seed, args)})
            rows[variant.name].append(results.known[name])
    summary = {
        "command": "python tools/experiments/recall_ablation.py " + " ".join(sys.argv[1:]),
        "recipe": "recipes/recall-cpu.yaml",
        "steps": args.steps,
        "torch": torch.__version__,
        "chance": 2 / load_recipe(RECIPE, args.set).data.recall.vocabulary,
        "variants": {name: _spread(runs) for name, runs in rows.items()},
    }
    out = Path(args.out)
    Results(out.parent).put(out.name, summary)
    _plot(summary, out.with_suffix(".png"))
    for name, row in summary["variants"].items():
        print(
            f"{name:28} {row['on']['mean']:6.1%} ({row['on']['min']:.1%} to {row['on']['max']:.1%})   off "
            f"{row['off']['mean']:.1%}"
        )


def _run(variant: Variant, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains and scores one variant."""
    common = [f"training.seed={seed}", f"data.seed={seed}", f"training.steps={args.steps}"]
    recipe = load_recipe(RECIPE, [*args.set, *common, *variant.settings])
    settings, data, task = recipe.training, recipe.data, recipe.data.recall
    assert task is not None
    make = functools.partial(
        recall_data, pairs=task.pairs, vocabulary=task.vocabulary, length=data.sequence_length, seed=data.seed
    )
    rows, held_out = make(settings.batch_size * args.steps), make(data.validation_documents, held_out=True)
    model = build_model(recipe)
    _hold_at_identity(model, variant.identity)
    groups = parameter_groups(model, settings)
    for group in groups:
        group["lr"] *= group["name"] not in variant.identity
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [schedule(settings, args.steps, group["name"]) for group in groups]
    )
    start, losses = time.perf_counter(), []
    with nullcontext() if variant.state is None else _state_kept_in(getattr(torch, variant.state)):
        model.train()
        for batch in rows.with_format("torch").iter(batch_size=settings.batch_size):
            loss = model(**{name: column.long() for name, column in batch.items()}, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        on = recall_accuracy(model, held_out)
    with disable_ttt(model):
        off = recall_accuracy(model, held_out)
    return {
        "on": on,
        "off": off,
        "loss": statistics.mean(losses[-10:]),
        "seconds": time.perf_counter() - start,
    }


@torch.no_grad()
def _hold_at_identity(model: nn.Module, kinds: tuple[str, ...]) -> None:
    """Sets V = X · P without conv, or V = Conv(X) without P. A learning rate of 0 keeps them so."""
    for layer in fast_weights(model).values():
        if "conv" in kinds:
            layer.ttt.conv.zero_()
            layer.ttt.conv[:, 0, -layer.ttt.first_tap] = 1
        if "proj" in kinds:
            layer.ttt.proj.copy_(torch.eye(len(layer.ttt.proj)))


@contextmanager
def _state_kept_in(dtype: torch.dtype) -> Iterator[None]:
    """Rounds the state of every TTT layer to `dtype` after each chunk. Each row must be one document."""

    def rounded(
        z: Tensor,
        v: Tensor,
        weight: Tensor,
        *,
        eta: float,
        layout: ChunkLayout,
        clip: Any = None,
        rule: Rule = PAPER_RULE,
        **none: Any,
    ) -> Tensor:
        assert rule == PAPER_RULE and not any(value is not None for value in none.values())
        batch, length, _ = z.shape
        assert layout.documents == (((0, length),),) * batch
        state, outs = z.new_zeros(batch, *weight.shape), []
        for start, stop in layout.chunks((0, length)):
            chunk = ChunkLayout.from_lengths([[stop - start]] * batch, layout.chunk_size)
            read = {
                "eta": eta,
                "layout": chunk,
                "initial_state": state,
                "clip": clip,
                "backend": "reference",
                "return_state": True,
            }
            out, state = fast_weight(z[:, start:stop], v[:, start:stop], weight, **read)
            state = state.to(dtype).to(z.dtype)
            outs.append(out)
        return torch.cat(outs, dim=1)

    plain, fast_linear.fast_weight = fast_linear.fast_weight, rounded
    try:
        yield
    finally:
        fast_linear.fast_weight = plain


def _spread(runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for which in ("on", "off"):
        values = [run[which] for run in runs]
        row[which] = {
            "mean": statistics.mean(values),
            "min": min(values),
            "max": max(values),
            "seeds": values,
        }
    return {**row, "seconds": statistics.mean(run["seconds"] for run in runs)}


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name).split()).lower()


def _plot(summary: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    names = list(summary["variants"])
    on = [summary["variants"][name]["on"] for name in names]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        names,
        [row["mean"] for row in on],
        color=["#d9822b" if "recipe" in name else "#2f6db3" for name in names],
    )
    for place, row in enumerate(on):
        axes.plot(row["seeds"], [place] * len(row["seeds"]), "o", color="#1f2933", markersize=3)
    axes.axvline(summary["chance"], color="#1f2933", linewidth=0.8, linestyle=":", label="chance")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xlabel(f"recall after {summary['steps']} steps, held-out rows (bar: mean, dots: seeds)")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    try:
        main()
    except InPlaceTTTError as error:
        sys.exit(f"recall_ablation: {error}")
