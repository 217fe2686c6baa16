"""Compares whitened keys centered by a constant with keys centered by the length of their input.

    python tools/experiments/key_center.py [--models gemma-3-270m smollm2-135m] [--documents 2] \\
        [--out docs/results/cpu-2026-11/key-center]

The models are untrained conversions by `ridge`. One tap of conv is set by hand, so that the target of a token
is the next one. η times the tap is SIZE. Held-out documents of 2,048 tokens are read as in
`memory_evidence.py`: SmolLM2 behind its window, Gemma in its own attention. The keys are k = A (z - ‖z‖c), or
k = A (z - ac) with the RMS a of ‖z‖ over the tokens of one read. Nothing else differs.

The table has the loss with writes minus the loss without. Under it stand the tokens that the constant harms
most. A model in OUT.json is skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kept_runs
import torch
from memory_models import MODELS, TOKENS, Model
from memory_rules import ROOT, RULES, WORK
from memory_tables import with_error
from torch import Tensor
from torch.nn.functional import linear
from tqdm import tqdm

from inplace_ttt import InPlaceTTTError, load
from inplace_ttt.cli.loading import tokenizer_of
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.files.results import Results
from inplace_ttt.layer.whitened_keys import WhitenedKeys
from inplace_ttt.reports.statistics import Mean
from inplace_ttt.surgery import fast_weights
from inplace_ttt.texts.documents import documents_in, tokens_of

RULE = {"smollm2-135m": "ridge", "gemma-3-270m": "ridge, eta 0.3"}
"""Rule whose conversion is read. Its η does not matter."""
SIZES = {"smollm2-135m": (0.03, 0.1, 0.3), "gemma-3-270m": (0.003, 0.01, 0.03)}
NEXT = 3
"""Index of the tap on the next token, in a kernel of five."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(RULE), choices=RULE)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "cpu-2026-11" / "key-center")
    args = parser.parse_args()
    kept_runs.split_texts()
    results = Results(args.out.parent, "name another --out, or delete it")
    protocol = {"documents": args.documents, "tokens": TOKENS, **kept_runs.digests()}
    held = results.get(args.out.name, protocol=protocol) or {"protocol": protocol, "models": {}}
    for name in args.models:
        if name not in held["models"]:
            held["models"][name] = measure(name, MODELS[name], args.documents)
            results.put(args.out.name, {"command": "python tools/experiments/key_center.py", **held})
    for name, found in held["models"].items():
        print(f"\n{name}\n\n| layers | η times the tap | by length | by a constant |\n|---|---|---|---|")
        for row in found["rows"]:
            cells = (with_error(row[way]["mean"], row[way]["stderr"]) for way in ("length", "constant"))
            print(f"| {row['layers']} | {row['size']:g} | {' | '.join(cells)} |")
        worst, share = found["worst"], found["worst"]["share"]
        print(
            f"\nOf {worst['tokens']} tokens harmed most, layer {worst['layers']} at {worst['size']:g}: "
            f"{share:.0%}, {worst['read']}"
        )
    return 0


@torch.no_grad()
def measure(name: str, model: Model, documents: int) -> dict[str, Any]:
    """Measures every layer alone and all layers, at every size, with keys centered in both ways."""
    rule = RULES[RULE[name]]
    converted = kept_runs.convert(
        model.base, model.work / kept_runs.slug(RULE[name]), "--layers", model.layers, *rule.convert
    )
    lm, tokenizer = load(converted, dtype=torch.bfloat16).eval(), tokenizer_of(str(converted))
    files = documents_in([WORK / "text" / "held-out"])[:documents]
    rows = [tokens_of(file, tokenizer, TOKENS) for file in files]
    layers = fast_weights(lm)
    piece = next(iter(layers.values())).chunk_size
    sets = [*([index] for index in layers), list(layers)]
    ways = {"length": WhitenedKeys.forward, "constant": centered_by_a_constant}

    def read(ids: Tensor) -> Tensor:
        return token_losses(lm, ids, piece=piece, window=model.window)[0, model.past :].double()

    off = [read(ids) for ids in tqdm(rows, desc=f"{name} without writes", file=sys.stderr)]
    found, harms = [], {}
    for these in tqdm(sets, desc=name, file=sys.stderr):
        for size in SIZES[name]:
            row: dict[str, Any] = {"layers": ", ".join(map(str, these)), "size": size}
            for index in these:
                layers[index].ttt.conv[:, 0, NEXT] = size / layers[index].eta
            for way, forward in ways.items():
                with patch.object(WhitenedKeys, "forward", forward):
                    changes = [read(ids) - without for ids, without in zip(rows, off, strict=True)]
                row[way] = vars(Mean.of([float(change.mean()) for change in changes], alone=0.0))
            harms[row["layers"], size] = torch.cat(changes)
            found.append(row)
            for index in these:
                layers[index].ttt.conv.zero_()
    worst = max(found[: -len(SIZES[name])], key=lambda row: row["constant"]["mean"] - row["length"]["mean"])
    read_there = torch.cat([ids[0, model.past : -1] for ids in rows])
    return {
        "rows": found,
        "worst": of_few(harms[worst["layers"], worst["size"]], read_there, tokenizer)
        | {k: worst[k] for k in ("layers", "size")},
    }


def centered_by_a_constant(keys: WhitenedKeys, z: Tensor) -> Tensor:
    size = z.float().square().sum(-1).mean().sqrt().to(z.dtype)
    return linear(z - size * keys.center.to(z.dtype), keys.directions.to(z.dtype))


def of_few(change: Tensor, read: Tensor, tokenizer: Any) -> dict[str, Any]:
    """Returns the share of all harm on the hundredth of tokens that are harmed most, and these tokens.

    Args:
        change: change of the loss of each token.
        read: the tokens at which the losses were read.
        tokenizer: decodes them.
    """
    most = change.argsort(descending=True)[: len(change) // 100]
    words = Counter(tokenizer.decode([token]) for token in read[most].tolist())
    return {
        "tokens": len(most),
        "share": float(change[most].sum() / change.clamp(min=0).sum()),
        "read": dict(words.most_common(5)),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"key_center: {error}")
