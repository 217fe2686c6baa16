"""Runs `inplace-ttt generate PATH --prompt-file PATH`."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ..errors import InPlaceTTTError, reported
from ..files.text import document_ids, ids_within, read_text
from ..session import file as session_file
from ..session.session import Session
from ..surgery import config_of, disable_ttt
from . import Result
from .loading import load_with_tokenizer, note_on_positions, refuse_not_finite
from .messages import warn


def run(args: argparse.Namespace) -> Result:
    if args.save_state:
        session_file.refuse_to_replace(args.save_state)
    prompt = read_text(args.prompt_file, "the prompt ")
    model, tokenizer = load_with_tokenizer(args.path, args.base, args.dtype)
    refuse_not_finite(model, args.path)
    state = Session.load(args.load_state, model) if args.load_state else Session(model)
    before, written_before = (0 if state.tokens is None else state.tokens.shape[1]), state.chunks_written
    read = ids_within(tokenizer, prompt) if before else document_ids(tokenizer, prompt, args.prompt_file)
    ids = torch.tensor([read], dtype=torch.int64, device=model.device)
    if ids.numel() == 0 and not before:
        raise InPlaceTTTError(f"{args.prompt_file} holds no text; give something to read.")
    total = before + ids.shape[1]
    if note := note_on_positions(
        model, total + args.max_new_tokens, "give a shorter text, or lower --max-new-tokens"
    ):
        warn(note)
    new = ids[:, :0]
    waits = config_of(model).prompt_write is not None and not written_before and total > 2
    if args.readings > 1:
        if config_of(model).prompt_write is not None:
            raise InPlaceTTTError(
                "this model writes once, at the end of its prompt, so --readings does nothing; leave it out."
            )
        state.read(ids, readings=args.readings - 1, progress=True)
        state = state.drop_kv_cache()
    with nullcontext() if args.ttt == "on" else disable_ttt(model):
        if args.max_new_tokens:
            set_seed(args.seed or 0)
            sampling = (
                {"do_sample": True, "temperature": args.temperature}
                if args.temperature
                else {"do_sample": False}
            )
            with reported(
                f"cannot generate with the settings of {args.path}/generation_config.json",
                "correct it or delete it",
            ):
                new = state.generate(ids, progress=True, max_new_tokens=args.max_new_tokens, **sampling)
        else:
            state.write_prompt(ids, progress=True) if waits else state.read(ids, progress=True)
    result = {
        "text": tokenizer.decode(new[0], skip_special_tokens=True),
        "tokens_read": total - before,
        "tokens_generated": new.shape[1],
        "chunks_written": state.chunks_written - written_before,
        "prompt_written": waits and state.chunks_written > 0,
        "state_bytes": state.state_bytes,
    }
    if args.save_state:
        kept = state.drop_kv_cache() if args.fast_weights_only else state
        kept.save(args.save_state)
        result["saved_state"] = {"path": args.save_state, "bytes": Path(args.save_state).stat().st_size}
    return result, 0


def render(result: dict[str, Any]) -> str:
    wrote = "the prompt" if result["prompt_written"] else f"{result['chunks_written']} chunks"
    print(
        f"read {result['tokens_read']:,} tokens, wrote {wrote} into the fast weights "
        f"({result['state_bytes'] / 2**20:.1f} MiB)",
        file=sys.stderr,
    )
    return result["text"]
