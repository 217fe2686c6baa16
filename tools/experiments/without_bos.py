"""Measures a model with a BOS on texts without one, and writes that were trained on such rows.

    python tools/experiments/without_bos.py RUN/final [RUN/final …] [--documents 4] \\
        [--out docs/results/cpu-2026-11/without-bos]

The tool reads 2,048 tokens of each held-out document, from token 2,500 on, as a training row holds them, in
the model's own attention. It reads them with and without a BOS in front, and with and without the writes of
each checkpoint. The table has the losses of the first 512 tokens and of the others, in nats per token. A
checkpoint in OUT.json is skipped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import kept_runs
import torch
from memory_models import TOKENS
from memory_rules import ROOT, WORK
from memory_tables import with_error
from torch import Tensor
from tqdm import tqdm

from inplace_ttt import InPlaceTTTError, disable_ttt, load
from inplace_ttt.cli.loading import tokenizer_of
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.files.results import Results
from inplace_ttt.files.text import begins_of
from inplace_ttt.reports.statistics import Mean
from inplace_ttt.surgery import config_of
from inplace_ttt.texts.documents import documents_in, tokens_of

FROM, PAST = 2500, 512
WAYS = ("with BOS", "without")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "cpu-2026-11" / "without-bos")
    args = parser.parse_args()
    kept_runs.split_texts()
    results = Results(args.out.parent, "name another --out, or delete it")
    protocol = {
        "documents": args.documents,
        "from_token": FROM,
        "tokens": TOKENS,
        "held_out_sha256": kept_runs.digests()["held_out_sha256"],
    }
    held = results.get(args.out.name, protocol=protocol) or {"protocol": protocol, "checkpoints": {}}
    for checkpoint in args.checkpoints:
        name = str(checkpoint.resolve().relative_to(ROOT))
        if name not in held["checkpoints"]:
            held["checkpoints"][name] = measure(checkpoint, args.documents)
            results.put(args.out.name, {"command": f"python tools/experiments/without_bos.py {name}", **held})
    print(
        f"| checkpoint | | off, first {PAST} | off, after | on - off, first {PAST} | on - off, after "
        f"|\n{'|---' * 6}|"
    )
    for name, found in held["checkpoints"].items():
        for way in WAYS:
            off = (f"{fmean(found[way][f'off {part}']):.2f}" for part in ("first", "after"))
            changes = (Mean.of(found[way][f"on - off {part}"], alone=0.0) for part in ("first", "after"))
            print(
                f"| {name} | {way} | "
                f"{' | '.join((*off, *(with_error(mean.mean, mean.stderr) for mean in changes)))} |"
            )
    return 0


@torch.no_grad()
def measure(checkpoint: Path, documents: int) -> dict[str, Any]:
    """Returns the losses of each document, by the beginning of the row."""
    lm, tokenizer = load(checkpoint, dtype=torch.bfloat16).eval(), tokenizer_of(str(checkpoint))
    begins = torch.tensor([begins_of(tokenizer)], dtype=torch.int64)
    texts = (tokens_of(file, tokenizer, FROM + TOKENS) for file in documents_in([WORK / "text" / "held-out"]))
    rows = [ids[:, FROM:] for ids in texts if ids.shape[1] == FROM + TOKENS][:documents]
    found = {
        way: {f"{what} {part}": [] for what in ("off", "on - off") for part in ("first", "after")}
        for way in WAYS
    }

    def read(ids: Tensor) -> Tensor:
        return token_losses(lm, ids, piece=config_of(lm).chunk_size)[0].double()

    for row in tqdm(rows, desc=str(checkpoint), file=sys.stderr):
        for way in WAYS:
            ids = row if way == "without" else torch.cat([begins, row[:, : TOKENS - begins.shape[1]]], dim=1)
            on = read(ids)
            with disable_ttt(lm):
                off = read(ids)
            for part, where in {"first": slice(PAST), "after": slice(PAST, None)}.items():
                found[way][f"off {part}"].append(float(off[where].mean()))
                found[way][f"on - off {part}"].append(float((on - off)[where].mean()))
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"without_bos: {error}")
