"""Compares a model's losses with TTT on, with TTT off and with another document's state, and its base's.

A lower loss with TTT on proves little, because training may teach the target generator a constant that any
document writes. A document is therefore also read with the state that another document wrote (`mismatched`).
The gain that remains then is the `generic_gain`. The `document_gain` is on minus mismatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..reports.statistics import Mean
from ..surgery import config_of
from .baseline_losses import BaselineLosses
from .protocol import Protocol, progress_bar
from .same_text import refuse_same_text
from .token_losses import mismatched_losses, token_losses


@dataclass
class DocumentLosses:
    """Token losses of one document, float32 [T - 1] each, in nats.

    If the document is also read as mismatched, all means end where that reading ends. Then differences of
    means are means of differences.

    Attributes:
        on: losses with writes.
        off: losses without writes.
        mismatched: losses with another document's state; they end where that document ends.
        base: losses of the base model.
    """

    on: Tensor
    off: Tensor
    mismatched: Tensor | None = None
    base: Tensor | None = None

    def mean(self, what: str, skip: int) -> float | None:
        """Returns the mean loss of a reading after `skip` tokens, in nats per token; None if not read."""
        losses = getattr(self, what)
        end = len(self.on) if self.mismatched is None else len(self.mismatched)
        return None if losses is None else float(losses[skip:end].double().mean())


@dataclass
class Comparison:
    """Holds the losses of all documents.

    A reading is "on" (with writes), "off" (without), "mismatched" (with the state that another document
    wrote) or "base" (of the model to compare with).

    Attributes:
        documents: token losses of each document.
        protocol: settings of the reading; its first `skip` tokens are left out of every mean.
        extra: further entries of the JSON object.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.evaluation.comparison import compare
        >>> from inplace_ttt.evaluation.protocol import Protocol
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> documents = [torch.randint(32000, (50,)), torch.randint(32000, (60,))]
        >>> comparison = compare(model, documents, Protocol())
        >>> comparison.paired("on", "mismatched").n  # the document gain, here of two documents
        2
    """

    documents: list[DocumentLosses]
    protocol: Protocol
    extra: dict[str, Any] = field(default_factory=dict)

    def mean(self, what: str) -> float | None:
        """Averages a reading's loss over documents.

        Args:
            what: the reading.

        Returns:
            The mean of the documents' means, in nats per token; None if a document lacks the reading.

        Examples:
            >>> comparison.mean("on") == comparison.mean("off")  # a fresh conversion writes zeros
            True
        """
        found = [d.mean(what, self.protocol.skip) for d in self.documents]
        known = [x for x in found if x is not None]
        return fmean(known) if len(known) == len(found) else None

    def paired(self, one: str, other: str) -> Mean | None:
        """Averages the difference of two readings, paired by document.

        Args:
            one: a reading.
            other: the reading to subtract.

        Returns:
            The mean in nats per token, with its standard error, which is None for a single document. None if
            a document lacks a reading.

        Examples:
            >>> comparison.paired("on", "off").mean
            0.0
        """
        pairs = [(d.mean(one, self.protocol.skip), d.mean(other, self.protocol.skip)) for d in self.documents]
        known = [a - b for a, b in pairs if a is not None and b is not None]
        return Mean.of(known) if len(known) == len(pairs) else None

    def positions(self, bins: int = 16) -> list[dict[str, Any]]:
        """Averages losses and gains by position.

        Args:
            bins: number of bins of equal length over the longest document.

        Returns:
            For each bin its start and stop in tokens, losses and gains in nats per token.

        Examples:
            >>> [bin["start"] for bin in comparison.positions(bins=3)]
            [0, 20, 40]
        """
        longest = max(len(d.on) for d in self.documents)
        width = max(1, -(-longest // bins))
        return [self._bin(start, min(start + width, longest)) for start in range(0, longest, width)]

    def _bin(self, start: int, stop: int) -> dict[str, Any]:
        row: dict[str, Any] = {"start": start, "stop": stop}
        for name in ("on", "off", "mismatched", "base"):
            parts = [
                getattr(d, name)[start:stop]
                for d in self.documents
                if getattr(d, name) is not None and len(getattr(d, name)) > start
            ]
            row[name] = fmean(float(part.mean()) for part in parts) if parts else None
        here = [d for d in self.documents if len(d.on) > start]
        row["difference"] = vars(Mean.of(float((d.on - d.off)[start:stop].double().mean()) for d in here))
        # fewer documents if texts differ in length
        borrowed = [d for d in here if d.mismatched is not None and len(d.mismatched) > start]
        for name, one, other in (
            ("generic_gain", "mismatched", "off"),
            ("document_gain", "on", "mismatched"),
        ):
            pairs = [_together(getattr(d, one), getattr(d, other), start, stop) for d in borrowed]
            row[name] = vars(Mean.of(pairs)) if pairs else None
        return row

    def per_document(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Lists losses and gains of every document.

        Args:
            names: a name per document.

        Returns:
            For each document its name, tokens, counted tokens, loss and gains in nats per token.

        Examples:
            >>> comparison.per_document(["first", "second"])[0]["on_minus_off"]
            0.0
        """
        skip, rows = self.protocol.skip, []
        for name, d in zip(names, self.documents, strict=True):
            on, off, mismatched = (d.mean(what, skip) for what in ("on", "off", "mismatched"))
            assert on is not None and off is not None
            own = None if mismatched is None else on - mismatched
            end = len(d.on) if d.mismatched is None else len(d.mismatched)
            row = {
                "name": name,
                "tokens": len(d.on) + 1,
                "counted": end - skip,
                "off": off,
                "on_minus_off": on - off,
            }
            rows.append({**row, "own_minus_mismatched": own})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Converts the comparison to JSON values.

        Returns:
            The JSON object of docs/evaluate.md.

        Examples:
            >>> comparison.to_dict()["difference"]["mean"]
            0.0
        """
        values: dict[str, Any] = {name: self.mean(name) for name in ("on", "off", "base", "mismatched")}
        for name, pair in {
            "difference": ("on", "off"),
            "gain": ("on", "base"),
            "document_gain": ("on", "mismatched"),
            "generic_gain": ("mismatched", "off"),
        }.items():
            paired = self.paired(*pair)
            values[name] = None if paired is None else vars(paired)
        return {**values, "positions": self.positions(), **self.extra}


def compare(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    protocol: Protocol,
    base: PreTrainedModel | None = None,
    *,
    baseline: BaselineLosses | None = None,
    progress: bool = False,
) -> Comparison:
    """Reads documents with TTT on, with TTT off and with another document's state, and with a base.

    Args:
        model: a converted model.
        documents: token ids [T] of each document, int64, longer than a chunk.
        protocol: settings of the reading.
        base: the model to compare with, or None.
        baseline: keeps losses without writes, or None.
        progress: show a bar on stderr.

    Returns:
        The losses, in nats. They are read with another document's state only if there are several documents.

    Raises:
        InPlaceTTTError: if no token of a document can read a write, two documents hold the same text, or a
            loss is not finite.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.evaluation.comparison import compare
        >>> from inplace_ttt.evaluation.protocol import Protocol
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> documents = [torch.randint(32000, (50,)), torch.randint(32000, (60,))]
        >>> compare(model, documents, Protocol()).paired("on", "off").mean  # a fresh conversion writes zeros
        0.0
    """
    require_comparable(model, documents, protocol)
    chunk = config_of(model).chunk_size
    settings: dict[str, Any] = dict(protocol.attention)
    baseline = baseline or BaselineLosses()
    lender = lenders(documents)
    order = list(lender)
    found: dict[int, DocumentLosses] = {}
    passes = 2 + 2 * (len(documents) > 1) + (base is not None)
    with progress_bar("reading", passes * sum(map(len, documents)), progress) as bar:
        settings["progress"] = bar.update
        for first in range(0, len(order), protocol.batch_size):
            group = order[first : first + protocol.batch_size]
            rows = _padded([documents[i] for i in group])
            on, off = (
                token_losses(model, rows, piece=chunk, **settings),
                baseline.of(model, rows, piece=chunk, **settings),
            )
            mismatched = None
            if len(documents) > 1:
                others = _padded([documents[lender[i]] for i in group], rows.shape[1])
                mismatched = mismatched_losses(model, rows, others, piece=chunk, **settings)
            untouched = None if base is None else baseline.of(base, rows, piece=chunk, **settings)
            for row, i in enumerate(group):
                end = len(documents[i]) - 1
                found[i] = DocumentLosses(
                    on[row, :end],
                    off[row, :end],
                    None if mismatched is None else mismatched[row, : min(end, len(documents[lender[i]]))],
                    None if untouched is None else untouched[row, :end],
                )
    return Comparison([found[i] for i in range(len(documents))], protocol)


def lenders(documents: Sequence[Tensor]) -> dict[int, int]:
    """Maps each document, the longest first, to the document whose writes it reads as `mismatched`.

    Both have similar lengths. The pairs do not depend on the batches.
    """
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def require_comparable(model: PreTrainedModel, documents: Sequence[Tensor], protocol: Protocol) -> None:
    """Checks that documents can be compared.

    Raises:
        InPlaceTTTError: if no token of a document can read a write, or two documents hold the same text.
    """
    chunk = config_of(model).chunk_size
    least = max(chunk, protocol.skip) + 1
    for document in documents:
        if len(document) <= least:
            raise InPlaceTTTError(
                f"a document has {len(document)} tokens, but no write is read and counted before token "
                f"{least} (chunks of {chunk}, the first {protocol.skip} do not count); give longer texts."
            )
    refuse_same_text(documents)


def _together(one: Tensor, other: Tensor, start: int, stop: int) -> float:
    """Returns one reading minus the other within a bin, over the tokens that both have."""
    end = min(stop, len(one), len(other))
    return float((one[start:end].double() - other[start:end].double()).mean())


def _padded(documents: Sequence[Tensor], length: int | None = None) -> Tensor:
    """Returns documents as rows [B, T], padded or cut to `length`.

    Padding follows a document's end, so it does not affect the document's losses.
    """
    rows = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    return (
        rows
        if length is None
        else torch.nn.functional.pad(rows, (0, max(0, length - rows.shape[1])))[:, :length]
    )
