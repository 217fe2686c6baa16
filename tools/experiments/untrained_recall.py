"""What compact keys and least squares do for a layer's recall, before anything is trained, and what they
cost.

python tools/experiments/untrained_recall.py [--layers 6 12] [--ranks 64 288 432] [--ridge 0.1 1] [--seeds 0 1
2]
    [--out docs/results/cpu-2026-11/untrained-recall.json]

SmolLM2-135M reads held-out documents in which a passage of 512 tokens stands again 1,024 tokens later. A
layer's memory is written with its own keys and, as values, the centered embedding of the next token: what a
convolution with one tap and P = I makes. The recall is how often, on the second copy, what is read is nearest
to the right one of all 49,152 embeddings. Costs are times of keys and op over that of the plain
down-projection, forward, one thread, median of pairs. A seed that is in OUT.json is done.
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
    """rank: of whitened keys, None for raw ones. ridge: λ of least squares, None for the sum."""

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
        """Of a state; of the symmetric sum of KᵀK, half."""
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
        "--documents", type=int, default=8, help="to read, and as many again to measure keys on (default: 8)"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the documents and the passages' places"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures here as well")
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
    """Recall by layer and cost of each variant, on the documents of a seed."""
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
    """Means over the seeds."""
    print(f"| keys | rule | numbers | {' | '.join(f'layer {layer}' for layer in layers)} | cost |")
    print(f"|---|---|---|{'---|' * (len(layers) + 1)}")
    for place, variant in enumerate(variants):
        rows = [seed[place] for seed in seeds]
        shares = [[100 * share for share in row["recall"].values()] for row in rows]
        cells = [f"{fmean(one):.1f} %" for one in zip(*shares, strict=True)]
        print(f"| {variant.keys} | {variant.rule} | {rows[0]['numbers']:,} | {' | '.join(cells)} | ", end="")
        print(f"{fmean(row['cost']['median'] for row in rows):.1f} |")


def documents(count: int, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Token ids [count, T] to measure on, other ones with their passage twice, and where the passages
    start."""
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
    """Every TTT layer's down-projection input [B, T, h]."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in fast_weights(model)}
    with disable_ttt(model), seeing(model) as seen:
        for row in rows:
            locate(model).base(row[None], use_cache=False)
            for layer, what in seen.items():
                found[layer].append(what.z)
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def centered(model: Any) -> Tensor:
    """The embeddings [vocabulary, d] less their mean."""
    table = model.get_input_embeddings().weight.detach()
    return table - table.mean(0)


@torch.no_grad()
def leading(model: Any, rows: Tensor, rank: int) -> dict[int, Directions]:
    """The directions of every TTT layer's down-projection inputs."""
    found: dict[int, Directions] = {}
    for layer, z in inputs(model, rows).items():
        reader = LeadingDirections(z.shape[-1], rank)
        reader.add(z)
        found[layer] = reader.found()
    return found


def keys_of(found: Directions, rank: int | None) -> Keys:
    """Keys whose mean square is one: raw ones scaled, or whitened ones."""
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
    """The share of a passage's next tokens that its second copy reads back first."""
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
    """Plain down-projection, keys and op, over the plain down-projection alone: median and range of paired
    times."""
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
