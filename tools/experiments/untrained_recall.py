"""Measures recall and cost of whitened keys and least squares in one layer, before any training.

    python tools/experiments/untrained_recall.py [--layers 6 12] [--ranks 64 288 432] [--ridge 0.1 1] [--seeds 0 1 2] \\
        [--out docs/results/cpu-2026-11/untrained-recall.json]

SmolLM2-135M reads held-out documents in which a passage of 512 tokens repeats 1,024 tokens later. A layer's
state is written with its own keys. The values are centered embeddings of the next token, as a convolution
with one tap and P = I makes them. Recall is the share of tokens in the second copy for which the right one of
all 49,152 embeddings is nearest to the read. Cost is the forward time of keys and op over that of the plain
down-projection, on one thread, median of pairs. A seed in OUT.json is skipped.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from tqdm import tqdm

from inplace_ttt.calibration.activations import seeing
from inplace_ttt.calibration.calibrate import whitened
from inplace_ttt.calibration.directions import Directions, LeadingDirections
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.cli.loading import tokenizer_of
from inplace_ttt.config import InPlaceTTTConfig, KeyWhitening
from inplace_ttt.families import locate
from inplace_ttt.files.results import Results
from inplace_ttt.layer.whitened_keys import WhitenedKeys
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight
from inplace_ttt.rules import RidgeRule, Rule, SumRule
from inplace_ttt.surgery import convert, disable_ttt, fast_weights
from inplace_ttt.tasks.passages import Passage
from inplace_ttt.texts.documents import documents_in, tokens_of

ROOT = Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / ".cache" / "smollm2-135m", ROOT / ".cache" / "text"
TOKENS, CHUNK = 2048, 128
Keys = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """Keys and a rule.

    Attributes:
        rank: rank of whitened keys; None for raw keys.
        ridge: λ of least squares; None for the sum.
    """

    rank: int | None
    ridge: float | None

    @property
    def keys(self) -> str:
        return f"whitened, r {self.rank}" if self.rank else "raw"

    @property
    def rule(self) -> str:
        return "sum" if self.ridge is None else f"least squares, λ {self.ridge:g}"

    @property
    def update_rule(self) -> Rule:
        return SumRule() if self.ridge is None else RidgeRule(self.ridge)

    def numbers(self, d: int, h: int) -> int:
        """Returns the numbers of a state. The symmetric sum KᵀK counts half."""
        width = self.rank or h
        return d * width + (0 if self.ridge is None else width * (width + 1) // 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 12, 18, 24])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 128, 256, 288, 432, 512, 576, 1024])
    parser.add_argument("--ridge", nargs="+", type=float, default=[0.01, 0.1, 1.0])
    parser.add_argument(
        "--documents",
        type=int,
        default=8,
        help="documents to read; keys are measured on as many others (default: 8)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="seeds of the documents and the passages' places",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = [
        Variant(rank, ridge)
        for ridge in (None, *args.ridge)
        for rank in (None, *args.ranks)
        if rank or not ridge
    ]
    results = Results(args.out and args.out.parent, "name another --out, or delete it")
    name = args.out.stem if args.out else "untrained-recall"
    protocol = {
        "layers": args.layers,
        "documents": args.documents,
        "variants": [vars(variant) for variant in variants],
    }
    seeds = (results.get(name, protocol=protocol) or {"seeds": {}})["seeds"]
    missing = [seed for seed in args.seeds if str(seed) not in seeds]
    if missing:
        model = convert(
            load_base(MODEL), InPlaceTTTConfig(layers=tuple(args.layers), chunk_size=CHUNK)
        ).float()
    for seed in missing:
        seeds[str(seed)] = measure(model, seed, variants, args)
        about = {
            "command": "python tools/experiments/untrained_recall.py",
            "torch": torch.__version__,
            "protocol": protocol,
        }
        results.put(name, {**about, "seeds": seeds})
    print_table(variants, args.layers, list(seeds.values()))
    return 0


def measure(model: Any, seed: int, variants: list[Variant], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns recall by layer and cost of each variant, on the documents of a seed."""
    table = centered(model)
    known, read, starts = documents(args.documents, seed)
    directions = leading(model, known, max(args.ranks))
    z = inputs(model, read)
    values = torch.nn.functional.pad(table[read[:, 1:]], (0, 0, 0, 1))
    first = args.layers[0]
    weight = model.get_parameter(f"model.layers.{first}.mlp.down_proj.weight")
    rows = []
    for variant in tqdm(variants, desc=f"seed {seed}", file=sys.stderr):
        keys = {layer: keys_of(directions[layer], variant.rank) for layer in args.layers}
        recalls = {
            layer: recall(keys[layer](z[layer]), values, read, starts, table, variant.update_rule)
            for layer in args.layers
        }
        price = cost(z[first][:1], values[:1], weight, keys[first], variant.update_rule, args.repeats)
        rows.append({"numbers": variant.numbers(*weight.shape), "recall": recalls, "cost": price})
    return rows


