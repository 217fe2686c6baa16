"""Times prefill and training step of a converted model against its base.

    python tools/bench/bench_converted.py --shape Qwen3-4B --tokens 32768

The weights are random, in the shapes of real models.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.config import PRESETS, KeyWhitening
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import config_of, fast_weights

VOCABULARY = 8192
"""Size of the vocabulary. It is small, so that the logits of a long sequence do not outweigh the layers."""

SHAPES: dict[str, Callable[[int], PretrainedConfig]] = {
    "SmolLM2-135M": lambda tokens: LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=VOCABULARY, max_position_embeddings=tokens, tie_word_embeddings=True,
    ),
    "Qwen3-4B": lambda tokens: Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=VOCABULARY, max_position_embeddings=tokens, tie_word_embeddings=True,
    ),
    "tiny": lambda tokens: LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=tokens, tie_word_embeddings=True,
    ),
}  # fmt: skip


@torch.no_grad()
def _prefill(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.eval()(ids, use_cache=False, logits_to_keep=1)


@torch.no_grad()
def _prefill_into_cache(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.eval()(ids, **{CACHE: DynamicCache(config=model.config)}, logits_to_keep=1)


def _training_step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Forward and backward, without an optimizer."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


@torch.no_grad()
def _decode(model: PreTrainedModel, ids: torch.Tensor, tokens: int = 32) -> None:
    """Reads a short prefill, then decodes tokens one at a time."""
    cache = DynamicCache(config=model.config)
    model.eval()(ids[:, :tokens], **{CACHE: cache}, logits_to_keep=1)
    for token in ids[:, tokens : 2 * tokens].split(1, dim=1):
        model(token, **{CACHE: cache}, logits_to_keep=1)


STEPS: dict[str, Callable[[PreTrainedModel, torch.Tensor], None]] = {
    "prefill": _prefill, "prefill into a cache": _prefill_into_cache, "decode": _decode, "training step": _training_step,
}  # fmt: skip

MODES = ("default", "reduce-overhead")
"""Modes of torch.compile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-4B")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument(
        "--rank",
        type=json.loads,
        help="directions of whitened keys, as a number or a share of d (default: the preset's)",
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        choices=STEPS,
        default=list(STEPS),
        metavar="S",
        help=f"steps to time: {', '.join(STEPS)} (default: all)",
    )
    parser.add_argument(
        "--vocabulary", type=int, default=VOCABULARY, help="size of the vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--compiled",
        choices=MODES,
        help="compile both models in this mode of torch.compile; reduce-overhead uses CUDA graphs",
    )
    args = parser.parse_args()
    print(json.dumps(measure(**vars(args)), indent=2))


def measure(
    shape: str,
    tokens: int,
    chunk_size: int,
    repeats: int,
    device: str,
    dtype: str,
    preset: str = "paper",
    rank: int | float | None = None,
    steps: Sequence[str] = tuple(STEPS),
    compiled: str | None = None,
    vocabulary: int = VOCABULARY,
) -> dict[str, Any]:
    """Returns times of the converted model over those of its base, as median and range of pairs in one run.

    The result also has a profile of the converted model's training step.
    """
    torch.manual_seed(0)
    config = SHAPES[shape](tokens)
    config.vocab_size = vocabulary
    settings: dict[str, Any] = (
        {} if PRESETS[preset].target == "gradient" else {"layers": "every:6", "eta": 1e-3}
    )
    settings |= {} if rank is None else {"whitening": KeyWhitening(rank=rank)}
    base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(device)
    model = convert(copy.deepcopy(base), InPlaceTTTConfig.preset(preset, chunk_size=chunk_size, **settings))
    ids = torch.randint(3, vocabulary, (1, tokens), device=device)
    if config_of(model).needs_calibration:
        calibrate(model, [ids[:, :2048]])
    for layer in fast_weights(model).values():  # as if trained: conv and P write
        for parameter, std in ((layer.ttt.conv, 0.1), (layer.ttt.proj, 0.02)):
            if parameter is not None:
                parameter.data.normal_(std=std)
    if compiled is not None:
        # torch keeps eight graphs per function, so after eight models the next one would run uncompiled
        torch._dynamo.reset()
        for either in (base, model):
            either.compile(mode=compiled)
    rows = {}
    for name in steps:
        try:
            rows[name] = paired(
                partial(STEPS[name], model, ids), partial(STEPS[name], base, ids), repeats, device
            )
        except torch.OutOfMemoryError:
            rows[name] = {"out_of_memory": True}
        base.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
        gc.collect()
    profile = _profile(model, ids) if "seconds" in rows.get("training step", {}) else []
    return {
        "shape": shape, "tokens": tokens, "vocabulary": vocabulary, "chunk_size": chunk_size, "preset": preset, "rank": rank,
        "compiled": compiled,
        "layers": config.num_hidden_layers, "fast_weights": len(fast_weights(model)), "dtype": dtype, "ratio_to_base": rows,
        "profile_of_a_training_step": profile,
    }  # fmt: skip


def paired(
    with_ttt: Callable[[], object], base: Callable[[], object], repeats: int, device: str
) -> dict[str, float]:
    """Returns times with TTT over those of the base. The two run in turn.

    On a CPU these are the process's processor time, so other work hardly counts.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter

    def seconds(run: Callable[[], object]) -> float:
        _synchronize(device)
        start = clock()
        run()
        _synchronize(device)
        return clock() - start

    for run in (with_ttt, base):  # compile, tune and warm up
        run()
        run()
    # an idle GPU takes this long to reach its clock
    end = time.monotonic() + (0.1 if device.startswith("cuda") else 0)
    while time.monotonic() < end:
        seconds(base)
    pairs = [(seconds(with_ttt), seconds(base)) for _ in range(repeats)]
    ratios = sorted(mine / theirs for mine, theirs in pairs)
    median = statistics.median
    return {
        "median": median(ratios), "min": ratios[0], "max": ratios[-1], "seconds": median(mine for mine, _ in pairs),
        "base_seconds": median(theirs for _, theirs in pairs),
    }  # fmt: skip


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _profile(model: PreTrainedModel, ids: torch.Tensor, longest: int = 25) -> list[dict[str, Any]]:
    """Returns the kernels (on a CPU, the operators) that take the most time of a training step, in
    milliseconds."""
    kind = torch.profiler.ProfilerActivity.CUDA if ids.is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        _training_step(model, ids)
        _synchronize(ids.device.type)
    taken = [
        (getattr(row, f"self_{'device' if ids.is_cuda else 'cpu'}_time_total") / 1e3, row)
        for row in profiler.key_averages()
    ]
    taken.sort(key=lambda pair: -pair[0])
    return [
        {"name": row.key[:100], "calls": row.count, "milliseconds": round(time, 3)}
        for time, row in taken[:longest]
    ]


if __name__ == "__main__":
    main()
