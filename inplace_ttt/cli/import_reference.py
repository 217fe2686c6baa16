"""Runs `inplace-ttt import-reference PATH OUT`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..checkpoint.card import write_card
from ..checkpoint.reading import Checkpoint
from ..checkpoint.reference_format import is_reference_tensor, read_reference_format
from ..checkpoint.saved_tensors import require_sound
from ..checkpoint.ttt_ntp import is_ttt_ntp, read_ttt_ntp
from ..checkpoint.writing import write_full
from ..files.folders import new_folder
from ..files.manifest import CHECKPOINT, refuse_to_replace
from . import Result

_TRAINING = (
    "this is the training form of TTT-NTP: its code keeps sums in bfloat16 and one document per row; here "
    "sums are float32, and a row may hold several documents"
)
_INFERENCE = "its files lack prompt_write, which was set to the values of its evaluation script"


def run(args: argparse.Namespace) -> Result:
    refuse_to_replace(args.out, CHECKPOINT, args.overwrite, [args.path])
    checkpoint = Checkpoint.open(args.path)
    of_ntp = is_ttt_ntp(checkpoint)
    imported = read_ttt_ntp(checkpoint) if of_ntp else read_reference_format(checkpoint)
    origin = {"name_or_path": str(args.path), "revision": imported.checkpoint.revision, "fingerprint": None}
    with new_folder(args.out, CHECKPOINT, overwrite=args.overwrite, sources=[args.path]) as folder:
        keep = lambda name: not is_reference_tensor(name)  # noqa: E731
        write_full(folder, imported.checkpoint, imported.plan, imported.tensors, origin, keep)
        require_sound(dataclasses.replace(Checkpoint.open(folder), name=args.path), imported.plan.model)
        write_card(folder, imported.checkpoint.folder, imported.plan.config, origin, "full")
    return {
        "output": str(args.out),
        "format": "TTT-NTP" if of_ntp else "In-Place TTT",
        "layers": list(imported.plan.config.layers),
        "ignored_layers": imported.ignored_layers,
        "config": imported.plan.config.to_dict(),
    }, 0


def render(result: dict[str, Any]) -> str:
    lines = [f"wrote {result['output']}", f"TTT layers: {', '.join(map(str, result['layers']))}"]
    if result["format"] == "TTT-NTP":
        lines += [_TRAINING, _INFERENCE]
    if result["ignored_layers"]:
        lines.append(
            f"left out layers {result['ignored_layers']}: the model does not have them (the reference "
            "code ignores them silently)"
        )
    return "\n".join(lines)
