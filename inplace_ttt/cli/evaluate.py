"""Runs `inplace-ttt evaluate PATH --text TEXT…`, and with `--tasks` the tasks of `tasks`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from math import inf
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..attention_window import SINKS, attention_reach
from ..checkpoint.card import SHOWN, add_to_card, require_card
from ..errors import InPlaceTTTError
from ..evaluation.baseline_losses import BaselineLosses
from ..evaluation.comparison import compare, require_comparable
from ..evaluation.dynamic_evaluation import dynamic_evaluation
from ..evaluation.facts import document_tokens, recall_of_facts
from ..evaluation.growing_context import growing_context, require_contexts
from ..evaluation.plots import require_plots, write_plots
from ..evaluation.protocol import Protocol
from ..evaluation.repeated_passage import repeated_passage, require_room
from ..files.folders import new_folder
from ..files.json_files import json_text
from ..files.manifest import EVALUATION, refuse_to_replace
from ..files.text import begins_of, ids_within
from ..surgery import config_of
from ..tasks.passages import Passage
from ..texts.documents import Document, documents_in, joined_tokens, tokens_of
from . import Result, tasks
from .loading import (
    load_plain,
    load_with_tokenizer,
    note_on_positions,
    refuse_not_finite,
    refuse_other_tokenizer,
    tokenizer_of,
)
from .messages import say_now, warn
from .options.evaluate import BATCH, BLOCK, DISTANCES, RATES

NUMBERS = "evaluation.json"
_PROBED = 512
"""Tokens of text on which two tokenizers are compared."""


def run(args: argparse.Namespace) -> Result:
    if args.tasks is not None:
        return tasks.run(args)
    sources = [args.path, args.base, *args.text]
    if args.out:
        refuse_to_replace(args.out, EVALUATION, args.overwrite, sources)
        require_plots()
    if args.card:
        require_card(args.path)
    contexts, block, number = args.contexts or [], args.block or BLOCK, args.seed or 0
    passage = Passage(*args.passage) if args.passage else Passage()
    given = documents_in(args.text, "--text", args.text_field)
    model, tokenizer = load_with_tokenizer(args.path, None, args.dtype)
    refuse_not_finite(model, args.path)
    if config_of(model).prompt_write is not None:
        warn(
            "this model writes at the end of a prompt, but a text to evaluate is not a prompt; the writes of "
            "its chunks are measured instead."
        )
    base = None if args.base is None else load_plain(args.base, model.dtype)
    sinks, begins = SINKS if args.sinks is None else args.sinks, tuple(begins_of(tokenizer))
    protocol = Protocol(args.window, sinks, _skip(args, model), args.batch_size or BATCH, begins)
    chosen, documents = _long_enough(given, args, model, tokenizer, protocol)
    if base is not None:
        _refuse_other_base(args.base, base, tokenizer, documents)
    require_comparable(model, documents, protocol)
    if args.repeated_passage:
        require_room(documents, passage)
    if contexts:
        require_contexts(documents, contexts, block)
    _warn_of_what_is_seen(args, model, passage)
    baseline = BaselineLosses(args.cache)
    say_now()
    # first, because it refuses texts that are too short
    facts = _facts(args, model, tokenizer, given, chosen, protocol) if args.facts else None
    result = compare(model, documents, protocol, base, baseline=baseline, progress=True)
    if args.repeated_passage:
        probe = repeated_passage(
            model, documents, protocol, passage, seed=number, baseline=baseline, progress=True
        )
        result.extra["repeated_passage"] = probe
    if contexts:
        result.extra["contexts"] = growing_context(
            model, documents, contexts, protocol, block=block, base=base, baseline=baseline, progress=True
        )
    if args.rivals:
        result.extra["dynamic_evaluation"] = dynamic_evaluation(
            model, documents, result, args.rates or RATES, progress=True
        )
    if facts is not None:
        result.extra["facts"] = facts
    read = {
        "path": args.path,
        "base": args.base,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens_sha256": _digest(documents),
    }
    values = {
        **result.to_dict(),
        "documents": result.per_document([given[place].name for place in chosen]),
        "protocol": dataclasses.asdict(protocol),
        "read": {**read, **({"seed": number} if args.repeated_passage or args.facts else {})},
    }
    if args.card:
        add_to_card(
            args.path, evaluation={**{name: values[name] for name in SHOWN}, "documents": len(documents)}
        )
    if args.out:
        with new_folder(args.out, EVALUATION, overwrite=args.overwrite, sources=sources) as folder:
            (folder / NUMBERS).write_text(json_text(values, indent=1) + "\n", encoding="utf-8")
            write_plots(folder, values)
        values["output"] = args.out
    return values, 0


def render(result: dict[str, Any]) -> str:
    if "tasks" in result:
        return tasks.shown(result)
    lines = [
        _verdict(result),
        f"{len(result['documents'])} documents, nats per token past token {result['protocol']['skip']}",
    ]
    lines += [
        f"  {name:8}{result[name]:9.4f}"
        for name in ("on", "off", "base", "mismatched")
        if result[name] is not None
    ]
    meaning = {
        "difference": "on - off",
        "gain": "on - base",
        "generic_gain": "mismatched - off",
        "document_gain": "on - mismatched",
    }
    lines += [
        f"  {text:18}{_with_error(result[name])}"
        for name, text in meaning.items()
        if result[name] is not None
    ]
    if result["mismatched"] is None:
        lines.append(
            "  only one document: `document_gain` needs the state of another document; give two or more"
        )
    if "repeated_passage" in result:
        probe = result["repeated_passage"]
        lines.append(
            f"  repeated passage of {probe['passage']} tokens, {probe['gap']} later: on - off "
            f"{_with_error(probe['repeated_passage'])}"
        )
        lines.append(f"  the text between the copies:      on - off {_with_error(probe['between'])}")
    for row in result.get("contexts", []):
        base = f", base {row['base']:.4f}" if "base" in row else ""
        lines.append(
            f"  after {row['context']:7,} tokens: on {row['on']:.4f}, off {row['off']:.4f}{base}; "
            f"{_with_error(row['difference'])}"
        )
    for row in result.get("dynamic_evaluation", []):
        own = "" if row["document_gain"] is None else f", document_gain {_with_error(row['document_gain'])}"
        lines.append(
            f"  dynamic evaluation, rate {row['rate']:g}: {row['loss']:.4f}, minus off "
            f"{_with_error(row['difference'])}{own}; on minus it {_with_error(row['on_minus_dynamic'])}"
        )
    if "facts" in result:
        lines += _facts_table(result["facts"])
    return "\n".join(lines + ([f"wrote {result['output']}"] if "output" in result else []))


def _facts_table(facts: dict[str, Any]) -> list[str]:
    """Returns the facts as lines: a row per distance and kind of question, a column per reading."""
    readings = facts["readings"]
    lines = [
        f"  facts, {facts['records']} records in each of {facts['documents']} documents: exact match / "
        "multiple choice, or hallucinated / declined"
    ]
    lines.append(f"    {'':36}" + "".join(f"{name:>13}" for name in readings))
    for row in readings["on"]:
        beside = [
            next((other for other in rows if other["distance"] == row["distance"]), None)
            for rows in readings.values()
        ]
        for kind, asked in row["kinds"].items():
            cells = ["" if other is None else _shares(other["kinds"][kind]) for other in beside]
            title = f"after {row['distance']:,} tokens, {kind} ({asked['n']})"
            lines.append(f"    {title:36}" + "".join(f"{cell:>13}" for cell in cells))
    return lines


def _shares(kind: dict[str, Any]) -> str:
    """Returns the shares of a kind of question as one cell.

    A question without an answer has only the shares of hallucinated names and of the declining phrase. A
    question with a single option has no multiple choice.
    """
    choice = ("multiple_choice",) if kind["options"] > 1 else ()
    names = ("exact_match", *choice, "hallucinated", "declined")
    return " / ".join(f"{kind[name]['share']:.2f}" for name in names if name in kind)


def _verdict(result: dict[str, Any]) -> str:
    """Returns one sentence: the effect of writing on the loss, and the part due to the document itself."""
    effect, own = result["difference"], result["document_gain"]
    whole = {
        -1: f"Writing lowers the loss by {-effect['mean']:.4f} nats per token",
        0: f"No effect of writing on the loss is shown ({effect['mean']:+.4f} nats per token)",
        1: f"Writing raises the loss by {effect['mean']:.4f} nats per token",
    }[_sign(effect)]
    if own is None:
        return f"{whole}."
    part = {
        -1: f"a document's own text lowers it by {-own['mean']:.4f} more than another document's",
        0: "another document's text has the same effect as the document's own",
        1: f"a document's own text raises it by {own['mean']:.4f} more than another document's",
    }[_sign(own)]
    return f"{whole}; {part}."


def _sign(paired: dict[str, Any]) -> int:
    """Returns -1 or 1 if the mean is more than two standard errors from 0, else 0."""
    if paired["stderr"] is None or abs(paired["mean"]) <= 2 * paired["stderr"]:
        return 0
    return -1 if paired["mean"] < 0 else 1


def _with_error(paired: dict[str, Any]) -> str:
    error = "" if paired["stderr"] is None else f" ± {paired['stderr']:.4f}"
    return f"{paired['mean']:+.4f}{error} (n {paired['n']})"


def _skip(args: argparse.Namespace, model: PreTrainedModel) -> int:
    if args.skip is not None:
        return args.skip
    return max(config_of(model).chunk_size, args.window or 0)


def _facts(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: Any,
    given: Sequence[Document],
    chosen: Sequence[int],
    protocol: Protocol,
) -> dict[str, Any]:
    """Measures the recall of facts put into each chosen document, extended by the documents after it."""
    encode = functools.partial(ids_within, tokenizer)
    distances, number = args.distances or DISTANCES, args.seed or 0
    tokens = document_tokens(
        args.facts, len(chosen), max(distances), encode, config_of(model).chunk_size, number
    )
    texts = [joined_tokens([*given[place:], *given[:place]], tokenizer, tokens)[0] for place in chosen]
    return recall_of_facts(model, texts, encode, args.facts, distances, protocol, seed=number, progress=True)


def _refuse_other_base(path: str, base: PreTrainedModel, tokenizer: Any, documents: Sequence[Tensor]) -> None:
    """Raises InPlaceTTTError for a base that would read other tokens than the model.

    A base without a tokenizer needs embeddings for all tokens of the documents.
    """
    known = base.get_input_embeddings().num_embeddings
    if (largest := max(int(ids.max()) for ids in documents)) >= known:
        raise InPlaceTTTError(
            f"{path} has {known:,} embeddings, but the texts contain token id {largest:,}; it is not "
            "the base of this model."
        )
    try:
        other = tokenizer_of(path)
    except InPlaceTTTError:
        return
    refuse_other_tokenizer(other, tokenizer, path, tokenizer.decode(documents[0][:_PROBED]))


def _warn_of_what_is_seen(args: argparse.Namespace, model: PreTrainedModel, passage: Passage) -> None:
    """Warns if attention reaches the text that a probe tests the fast weights on.

    The model can then answer from attention, with writes and without.
    """
    reach = attention_reach(model.config.get_text_config(), args.window)
    probes = [("--repeated-passage: the first copy is", passage.gap)] if args.repeated_passage else []
    probes += [("--facts: the facts are", min(args.distances or DISTANCES))] if args.facts else []
    for what, distance in probes:
        if distance < reach:
            seen = "all of the text" if reach == inf else f"{reach:,} tokens"
            warn(
                f"{what} {distance:,} tokens back, within reach of attention, which sees {seen}; a smaller "
                "--window tests the fast weights alone."
            )


def _digest(documents: Sequence[Tensor]) -> str:
    """Returns the sha256 of the documents' token ids."""
    digest = hashlib.sha256()
    for ids in documents:
        digest.update(len(ids).to_bytes(8, "little") + ids.cpu().numpy().tobytes())
    return digest.hexdigest()


def _long_enough(
    given: Sequence[Document],
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: Any,
    protocol: Protocol,
) -> tuple[list[int], list[Tensor]]:
    """Returns the indices of the documents to read and their token ids [T].

    With --documents N, these are the first N that are long enough; without, all.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**15
    least = max(config_of(model).chunk_size, protocol.skip) + 2
    places: list[int] = []
    documents: list[Tensor] = []
    for place, document in enumerate(given):
        ids = tokens_of(document, tokenizer, args.tokens or context)[0]
        if args.documents is not None and len(ids) < (args.tokens or least):
            continue
        places.append(place)
        documents.append(ids.to(model.device))
        if len(documents) == args.documents:
            break
    if args.documents is not None and len(documents) < args.documents:
        length = args.tokens or least
        raise InPlaceTTTError(
            f"only {len(documents)} of the texts have {length} tokens, but --documents is "
            f"{args.documents}; lower it."
        )
    if note := note_on_positions(model, max(map(len, documents)), "lower --tokens"):
        warn(note)
    return places, documents
