"""`inplace-ttt import-official PATH OUT`"""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint.official import is_official_tensor, read_official
from ..checkpoint.overwriting import new_checkpoint_folder
from ..checkpoint.reading import Checkpoint
from ..checkpoint.saved_tensors import lacking
from ..checkpoint.writing import write_full
from ..errors import InPlaceTTTError
from . import Result
from .arguments import path

EXAMPLES = """example:
  inplace-ttt import-official ./in-place-ttt-qwen3-8b ./qwen3-8b-ttt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="checkpoint of the public reference code")
    parser.add_argument("out", type=path, metavar="OUT", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def run(args: argparse.Namespace) -> Result:
    imported = read_official(Checkpoint.open(args.path))
    origin = {"name_or_path": str(args.path), "revision": imported.checkpoint.revision, "fingerprint": None}
    with new_checkpoint_folder(args.out, overwrite=args.overwrite) as folder:
        keep = lambda name: not is_official_tensor(name)  # noqa: E731
        write_full(folder, imported.checkpoint, imported.plan, imported.tensors, origin, keep)
        if problem := lacking(folder, imported.plan.model):
            raise InPlaceTTTError(f"{args.path} {problem}: half a checkpoint, which could not be loaded.")
    return {
        "output": str(args.out),
        "layers": list(imported.plan.config.layers),
        "ignored_layers": imported.ignored_layers,
        "config": imported.plan.config.to_dict(),
    }, 0


def render(result: dict[str, Any]) -> str:
    lines = [f"wrote {result['output']}", f"TTT layers: {', '.join(map(str, result['layers']))}"]
    if result["ignored_layers"]:
        lines.append(f"left out layers {result['ignored_layers']}: the model does not have them (the public code ignores them silently)")
    return "\n".join(lines)
