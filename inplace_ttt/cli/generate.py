"""`inplace-ttt generate PATH --prompt-file F`"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, set_seed

from ..errors import InPlaceTTTError, one_line
from ..state import FastWeightState
from ..surgery import ttt_disabled
from . import Result
from .loading import load_with_tokenizer

EXAMPLES = """examples:
  inplace-ttt generate ./smollm2-ttt --prompt-file book.txt --max-new-tokens 100
  inplace-ttt generate ./smollm2-ttt --prompt-file book.txt --max-new-tokens 0 --save-state book.state
  echo "What happened to the whale?" | inplace-ttt generate ./smollm2-ttt --prompt-file - --load-state book.state"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="converted checkpoint or adapter folder")
    parser.add_argument("--prompt-file", required=True, metavar="F", help="UTF-8 text to read; - is standard input")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to write (default: 64; 0 only reads)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed for a temperature above 0 (default: 0)")
    parser.add_argument("--ttt", choices=("on", "off"), default="on", help="off: the same weights, nothing written (default: on)")
    parser.add_argument("--load-state", metavar="F", help="go on from a saved session")
    parser.add_argument("--save-state", metavar="F", help="save the session at the end")
    parser.add_argument("--fast-weights-only", action="store_true", help="save no KV cache: keep only what was written")
    parser.add_argument("--base", metavar="B", help="where an adapter's base is, if not where it was")
    parser.add_argument("--dtype", default="auto", metavar="D", help="float32, bfloat16, … (default: the checkpoint's)")


def run(args: argparse.Namespace) -> Result:
    _refuse_contradictions(args)
    prompt = _read(args.prompt_file)
    model, tokenizer = load_with_tokenizer(args.path, args.base, args.dtype)
    state = FastWeightState.load(args.load_state, model) if args.load_state else FastWeightState(model)
    before, written_before = (0 if state.tokens is None else state.tokens.shape[1]), state.chunks_written
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not before).input_ids.to(model.device)
    if ids.numel() == 0 and not before:
        raise InPlaceTTTError(f"{args.prompt_file} holds no text; give something to read.")
    total = before + ids.shape[1]
    _warn_beyond_context(model, total + args.max_new_tokens)
    new = ids[:, :0]
    with nullcontext() if args.ttt == "on" else ttt_disabled(model):
        if args.max_new_tokens:
            set_seed(args.seed)
            sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
            new = state.generate(ids, progress=True, max_new_tokens=args.max_new_tokens, **sampling)
        else:
            state.read(ids, progress=True)
    result = {
        "text": tokenizer.decode(new[0], skip_special_tokens=True),
        "tokens_read": total - before,
        "tokens_generated": new.shape[1],
        "chunks_written": state.chunks_written - written_before,
        "state_bytes": state.state_bytes,
    }
    if args.save_state:
        kept = state.forget_attention() if args.fast_weights_only else state
        kept.save(args.save_state)
        result["saved_state"] = {"path": args.save_state, "bytes": Path(args.save_state).stat().st_size}
    return result, 0


def render(result: dict[str, Any]) -> str:
    print(
        f"read {result['tokens_read']:,} tokens, wrote {result['chunks_written']} chunks into the fast weights "
        f"({result['state_bytes'] / 2**20:.1f} MiB)",
        file=sys.stderr,
    )
    return result["text"]


def _refuse_contradictions(args: argparse.Namespace) -> None:
    if args.max_new_tokens < 0:
        raise InPlaceTTTError(f"--max-new-tokens must be 0 or more, got {args.max_new_tokens}.")
    if args.temperature < 0:
        raise InPlaceTTTError(f"--temperature must be 0 or more, got {args.temperature}.")
    if args.max_new_tokens == 0 and not args.save_state:
        raise InPlaceTTTError("--max-new-tokens 0 only reads, which is lost without --save-state; add --save-state F.")
    if args.ttt == "off" and (args.save_state or args.load_state):
        raise InPlaceTTTError("--ttt off writes no state, so that --save-state and --load-state mean nothing; drop one.")
    if args.fast_weights_only and not args.save_state:
        raise InPlaceTTTError("--fast-weights-only says what --save-state saves; add --save-state F.")


def _read(prompt_file: str) -> str:
    try:
        return sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InPlaceTTTError(f"cannot read the prompt {prompt_file}: {one_line(error)}; give a UTF-8 text file.") from None


def _warn_beyond_context(model: PreTrainedModel, tokens: int) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and tokens > context:
        print(f"warning: {tokens} tokens exceed the {context} positions the model was trained on.", file=sys.stderr)
