"""Times decoding and prefill of a converted model against its base, interleaved in one run.

python tools/bench/bench_model.py --model .cache/smollm2-135m
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable

import torch
from bench_converted import paired
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, convert
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import fast_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--read",
        type=int,
        default=2000,
        help="tokens in the cache when decoding begins; each repeat adds 50 (default: 2000)",
    )
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    model = convert(copy.deepcopy(base), InPlaceTTTConfig(chunk_size=args.chunk_size, eta=1e-3))
    for layer in fast_weights(model).values():
        # as if trained; a fresh conversion writes nothing
        torch.nn.init.normal_(layer.ttt.conv, std=1e-3)
    ids = torch.randint(
        3,
        base.config.vocab_size,
        (1, max(args.read, args.prefill)),
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        rows = {
            "decode": paired(*(_decoder(m, ids[:, : args.read]) for m in (model, base)), args.repeats, "cpu"),
            "prefill": paired(
                *(_prefiller(m, ids[:, : args.prefill]) for m in (model, base)), args.repeats, "cpu"
            ),
        }
    print(
        json.dumps(
            {
                **vars(args),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "ratio_to_base": rows,
            },
            indent=2,
        )
    )


def _decoder(model: PreTrainedModel, ids: torch.Tensor, steps: int = 50) -> Callable[[], None]:
    """Reads `ids`, then decodes `steps` tokens one by one."""
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache}, logits_to_keep=1)

    def decode() -> None:
        token = ids[:, :1]
        for _ in range(steps):
            token = model(token, **{CACHE: cache}).logits.argmax(-1)

    return decode


def _prefiller(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], object]:
    return lambda: model(ids, **{CACHE: DynamicCache(config=model.config)}, logits_to_keep=1)


if __name__ == "__main__":
    main()