def print_table(variants: list[Variant], layers: list[int], seeds: list[list[dict[str, Any]]]) -> None:
    """Prints means over the seeds."""
    print(f"| keys | rule | numbers | {' | '.join(f'layer {layer}' for layer in layers)} | cost |")
    print(f"|---|---|---|{'---|' * (len(layers) + 1)}")
    for place, variant in enumerate(variants):
        rows = [seed[place] for seed in seeds]
        shares = [[100 * share for share in row["recall"].values()] for row in rows]
        cells = [f"{fmean(one):.1f} %" for one in zip(*shares, strict=True)]
        print(f"| {variant.keys} | {variant.rule} | {rows[0]['numbers']:,} | {' | '.join(cells)} | ", end="")
        print(f"{fmean(row['cost']['median'] for row in rows):.1f} |")


def documents(count: int, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Draws documents.

    Returns:
        Token ids [count, T] to measure keys on, token ids [count, T] of other documents with a repeated
            passage each, and
        the starts of the passages.
    """
    tokenizer, rows = tokenizer_of(str(MODEL)), []
    files = documents_in([TEXT])
    random.Random(seed).shuffle(files)
    for file in files:
        ids = tokens_of(file, tokenizer, TOKENS)[0]
        if len(ids) == TOKENS:
            rows.append(ids)
        if len(rows) == 2 * count:
            break
    generator, passage = random.Random(seed), Passage()
    starts = [passage.random_start(TOKENS, generator) for _ in range(count)]
    return (
        torch.stack(rows[:count]),
        torch.stack([passage.repeat(row, at) for row, at in zip(rows[count:], starts, strict=True)]),
        starts,
    )


@torch.no_grad()
def inputs(model: Any, rows: Tensor) -> dict[int, Tensor]:
    """Returns every TTT layer's down-projection inputs [B, T, h]."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in fast_weights(model)}
    with disable_ttt(model), seeing(model) as seen:
        for row in rows:
            locate(model).base(row[None], use_cache=False)
            for layer, what in seen.items():
                found[layer].append(what.z)
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def centered(model: Any) -> Tensor:
    """Returns the embeddings [vocabulary, d] minus their mean."""
    table = model.get_input_embeddings().weight.detach()
    return table - table.mean(0)


@torch.no_grad()
def leading(model: Any, rows: Tensor, rank: int) -> dict[int, Directions]:
    """Returns the directions of every TTT layer's down-projection inputs."""
    found: dict[int, Directions] = {}
    for layer, z in inputs(model, rows).items():
        reader = LeadingDirections(z.shape[-1], rank)
        reader.add(z)
        found[layer] = reader.found()
    return found


def keys_of(found: Directions, rank: int | None) -> Keys:
    """Returns a function to keys with a mean square of one: scaled raw keys, or whitened ones."""
    if rank is None:
        scale = ((1 - float(found.center.square().sum())) / found.trace) ** 0.5
        return lambda z: z * scale
    directions = whitened(
        found._replace(values=found.values[:rank], vectors=found.vectors[:, :rank]), KeyWhitening().shrinkage
    )
    keys = WhitenedKeys(directions.shape[1], len(directions))
    keys.directions.copy_(directions)
    keys.center.copy_(found.center)
    return keys


@torch.no_grad()
def recall(keys: Tensor, values: Tensor, rows: Tensor, starts: list[int], table: Tensor, rule: Rule) -> float:
    """Returns the share of a passage's next tokens that the read ranks first in its second copy."""
    layout = ChunkLayout.from_lengths([[TOKENS]] * len(rows), CHUNK)
    read = fast_weight(keys, values, None, eta=1.0, layout=layout, rule=rule)
    passage, directions, hits = Passage(), torch.nn.functional.normalize(table, dim=1), []
    for row, start in enumerate(starts):
        again = slice(passage.second(start).start, passage.second(start).stop - 1)
        best = (read[row, again] @ directions.T).argmax(1)
        hits.append(best == rows[row, again.start + 1 : again.stop + 1])
    return float(torch.cat(hits).float().mean())


@torch.no_grad()
def cost(z: Tensor, values: Tensor, weight: Tensor, keys: Keys, rule: Rule, repeats: int) -> dict[str, float]:
    """Returns the time of down-projection, keys and op over that of the plain down-projection.

    These are median and range of paired times.
    """
    layout = ChunkLayout.from_lengths([[TOKENS]], CHUNK)

    def timed(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def with_memory() -> Tensor:
        return linear(z, weight) + fast_weight(keys(z), values, None, eta=1.0, layout=layout, rule=rule)

    ratios = [timed(with_memory) / timed(lambda: linear(z, weight)) for _ in range(repeats + 1)][1:]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    sys.exit(main())
