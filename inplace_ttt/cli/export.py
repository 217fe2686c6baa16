"""`inplace-ttt export PATH OUT --format F`"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..checkpoint.adapter import is_adapter, located, read_adapter, write_adapter
from ..checkpoint.card import write_card
from ..checkpoint.official import write_official
from ..checkpoint.reading import Checkpoint, is_peft_adapter
from ..checkpoint.saved_tensors import require_sound
from ..checkpoint.to_adapter import base_of
from ..checkpoint.writing import describe_base, empty_model, plan_conversion, write_full
from ..errors import InPlaceTTTError
from ..files.folders import new_folder
from ..files.manifest import CHECKPOINT, refuse_to_replace
from . import Result
from .hub import push, pushed, require_token
from .loading import load_with_tokenizer, refuse_base_of_none


def run(args: argparse.Namespace) -> Result:
    refuse_base_of_none(args.path, args.base)
    require_token(args)
    refuse_to_replace(args.out, CHECKPOINT, args.overwrite, [args.path, args.base])
    write = _merged if args.format == "full" and is_peft_adapter(args.path) else _WRITERS[args.format]
    write(args)
    return {"output": str(args.out), "format": args.format, "pushed": push(Path(args.out), args.push)}, 0


def _output(args: argparse.Namespace) -> AbstractContextManager[Path]:
    """The folder to write, apart from the checkpoint that is exported and from its base."""
    return new_folder(args.out, CHECKPOINT, overwrite=args.overwrite, sources=[args.path, args.base])


def render(result: dict[str, Any]) -> str:
    return "\n".join([f"wrote {result['output']} ({result['format']})", *pushed(result)])


def _official(args: argparse.Namespace) -> None:
    if is_adapter(args.path):
        raise InPlaceTTTError(f"{args.path} is an adapter, the official format holds all weights; export it as full first.")
    checkpoint = Checkpoint.open(args.path)
    checkpoint.ttt_config  # noqa: B018 - refuses what is not converted
    require_sound(checkpoint, empty_model(checkpoint)[1])
    with _output(args) as folder:
        write_official(folder, checkpoint)
        assert checkpoint.section is not None
        write_card(folder, checkpoint.folder, checkpoint.ttt_config, checkpoint.section.get("base") or {}, "official")


def _adapter(args: argparse.Namespace) -> None:
    if is_adapter(args.path):
        raise InPlaceTTTError(f"{args.path} is an adapter already.")
    checkpoint = Checkpoint.open(args.path)
    base = base_of(checkpoint)
    tensors = checkpoint.ttt_tensors()
    with _output(args) as folder:
        write_adapter(folder, checkpoint.ttt_config, tensors, base)
        write_card(folder, checkpoint.folder, checkpoint.ttt_config, base, "adapter")


def _full(args: argparse.Namespace) -> None:
    if not is_adapter(args.path):
        raise InPlaceTTTError(f"{args.path} is a full checkpoint already.")
    config, known, tensors = read_adapter(args.path)
    checkpoint = Checkpoint.open(args.base or located(args.path, known["name_or_path"]))
    plan = plan_conversion(checkpoint, config)
    base = describe_base(checkpoint, plan) if args.base else known  # where it is now
    if checkpoint.fingerprint(plan.down_proj.values()) != known["fingerprint"]:
        raise InPlaceTTTError(f"{checkpoint.name} has other weights than the base that {args.path} was made for; take that base.")
    require_sound(checkpoint, empty_model(checkpoint)[1])
    with _output(args) as folder:
        write_full(folder, checkpoint, plan, tensors, base)
        write_card(folder, Path(args.path), config, base, "full")


def _merged(args: argparse.Namespace) -> None:
    """A PEFT adapter and its base as one."""
    model, tokenizer = load_with_tokenizer(args.path, args.base, "auto")
    with _output(args) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.section is not None
        write_card(folder, Path(args.path), checkpoint.ttt_config, checkpoint.section.get("base") or {}, "full")


_WRITERS = {"official": _official, "adapter": _adapter, "full": _full}
