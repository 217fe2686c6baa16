"""Measures an exported session by rank: seconds, bytes, the kept gain, and greedy agreement.

    python tools/experiments/export_evidence.py [--model .cache/smollm2-135m] \\
        [--ranks 16 64 128 256 576] [--out docs/results/cpu-2026-11/export]

A session of the preset `gradient` reads the first 9,000 bytes of Hamlet. It is exported as LoRA adapters and
as a plain checkpoint. PEFT and transformers load the exports.

The session without its KV cache continues eight prompts of 64 tokens from the text it has read, by 100
greedy tokens each. "agreement" is the share of these tokens that the export ranks first after the same
prefix. "equal" is the mean number of tokens before the export's own greedy text differs. All is in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from memory_rules import ROOT
from peft import AutoPeftModelForCausalLM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, Session, calibrate, convert
from inplace_ttt.evaluation.exported import Kept, mean_loss, rows_of
from inplace_ttt.files.results import Results
from inplace_ttt.session.plain_model import plain_copy

PLAY = ROOT / ".cache" / "text" / "shakespeare" / "hamlet.txt"
BYTES, PROMPTS, PROMPT, NEW = 9000, 8, 64, 100
CONFIG = {"layers": [12, 18, 24], "eta": 0.02}
COLUMNS = ("loss", "share", "agreement", "equal", "seconds", "megabytes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2-135m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128, 256, 576], metavar="K")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "cpu-2026-11" / "export")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    convert(model, InPlaceTTTConfig.preset("gradient", **CONFIG))
    text = PLAY.read_bytes().decode("utf-8")
    told, after = text[:BYTES], torch.tensor([tokenizer(text[BYTES : 3 * BYTES]).input_ids])
    calibrate(model, [after[:, :4096]])
    session, ids = Session(model), torch.tensor([tokenizer(told).input_ids])
    session.read(ids, progress=True)
    prompts = [ids[:, start : start + PROMPT] for start in range(0, PROMPTS * 256, 256)]
    continued = [
        session.drop_kv_cache().generate(prompt, max_new_tokens=NEW, eos_token_id=-1, do_sample=False)
        for prompt in prompts
    ]
    changes, rows = session.weight_changes(), rows_of(ids[0])
    plain = plain_copy(model)
    without = mean_loss(plain, rows, {})
    held = mean_loss(plain, rows, {index: change.read for index, change in changes.items()})
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in [*(f"rank {rank}" for rank in args.ranks), "plain"]:
            folder, began = Path(work) / name, time.perf_counter()
            if name == "plain":
                session.bake().save_pretrained(folder)
                seconds = time.perf_counter() - began
                exported: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            else:
                session.to_lora(folder, rank=int(name.split()[1]), base=str(args.model))
                seconds = time.perf_counter() - began
                exported = AutoPeftModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32
                ).merge_and_unload()
            kept = Kept(rows.numel(), without, held, mean_loss(exported.eval(), rows, {}))
            table[name] = {
                "loss": kept.exported,
                "share": kept.share or 0.0,
                **greedy(exported, prompts, continued),
                "seconds": seconds,
                "megabytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6,
            }
            print(name, table[name], file=sys.stderr, flush=True)
        file = Path(work) / "session.state"
        session.drop_kv_cache().save(file)
        megabytes = file.stat().st_size / 1e6
    result = {
        "command": "python tools/experiments/export_evidence.py",
        "protocol": {"model": args.model.name, "bytes": BYTES, **CONFIG, "prompts": PROMPTS, "new": NEW},
        "tokens": ids.shape[1],
        "loss": {"without": without, "session": held},
        "base": greedy(plain, prompts, continued),
        "session_megabytes": megabytes,
        "rows": table,
    }
    Results(args.out.parent, "name another --out").put(args.out.name, result)
    print(f"loss {without:.4f} without the session, {held:.4f} with it; its file has {megabytes:.1f} MB")
    print(f"| export | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name, row in {**table, "the base": result["base"]}.items():
        print(f"| {name} | {' | '.join(f'{row[c]:.4g}' if c in row else '' for c in COLUMNS)} |")
    return 0


@torch.no_grad()
def greedy(model: Any, prompts: list[Tensor], continued: list[Tensor]) -> dict[str, float]:
    """Compares a model's greedy tokens with the session's.

    Args:
        model: a plain model.
        prompts: token ids [1, n] each.
        continued: the session's greedy continuations [1, m].
    """
    agreement, equal = [], []
    for prompt, wanted in zip(prompts, continued, strict=True):
        logits = model(torch.cat([prompt, wanted], 1)).logits[:, prompt.shape[1] - 1 : -1]
        same = (logits.argmax(-1) == wanted)[0]
        agreement.append(float(same.double().mean()))
        equal.append(int(same.int().cumprod(0).sum()))
    return {"agreement": fmean(agreement), "equal": fmean(equal)}


if __name__ == "__main__":
    sys.exit(main())
