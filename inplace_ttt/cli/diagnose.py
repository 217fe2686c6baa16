"""Runs `inplace-ttt diagnose PATH --text TEXT --out DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..diagnostics.diagnosis import diagnose
from ..diagnostics.report import PAGE, summary, write_into
from ..errors import InPlaceTTTError
from ..files.folders import new_folder
from ..files.manifest import DIAGNOSIS, refuse_to_replace
from ..layer.quantized import readable_parameters
from ..surgery import config_of, fast_weights
from ..texts.documents import documents_in, joined_tokens
from . import Result
from .loading import load_with_tokenizer
from .messages import say_now
from .options.diagnose import TOKENS


def run(args: argparse.Namespace) -> Result:
    sources = [args.path, args.text, args.base]
    refuse_to_replace(args.out, DIAGNOSIS, args.overwrite, sources)
    documents = documents_in([args.text], "--text", args.text_field)
    model, tokenizer = load_with_tokenizer(args.path, args.base, args.dtype)
    chunk = config_of(model).chunk_size
    ids = joined_tokens(documents, tokenizer, args.tokens or max(TOKENS, 2 * chunk))
    if ids.shape[1] <= chunk + 1:
        asked = (
            f" (--tokens {args.tokens})" if args.tokens is not None and ids.shape[1] == args.tokens else ""
        )
        raise InPlaceTTTError(
            f"{args.text} has {ids.shape[1]} tokens{asked}, so with chunks of {chunk} no prediction reads a "
            f"write; give a text of more than {chunk + 1} tokens, better several chunks."
        )
    _choose_trained(model, args.train)
    say_now()
    with (
        new_folder(args.out, DIAGNOSIS, overwrite=args.overwrite, sources=sources) as folder,
        tqdm(total=1, desc="diagnose", unit="pass", file=sys.stderr, disable=None) as bar,
    ):

        def progress(done: int, total: int, title: str) -> None:
            bar.total, bar.n = total, done
            bar.set_postfix_str(title, refresh=True)

        diagnosis = diagnose(
            model,
            {"input_ids": ids},
            learning_rates=args.learning_rate,
            name=args.path,
            tokenizer=tokenizer,
            progress=progress,
        )
        write_into(folder, diagnosis)
    return {**diagnosis.to_dict(), "summary": summary(diagnosis), "output": args.out}, 0


def render(result: dict[str, Any]) -> str:
    found = [
        f"{finding['severity']:8} {finding['id']}: {finding['message']}" for finding in result["findings"]
    ]
    return "\n".join([result["summary"], *found, f"wrote {Path(result['output']) / PAGE}"])


def _choose_trained(model: Any, trained: str) -> None:
    for _, parameter in readable_parameters(model):
        parameter.requires_grad_(trained == "all")
    for layer in fast_weights(model).values():
        layer.ttt.requires_grad_(True)
