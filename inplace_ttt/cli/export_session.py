"""Exports a session as a plain checkpoint or a LoRA adapter: `inplace-ttt export … --session FILE`."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.card import write_export_card
from ..checkpoint.opened import Opened
from ..checkpoint.to_adapter import unchanged_base
from ..errors import InPlaceTTTError
from ..evaluation.exported import MOST, Kept, Read, mean_loss, rows_of
from ..files.text import ids_within, read_text
from ..session.lora import write_lora
from ..session.plain_model import bake, plain_copy
from ..session.rank import RANK
from ..session.session import Session
from ..session.weight_change import WeightChange, low_rank
from .loading import load_with_tokenizer, refuse_not_finite
from .messages import warn


def export_session(
    args: argparse.Namespace, found: Opened, output: AbstractContextManager[Path]
) -> dict[str, Any]:
    """Writes a session as a plain checkpoint or a LoRA adapter that answers as the session does.

    Args:
        args: the parsed arguments.
        found: the session's model.
        output: the folder to write.

    Returns:
        The facts about the export, as `--json` prints them.

    Raises:
        InPlaceTTTError: if the session does not belong to the model, has written nothing, or holds several
            sequences. Also if reads are not linear in the layer's input. For a LoRA, also if training has
            changed the base.
    """
    model, tokenizer = load_with_tokenizer(args.path, args.base, "auto")
    refuse_not_finite(model, args.path)
    sessions = [Session.load(file, model) for file in args.session]
    session = sessions[0].merge(*sessions[1:]) if len(sessions) > 1 else sessions[0]
    if session.batch > 1:
        raise InPlaceTTTError(
            f"{args.session[0]} holds {session.batch} sequences, but an export holds only one; choose it in "
            "Python with Session.bake(row) or Session.to_lora(…, row=row)."
        )
    changes = session.weight_changes()
    if not any(change.left.any() for change in changes.values()):
        warn("the session's writes are zero, so the export equals the base; train the model first.")
    measured_on = args.text or "the session's text"
    rows = _rows(args.text, sessions, tokenizer)
    plain = plain_copy(model)
    result: dict[str, Any] = {
        "layers": list(changes),
        "chunks": session.chunks_written,
        "unwritten": sum(read.unwritten for read in sessions),
        "rank": None,
        "lost": None,
        "measured_on": measured_on,
    }
    if args.format == "lora":
        base = unchanged_base(model, args.base, "export it with --format plain")
        factors = {index: low_rank(change.matrix(), args.rank or RANK) for index, change in changes.items()}
        result["rank"] = next(iter(factors.values())).a.shape[0]
        result["lost"] = {index: factor.lost for index, factor in factors.items()}
        reads: dict[int, Read] = {index: factor.read for index, factor in factors.items()}
        result["kept"] = _measured(plain, plain, changes, reads, rows)
        with output as folder:
            write_lora(folder, model, factors, base)
            write_export_card(folder, found.folder, base, "lora", result)
    else:
        baked = bake(model, changes)
        result["kept"] = _measured(plain, baked, changes, {}, rows)
        with output as folder:
            baked.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_export_card(folder, found.folder, found.described_base, "plain", result)
    return result


def render(result: dict[str, Any]) -> list[str]:
    """Returns the printed lines about an exported session."""
    lines = [
        f"{result['chunks']} chunks that the session has written are in layers "
        f"{', '.join(map(str, result['layers']))}"
    ]
    if result["unwritten"]:
        lines.append(
            f"{result['unwritten']} tokens at the end belong to an unfinished chunk and are not exported"
        )
    if result["rank"] is not None:
        lost = ", ".join(f"layer {index} {share:.1%}" for index, share in result["lost"].items())
        lines.append(f"rank {result['rank']} drops this share of each change's norm: {lost}")
    if (kept := result["kept"]) is None:
        return [*lines, "the session file holds no tokens to measure the kept gain on; give --text"]
    share = "" if kept["share"] is None else f", {kept['share']:.1%} of the session's gain"
    return [
        *lines,
        f"loss of {kept['tokens']:,} tokens of {result['measured_on']}: {kept['without']:.4f} without the "
        f"session, {kept['session']:.4f} with it, {kept['exported']:.4f} exported{share}",
    ]


def _rows(file: str | None, sessions: list[Session], tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """Returns rows of tokens [B, T] to measure on, from the file or the sessions; None if there are none.

    Raises:
        InPlaceTTTError: if the file has fewer than two tokens.
    """
    if file is not None:
        ids = torch.tensor(ids_within(tokenizer, read_text(file)), dtype=torch.int64)
        if len(ids) < 2:
            raise InPlaceTTTError(f"{file} has fewer than two tokens, so no loss can be measured.")
        return rows_of(ids)
    held = [read.tokens[0].cpu() for read in sessions if read.tokens is not None]
    ids = torch.cat([read[: MOST // len(held)] for read in held]) if held else torch.empty(0)
    return rows_of(ids) if len(ids) > 1 else None


def _measured(
    plain: PreTrainedModel,
    exported: PreTrainedModel,
    changes: dict[int, WeightChange],
    reads: dict[int, Read],
    rows: Tensor | None,
) -> dict[str, Any] | None:
    """Returns the losses of the rows; None without rows.

    Args:
        plain: the model without TTT.
        exported: the exported model, without the additions in `reads`.
        changes: the session's weight changes.
        reads: layer -> function that computes the addition to its outputs.
        rows: token ids [B, T].
    """
    if rows is None:
        return None
    bar = tqdm(total=3 * rows.numel(), desc="measuring", unit="tok", file=sys.stderr, disable=None)
    with bar:
        kept = Kept(
            tokens=rows.shape[0] * (rows.shape[1] - 1),
            without=mean_loss(plain, rows, {}, bar.update),
            session=mean_loss(plain, rows, {i: change.read for i, change in changes.items()}, bar.update),
            exported=mean_loss(exported, rows, reads, bar.update),
        )
    return {**asdict(kept), "share": kept.share}
