"""Measures the gain of a soft prompt: learned keys and values that every token sees.

    python tools/experiments/soft_prompt.py [--rates 3e-3] [--seeds 0 1 2] [--out docs/results/cpu-2026-11/soft-prompt]

The prompt replaces the writes, and has as many numbers as conv and P. SmolLM2-135M has the window of
`memory_evidence.py`, and its recipe's rows, batches, steps and schedule, in one process. 87 keys and values
in every layer are trained (prefix tuning). They start as those of the first row's first tokens. The base is
frozen. The held-out documents of `memory_evidence.py` are read with and without the prompt, and scored over
the same tokens. A prompt is the same for every document, so it stores none. The script skips the results in
OUT.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kept_runs import RECIPE, TRAIN, digests, split_texts
from memory_models import DOCUMENTS, MODEL, TOKENS, WINDOW
from memory_rules import ROOT, WORK
from memory_tables import with_error
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, Cache, PreTrainedModel

from inplace_ttt import InPlaceTTTError
from inplace_ttt.attention_window import SINKS, attention_window, window_cache
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.evaluation.baseline_losses import BaselineLosses
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.families import CACHE
from inplace_ttt.files.results import Results
from inplace_ttt.reports.statistics import Mean
from inplace_ttt.texts.documents import documents_in, tokens_of
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.row_order import rows_to_come
from inplace_ttt.training.loop.parameters import schedule
from inplace_ttt.training.recipe.recipe import Recipe, load_recipe

PREFIX = 87
"""Length of the prompt. Each of its positions has 11,520 numbers: 1,002 thousand in all, where conv and P of
three layers have 1,004 thousand."""
CHUNK = 128
"""Number of tokens per piece of text, as in the reading of the other rules."""


class SoftPrompt(nn.Module):
    """Keys and values [layers, 2, 1, H, PREFIX, D], float32, before the first token in every layer's cache."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        super().__init__()
        cache = window_cache(model, PREFIX)
        with torch.no_grad(), attention_window(model, PREFIX):
            model(ids[:, :PREFIX], **{CACHE: cache}, use_cache=True)
        keys_and_values = [torch.stack([layer.keys, layer.values]) for layer in cache.layers]
        self.learned = nn.Parameter(torch.stack(keys_and_values).float())

    def put_into(self, cache: Cache, model: PreTrainedModel) -> None:
        """Puts the prompt into an empty cache of `window_cache`. The next token still counts as the first
        one."""
        for layer, (keys, values) in zip(cache.layers, self.learned.to(model.dtype), strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[3e-3],
        metavar="LR",
        help="learning rates to try (default: 3e-3)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "cpu-2026-11" / "soft-prompt")
    args = parser.parse_args()
    split_texts()
    results = Results(args.out.parent, "name another --out, or delete it")
    protocol = {
        "prefix": PREFIX,
        "window": WINDOW,
        "sinks": SINKS,
        "documents": DOCUMENTS,
        "tokens": TOKENS,
        "past": WINDOW,
        **digests(),
    }
    held = results.get(args.out.name, protocol=protocol) or {"protocol": protocol, "runs": []}
    for seed, rate in itertools.product(args.seeds, args.rates):
        if not any((run["seed"], run["rate"]) == (seed, rate) for run in held["runs"]):
            held["runs"].append({"seed": seed, "rate": rate, **measure(seed, rate)})
            results.put(args.out.name, {"command": "python tools/experiments/soft_prompt.py", **held})
    for run in held["runs"]:
        gain = with_error(run["gain"]["mean"], run["gain"]["stderr"])
        print(
            f"seed {run['seed']}, rate {run['rate']:g}: with the prompt {run['with']:.4f}, base "
            f"{run['base']:.4f}, {gain}"
        )
    return 0


def measure(seed: int, rate: float) -> dict[str, Any]:
    """Trains a prompt, and reads the held-out documents with and without it."""
    began = time.perf_counter()
    settings = (f"data.train={TRAIN}", f"training.seed={seed}", f"data.seed={seed}")
    recipe = load_recipe(RECIPE, [*settings, f"training.learning_rate={rate}"])
    model, tokenizer = (
        load_base(MODEL, dtype=torch.bfloat16).eval().requires_grad_(False),
        AutoTokenizer.from_pretrained(MODEL),
    )
    prompt, losses = trained(model, recipe, rows_to_come(build_data(recipe, tokenizer, CHUNK).train, recipe))
    between = time.perf_counter()
    files = documents_in([WORK / "text" / "held-out"])[:DOCUMENTS]
    baseline, differences, base = BaselineLosses(WORK / "without-writes"), [], []
    for file in tqdm(files, desc="reading", file=sys.stderr):
        ids = tokens_of(file, tokenizer, TOKENS)
        untouched = baseline.of(
            model, ids, piece=CHUNK, window=WINDOW, sinks=SINKS, progress=lambda tokens: None
        )
        with_it, without = (
            float(loss[0, WINDOW:].double().mean()) for loss in (read(model, ids, prompt), untouched)
        )
        differences.append(with_it - without)
        base.append(without)
    gain = Mean.of(differences)
    seconds = {"train": round(between - began), "evaluation": round(time.perf_counter() - between)}
    known = {"with": sum(base) / len(base) + gain.mean, "base": sum(base) / len(base), "gain": vars(gain)}
    return {**known, "losses": losses, "seconds": seconds}


def trained(model: PreTrainedModel, recipe: Recipe, rows: Any) -> tuple[SoftPrompt, list[float]]:
    """Trains a prompt by AdamW over the recipe's steps. Returns it with the loss of each step."""
    o, batch = recipe.training, recipe.training.batch_size * recipe.parallel.world
    prompt = SoftPrompt(model, torch.tensor([rows[0]["input_ids"]]))
    optimizer = torch.optim.AdamW(
        prompt.parameters(), lr=o.learning_rate, betas=(o.betas[0], o.betas[1]), eps=o.epsilon, weight_decay=0
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(o, recipe.steps, "vectors"))
    losses = []
    for step in tqdm(range(recipe.steps), desc="training", file=sys.stderr):
        total = 0.0
        for row in rows.select(range(step * batch, (step + 1) * batch)):
            ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
            cache = window_cache(model, WINDOW, PREFIX + SINKS)
            prompt.put_into(cache, model)
            with attention_window(model, WINDOW, PREFIX + SINKS):
                loss = model(ids, labels=labels, **{CACHE: cache}, use_cache=True).loss / batch
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(prompt.parameters(), o.max_grad_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(total)
    return prompt, losses


def read(model: PreTrainedModel, ids: Tensor, prompt: SoftPrompt) -> Tensor:
    """Returns token losses [1, T - 1] with a prompt."""

    def begin(cache: Cache) -> None:
        if not cache.layers[0].is_initialized:
            prompt.put_into(cache, model)

    with torch.no_grad():
        return token_losses(model, ids, piece=CHUNK, window=WINDOW, sinks=PREFIX + SINKS, before_piece=begin)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"soft_prompt: {error}")
