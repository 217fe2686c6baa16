"""Runs `inplace-ttt convert SRC OUT`."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.calibrate import BaseToMeasure, tokens_to_read
from ..calibration.rows import ROW, calibration_rows
from ..checkpoint.adapter import write_adapter
from ..checkpoint.base_equivalence import TOKENS, max_logit_difference
from ..checkpoint.card import write_card
from ..checkpoint.layer_tensors import LayerTensors, parameters_of
from ..checkpoint.reading import Checkpoint
from ..checkpoint.reference_format import refuse_reference_format
from ..checkpoint.writing import ConversionPlan, describe_base, initial_tensors, plan_conversion, write_full
from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError, NotSoError
from ..evaluation.gradient_choice import Tried, choose, least_tokens, table
from ..files.folders import new_folder
from ..files.manifest import CHECKPOINT, refuse_to_replace
from ..texts.documents import Document, documents_in
from . import Result
from .hub import push, pushed, require_token
from .loading import chosen_device, tokenizer_of
from .options.convert import chosen_config, open_choices


def run(args: argparse.Namespace) -> Result:
    require_token(args)
    sources = [args.src, *(args.calibrate or ())]
    refuse_to_replace(args.out, CHECKPOINT, args.overwrite, sources)
    device = chosen_device(args.device)
    checkpoint = Checkpoint.open(args.src)
    refuse_reference_format(args.src, checkpoint.weight_map)
    plan = plan_conversion(checkpoint, chosen_config(args))
    rows = _rows_to_calibrate_on(args, plan)
    plan, tensors, choice = _new_tensors(args, checkpoint, plan, rows, device)
    with new_folder(args.out, CHECKPOINT, overwrite=args.overwrite, sources=sources) as folder:
        base = describe_base(checkpoint, plan)
        if args.adapter_only:
            write_adapter(folder, plan.config, tensors, base)
        else:
            write_full(folder, checkpoint, plan, tensors, base)
        form = "adapter" if args.adapter_only else "full"
        write_card(
            folder,
            checkpoint.folder,
            plan.config,
            base,
            form,
            calibration=None if rows is None else _calibration(rows),
        )
        identity = _prove(checkpoint, folder) if plan.config.starts_as_base and not args.no_verify else None
    return {
        "output": str(args.out),
        "layers": list(plan.config.layers),
        "new_parameters": parameters_of(tensors),
        "config": plan.config.to_dict(),
        "identity": identity,
        **({} if choice is None else {"choice": choice}),
        "pushed": push(Path(args.out), args.push),
    }, 0


def render(result: dict[str, Any]) -> str:
    lines = [
        f"wrote {result['output']}",
        f"TTT layers: {', '.join(map(str, result['layers']))}; {result['new_parameters']:,} new parameters",
    ]
    if result["identity"]:
        lines.append(
            f"identical to the base: largest logit difference {result['identity']['max_abs_logit_diff']:g} "
            f"over {TOKENS} tokens"
        )
    if "choice" in result:
        tried = [Tried(**{**one, "layers": tuple(one["layers"])}) for one in result["choice"]["tried"]]
        lines += table(tried[result["choice"]["taken"]], tried)
    config = InPlaceTTTConfig.from_dict(result["config"])
    setting = "target='gradient'" if config.target == "gradient" else "conv='next'"
    lines.append(
        "A fresh conversion writes nothing until its convolution is trained."
        if config.starts_as_base
        else f"With {setting} a fresh conversion already writes, so its outputs differ from the base's."
    )
    return "\n".join([*lines, *pushed(result)])


def _new_tensors(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    rows: list[tuple[Document, Tensor]] | None,
    device: str,
) -> tuple[ConversionPlan, LayerTensors, dict[str, Any] | None]:
    """Returns the plan, the new tensors, and the choice of layers and η (None if none was made).

    The plan includes the choice.
    """
    if rows is None:
        return plan, initial_tensors(checkpoint, plan), None
    base, texts = BaseToMeasure.load(checkpoint, device), [row for _, row in rows]
    if plan.config.target == "gradient" and (to_try := open_choices(args)) is not None:
        found = choose(base.model, plan.config, texts, **to_try, progress=True)
        chosen = dataclasses.replace(plan.config, layers=found.best.layers, eta=found.best.eta)
        choice = {
            "tried": [dataclasses.asdict(one) for one in found.tried],
            "taken": found.tried.index(found.best),
        }
        return plan_conversion(checkpoint, chosen), base.to_save(found.tensors), choice
    return plan, base.new_tensors(plan.config, texts), None


def _rows_to_calibrate_on(
    args: argparse.Namespace, plan: ConversionPlan
) -> list[tuple[Document, Tensor]] | None:
    """Returns documents with their token ids [1, T] for the calibration.

    Returns None if the config needs no calibration.
    """
    if not plan.config.needs_calibration:
        if args.calibrate:
            raise InPlaceTTTError(
                "--calibrate does nothing, because these settings need no calibration; leave it out."
            )
        return None
    if not args.calibrate:
        raise InPlaceTTTError(
            "these settings need calibration; give texts like those that the model will read, with "
            "--calibrate TEXT…"
        )
    tokens, row = tokens_to_read(plan.config), ROW
    if plan.config.target == "gradient" and open_choices(args) is not None:
        row = max(ROW, least_tokens(plan.config))
        tokens = max(tokens, 2 * row)
    return calibration_rows(
        documents_in(args.calibrate, "--calibrate", args.text_field),
        tokenizer_of(args.src, model=plan.model),
        args.calibrate_tokens or tokens,
        row,
    )


def _calibration(rows: list[tuple[Document, Tensor]]) -> dict[str, Any]:
    """Returns the model card's entries about the calibration texts."""
    tokens = torch.cat([row[0] for _, row in rows]).to(torch.int64)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return {
        "files": list(dict.fromkeys(Path(document.source).name for document, _ in rows)),
        "tokens": len(tokens),
        "sha256": digest,
    }


def _prove(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    difference = max_logit_difference(checkpoint.folder, folder)
    if not difference < 1e-3:
        raise NotSoError(
            f"the converted model differs from its base by {difference:g} in a logit, so nothing was "
            "written; please report this."
        )
    return {"max_abs_logit_diff": difference, "tokens": TOKENS}
