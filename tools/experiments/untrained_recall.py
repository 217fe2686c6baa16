"""What whitened keys and error-correcting writes do for a layer's recall, before anything is trained, and what they cost.

python tools/experiments/untrained_recall.py [--layers 6 12] [--ranks 64 256 512] [--out docs/results/cpu-2026-11/untrained-recall.json]

SmolLM2-135M reads held-out documents in which a passage of 512 tokens stands again 1,024 tokens later. A layer's memory is
written with its own keys and, as values, the centred embedding of the next token: what a convolution with one tap and P = I
makes. The recall is how often, on the second copy, what is read is nearest to the right one of all 49,152 embeddings. Costs are
times of keys and op over that of the plain down-projection, forward, one thread, median of pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from tqdm import tqdm

from inplace_ttt.calibration.activations import seeing
from inplace_ttt.calibration.calibrate import whitening_of
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.cli.loading import tokenizer_of
from inplace_ttt.config import InPlaceTTTConfig, KeyWhitening
from inplace_ttt.families import locate
from inplace_ttt.files.text import files_in, tokens_of
from inplace_ttt.layer.whitened_keys import WhitenedKeys
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight
from inplace_ttt.surgery import convert, fast_weights, ttt_disabled
from inplace_ttt.tasks.passages import Passage

ROOT = Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / ".cache" / "smollm2-135m", ROOT / ".cache" / "text"
TOKENS, CHUNK, DAMPING = 2048, 128, 1.0
Keys = Callable[[Tensor], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 12, 18, 24])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--documents", type=int, default=8, help="to read, and as many again to measure Σ on (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents and the passages' places (default: 0)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = convert(load_base(MODEL), InPlaceTTTConfig(layers=tuple(args.layers), chunk_size=CHUNK)).float()
    known, read, starts = documents(args.documents, args.seed)
    sigma = {layer: z.flatten(0, 1).T @ z.flatten(0, 1) / z.shape[:2].numel() for layer, z in inputs(model, known).items()}
    z, table = inputs(model, read), centred(model)
    values = torch.nn.functional.pad(table[read[:, 1:]], (0, 0, 0, 1))
    rows: list[dict[str, Any]] = []
    for name, rank, damping in tqdm(variants(args.ranks, sigma[args.layers[0]].shape[0]), desc="variants", file=sys.stderr):
        keys = {layer: map_of(sigma[layer], rank) for layer in args.layers}
        found = {layer: recall(keys[layer](z[layer]), values, read, starts, table, damping) for layer in args.layers}
        layer = args.layers[0]
        weight = model.get_parameter(f"model.layers.{layer}.mlp.down_proj.weight")
        price = cost(z[layer][:1], values[:1], weight, keys[layer], damping, args.repeats)
        rows.append({"keys": name, "writes": "plain" if damping is None else "error-correcting", "recall": found, "cost": price})
    print(f"| keys | writes | {' | '.join(f'layer {layer}' for layer in args.layers)} | cost |\n|---|---|{'---|' * (len(args.layers) + 1)}")
    for row in rows:
        cells = " | ".join(f"{100 * value:.1f} %" for value in row["recall"].values())
        print(f"| {row['keys']} | {row['writes']} | {cells} | {row['cost']['median']:.1f} |")
    if args.out:
        command = "python tools/experiments/untrained_recall.py " + " ".join(sys.argv[1:])
        args.out.write_text(json.dumps({"command": command, "torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def variants(ranks: list[int], width: int) -> list[tuple[str, int | None, float | None]]:
    """Name of the keys, their rank (0 for raw ones), λ."""
    keys = [("raw", 0), *((f"whitened, rank {rank}", rank) for rank in ranks), (f"whitened, all {width}", width)]
    return [(name, rank, damping) for damping in (None, DAMPING) for name, rank in keys]


def documents(count: int, seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Token ids [count, T] to measure on, other ones with their passage twice, and where the passages start."""
    tokenizer, rows = tokenizer_of(str(MODEL)), []
    files = list(files_in([TEXT]))
    random.Random(seed).shuffle(files)
    for file in files:
        ids = tokens_of(file, tokenizer, TOKENS)[0]
        if len(ids) == TOKENS:
            rows.append(ids)
        if len(rows) == 2 * count:
            break
    generator, passage = random.Random(seed), Passage()
    starts = [passage.random_start(TOKENS, generator) for _ in range(count)]
    return torch.stack(rows[:count]), torch.stack([passage.repeat(row, at) for row, at in zip(rows[count:], starts, strict=True)]), starts


@torch.no_grad()
def inputs(model: Any, rows: Tensor) -> dict[int, Tensor]:
    """Every TTT layer's down-projection input [B, T, h]."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in fast_weights(model)}
    with ttt_disabled(model), seeing(model) as seen:
        for row in rows:
            locate(model).base(row[None], use_cache=False)
            for layer, what in seen.items():
                found[layer].append(what.z)
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def centred(model: Any) -> Tensor:
    """The embeddings [vocabulary, d] less their mean."""
    table = model.get_input_embeddings().weight.detach()
    return table - table.mean(0)


def map_of(sigma: Tensor, rank: int | None) -> Keys:
    """Keys whose mean square is one: raw ones scaled, or whitened ones."""
    if not rank:
        scale = float(sigma.trace()) ** -0.5
        return lambda z: z * scale
    keys = WhitenedKeys(len(sigma), rank)
    basis, scale_of = whitening_of(sigma, rank, KeyWhitening().ridge)
    keys.basis.copy_(basis)
    keys.scale.copy_(scale_of)
    return keys


@torch.no_grad()
def recall(keys: Tensor, values: Tensor, rows: Tensor, starts: list[int], table: Tensor, damping: float | None) -> float:
    """The share of a passage's next tokens that its second copy reads back first."""
    layout = ChunkLayout.from_lengths([[TOKENS]] * len(rows), CHUNK)
    read = fast_weight(keys, values, None, eta=1.0, layout=layout, damping=damping)
    passage, directions, hits = Passage(), torch.nn.functional.normalize(table, dim=1), []
    for row, start in enumerate(starts):
        again = slice(passage.second(start).start, passage.second(start).stop - 1)
        best = (read[row, again] @ directions.T).argmax(1)
        hits.append(best == rows[row, again.start + 1 : again.stop + 1])
    return float(torch.cat(hits).float().mean())


@torch.no_grad()
def cost(z: Tensor, values: Tensor, weight: Tensor, keys: Keys, damping: float | None, repeats: int) -> dict[str, float]:
    """Plain down-projection, keys and op, over the plain down-projection alone: median and range of paired times."""
    layout = ChunkLayout.from_lengths([[TOKENS]], CHUNK)

    def timed(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def with_memory() -> Tensor:
        return linear(z, weight) + fast_weight(keys(z), values, None, eta=1.0, layout=layout, damping=damping)

    ratios = [timed(with_memory) / timed(lambda: linear(z, weight)) for _ in range(repeats + 1)][1:]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    sys.exit(main())
