"""Reads 100,000 tokens in one session behind a window, and measures the memory of the process.

    python tools/endurance/long_session.py runs/memory/ridge-0/final \\
        --out docs/results/cpu-2026-11/long-session.json

The files of --text are read one after the other as one text. The cache keeps a window and its sinks. A row is
printed after every 10,000 tokens: the largest resident memory since the last row, bytes of state and cache,
and tokens per second. The state is compared with that of the paper's rule, which has the size of the weight.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import inplace_ttt
from inplace_ttt import Session
from inplace_ttt.attention_window import attention_window, window_cache
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.families import features
from inplace_ttt.files.results import Results
from inplace_ttt.ops.benchmark import memory_status, peak_starts_again
from inplace_ttt.surgery import config_of, fast_weights

TEXT = Path(__file__).resolve().parents[2] / ".cache" / "text"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="converted folder")
    parser.add_argument(
        "--text",
        type=Path,
        default=TEXT,
        metavar="DIR",
        help="folder of .txt files (default: the texts of `make text`)",
    )
    parser.add_argument("--tokens", type=int, default=100_000, metavar="N")
    parser.add_argument(
        "--every", type=int, default=10_000, metavar="N", help="tokens between two rows of the table"
    )
    parser.add_argument("--window", type=int, default=256, metavar="N")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    results = Results(args.out and args.out.parent)
    model = inplace_ttt.load(args.model).eval()
    ids = token_ids(args.model, args.text, args.tokens)
    result = {
        "model": config_of(model).to_dict(),
        "tokens": args.tokens,
        "window": args.window,
        "dtype": str(model.dtype),
        **sizes(model),
    }
    result["rows"] = read(model, ids, args.window, args.every)
    render(result)
    if args.out is not None:
        results.put(args.out.stem, result)
    return 0


def token_ids(model: str, folder: Path, tokens: int) -> torch.Tensor:
    """Returns the token ids [1, tokens] of the files, in the order of their names."""
    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    for file in sorted(folder.rglob("*.txt")):
        found += tokenizer(file.read_text()).input_ids
        if len(found) >= tokens:
            return torch.tensor([found[:tokens]])
    raise InPlaceTTTError(
        f"{folder} has {len(found):,} tokens of text, {tokens:,} are to be read; give a longer --text or "
        "fewer --tokens."
    )


def sizes(model: Any) -> dict[str, int]:
    """Returns the bytes of one float32 state, and of one with the sizes of the weights."""
    config, maps = config_of(model), [features(layer)[::-1] for layer in fast_weights(model).values()]
    return {
        "state_bytes": config.state_bytes(maps),
        "paper_state_bytes": 4 * sum(d * h for d, h in maps),
    }


def read(model: Any, ids: torch.Tensor, window: int, every: int) -> list[dict[str, Any]]:
    rows = []
    with attention_window(model, window):
        session = Session(model, window_cache(model, window))
        for piece in ids.split(every, 1):
            peak_starts_again()
            began = time.perf_counter()
            session.read(piece)
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "read": session.tokens.shape[1],
                    "peak_resident_bytes": memory_status("VmHWM"),
                    "state_bytes": session.state_bytes,
                    "cache_bytes": sum(
                        layer.keys.nbytes + layer.values.nbytes for layer in session.cache.layers
                    ),
                    "tokens_per_second": piece.shape[1] / seconds,
                }
            )
            print(f"{rows[-1]['read']:,} tokens", file=sys.stderr, flush=True)
    return rows


def render(result: dict[str, Any]) -> None:
    share = result["state_bytes"] / result["paper_state_bytes"]
    print(f"state {result['state_bytes'] / 1e6:.1f} MB, {share:.2f} of the paper's rule's state\n")
    print(
        "| tokens read | largest resident memory, MB | state, MB | keys and values, MB | tokens per second "
        "|\n|---|---|---|---|---|"
    )
    for row in result["rows"]:
        sizes = (row[name] / 1e6 for name in ("peak_resident_bytes", "state_bytes", "cache_bytes"))
        print(
            f"| {row['read']:,} | {' | '.join(f'{size:.1f}' for size in sizes)} | "
            f"{row['tokens_per_second']:.0f} |"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"long_session: {error}")
