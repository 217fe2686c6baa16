"""Runs `inplace-ttt export PATH OUT --format FORMAT`."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..checkpoint.adapter import write_adapter
from ..checkpoint.card import write_card
from ..checkpoint.opened import Adapter, Full, Lora, Opened, open_model
from ..checkpoint.reference_format import write_reference_format
from ..checkpoint.saved_tensors import require_sound
from ..checkpoint.to_adapter import base_of
from ..checkpoint.writing import describe_base, empty_model, write_full
from ..errors import InPlaceTTTError
from ..files.folders import new_folder
from ..files.manifest import CHECKPOINT, refuse_to_replace
from . import Result
from .export_session import export_session
from .export_session import render as render_session
from .hub import push, pushed, require_token
from .loading import load_with_tokenizer


def run(args: argparse.Namespace) -> Result:
    of_session = args.format in ("plain", "lora")
    if of_session and args.session is None:
        raise InPlaceTTTError(f"--format {args.format} needs a session; name it with --session.")
    for option, formats in (("session", ("plain", "lora")), ("text", ("plain", "lora")), ("rank", ("lora",))):
        if getattr(args, option) is not None and args.format not in formats:
            raise InPlaceTTTError(
                f"--{option} does nothing with --format {args.format}; leave it out, or choose "
                f"--format {' or '.join(formats)}."
            )
    found = open_model(args.path, args.base)
    require_token(args)
    refuse_to_replace(args.out, CHECKPOINT, args.overwrite, [args.path, args.base])
    about = {}
    if of_session:
        about = {"session": export_session(args, found, _output(args))}
    else:
        write = _merged if args.format == "full" and isinstance(found, Lora) else _WRITERS[args.format]
        write(args, found)
    return {
        "output": str(args.out),
        "format": args.format,
        **about,
        "pushed": push(Path(args.out), args.push),
    }, 0


def _output(args: argparse.Namespace) -> AbstractContextManager[Path]:
    """Returns the folder to write. It must not overlap with the exported checkpoint or its base."""
    return new_folder(args.out, CHECKPOINT, overwrite=args.overwrite, sources=[args.path, args.base])


def render(result: dict[str, Any]) -> str:
    session = render_session(result["session"]) if "session" in result else []
    return "\n".join([f"wrote {result['output']} ({result['format']})", *session, *pushed(result)])


def _reference_format(args: argparse.Namespace, found: Opened) -> None:
    if not isinstance(found, Full):
        raise InPlaceTTTError(
            f"{args.path} is an adapter, but the reference format holds all weights; export it as full first."
        )
    checkpoint = found.checkpoint
    checkpoint.ttt_config  # noqa: B018 - raises if not converted
    require_sound(checkpoint, empty_model(checkpoint)[1])
    with _output(args) as folder:
        write_reference_format(folder, checkpoint)
        write_card(folder, checkpoint.folder, checkpoint.ttt_config, found.described_base, "reference")


def _adapter(args: argparse.Namespace, found: Opened) -> None:
    if not isinstance(found, Full):
        raise InPlaceTTTError(f"{args.path} is an adapter already.")
    checkpoint = found.checkpoint
    base = base_of(checkpoint)
    tensors = checkpoint.ttt_tensors()
    with _output(args) as folder:
        write_adapter(folder, checkpoint.ttt_config, tensors, base)
        write_card(folder, checkpoint.folder, checkpoint.ttt_config, base, "adapter")


def _full(args: argparse.Namespace, found: Opened) -> None:
    if not isinstance(found, Adapter):
        raise InPlaceTTTError(f"{args.path} is a full checkpoint already.")
    config, known, tensors = found.read
    checkpoint, plan = found.planned()
    base = describe_base(checkpoint, plan) if args.base else known  # records the base's current path
    if checkpoint.fingerprint(plan.down_proj.values()) != known["fingerprint"]:
        raise InPlaceTTTError(
            f"{checkpoint.name} has other weights than the base that {args.path} was made for; use that base."
        )
    require_sound(checkpoint, empty_model(checkpoint)[1])
    with _output(args) as folder:
        write_full(folder, checkpoint, plan, tensors, base)
        write_card(folder, found.folder, config, base, "full")


def _merged(args: argparse.Namespace, found: Opened) -> None:
    """Writes a PEFT adapter merged into its base."""
    model, tokenizer = load_with_tokenizer(args.path, args.base, "auto")
    with _output(args) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        written = Full(str(folder))
        write_card(folder, found.folder, written.checkpoint.ttt_config, written.described_base, "full")


_WRITERS = {"reference": _reference_format, "adapter": _adapter, "full": _full}
