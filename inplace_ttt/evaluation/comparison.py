"""Do writes help, and by what their own document says? One model with TTT on, off, and on cross-document state; and the base.

On below off proves little: training may have taught the target generator a constant that any document writes. What is left
of the gain when a document is read with the state that another document wrote (`foreign`) is such drift; on minus foreign
is `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from .token_losses import own_and_foreign_losses, token_losses


@dataclass
class DocumentLosses:
    """Token losses of one document, float32 [T - 1] each; foreign (cross-document state) ends where the other document does."""

    on: Tensor
    off: Tensor
    foreign: Tensor | None = None
    base: Tensor | None = None


@dataclass
class Comparison:
    """What was found on every document, and what follows from it: mean losses a token in nats past `skip`."""

    documents: list[DocumentLosses]
    protocol: Protocol
    extra: dict[str, Any] = field(default_factory=dict)

    def mean(self, what: str) -> float | None:
        found = [getattr(d, what) for d in self.documents]
        return None if any(x is None for x in found) else fmean(float(x[self.protocol.skip :].mean()) for x in found)

    def paired(self, one: str, other: str) -> Mean | None:
        """One minus the other, document by document, over the tokens that both have."""
        pairs = [(getattr(d, one), getattr(d, other)) for d in self.documents]
        if any(a is None or b is None for a, b in pairs):
            return None
        skip = self.protocol.skip
        return Mean.of([float((a[: len(b)] - b[: len(a)])[skip:].double().mean()) for a, b in pairs], alone=0.0)

    def positions(self, bins: int = 16) -> list[dict[str, Any]]:
        """The same by position: bins of equal length over the longest document."""
        longest = max(len(d.on) for d in self.documents)
        width = max(1, -(-longest // bins))
        return [self._bin(start, min(start + width, longest)) for start in range(0, longest, width)]

    def _bin(self, start: int, stop: int) -> dict[str, Any]:
        row: dict[str, Any] = {"start": start, "stop": stop}
        for name in ("on", "off", "foreign", "base"):
            parts = [getattr(d, name)[start:stop] for d in self.documents if getattr(d, name) is not None and len(getattr(d, name)) > start]
            row[name] = fmean(float(part.mean()) for part in parts) if parts else None
        here = [d for d in self.documents if len(d.on) > start]
        row["difference"] = vars(Mean.of([float((d.on - d.off)[start:stop].double().mean()) for d in here], alone=0.0))
        return row

    def per_document(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The same for every document."""
        skip, rows = self.protocol.skip, []
        for name, d in zip(names, self.documents, strict=True):
            own = None if d.foreign is None else float((d.on[: len(d.foreign)] - d.foreign)[skip:].double().mean())
            off, difference = (float(x[skip:].double().mean()) for x in (d.off, d.on - d.off))
            rows.append({"name": name, "tokens": len(d.on) + 1, "off": off, "on_minus_off": difference, "own_minus_foreign": own})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON keys."""
        values: dict[str, Any] = {name: self.mean(name) for name in ("on", "off", "base", "foreign")}
        for name, pair in {
            "difference": ("on", "off"),
            "gain": ("on", "base"),
            "memory": ("on", "foreign"),
            "drift": ("foreign", "off"),
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
    """Read documents of token ids [T] with a converted model, TTT on, off and on cross-document state, and with `base`.

    baseline: where losses without writes are kept.

    Raises InPlaceTTTError when a document is too short for anything to read what was written.
    """
    chunk = config_of(model).chunk_size
    least = max(chunk, protocol.skip) + 1
    for document in documents:
        if len(document) <= least:
            raise InPlaceTTTError(
                f"a document has {len(document)} tokens, and nothing reads what was written before token {least} (chunks of {chunk}, "
                f"the first {protocol.skip} do not count); give longer texts."
            )
    settings: dict[str, Any] = dict(protocol.attention)
    baseline = baseline or BaselineLosses()
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
    found: dict[int, DocumentLosses] = {}
    passes = 3 + (base is not None)
    with progress_bar("reading", passes * sum(map(len, documents)), progress) as bar:
        settings["progress"] = bar.update
        for group in _groups(order, protocol.batch_size):
            rows = _padded([documents[i] for i in group])
            if len(group) > 1:
                on, foreign = own_and_foreign_losses(model, rows, piece=chunk, **settings)
            else:
                on, foreign = token_losses(model, rows, piece=chunk, **settings), None
            off = baseline.of(model, rows, **settings)
            untouched = None if base is None else baseline.of(base, rows, **settings)
            for row, i in enumerate(group):
                end = len(documents[i]) - 1
                lender = len(documents[group[(row + 1) % len(group)]])
                found[i] = DocumentLosses(
                    on[row, :end],
                    off[row, :end],
                    None if foreign is None else foreign[row, : min(end, lender)],
                    None if untouched is None else untouched[row, :end],
                )
    return Comparison([found[i] for i in range(len(documents))], protocol)


def _groups(order: list[int], size: int) -> Iterator[list[int]]:
    """Documents of like length together; nobody is left alone, since cross-document state needs another document."""
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] = groups[-1] + last
    yield from groups


def _padded(documents: list[Tensor]) -> Tensor:
    """[B, T]: what stands behind a document's end comes after all that counts of it."""
    return torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
