"""The tasks of the comparison.

A row of ids and labels depends on the task and the seed, never on the system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.files.paths import require_regular
from inplace_ttt.tasks import IGNORED
from inplace_ttt.tasks.recall import recall_data
from inplace_ttt.texts.documents import documents_in

from .settings import Recall, Scratch, Text

Rows = tuple[Tensor, Tensor]
"""ids and labels, int64 [B, T]. labels[t] is the token after ids[t], or IGNORED."""


class Task(ABC):
    vocabulary: int

    @abstractmethod
    def batch(self, seed: int, step: int) -> Rows:
        """Returns the rows of one training step."""

    @abstractmethod
    def held_out(self, seed: int) -> Rows:
        """Returns the rows of the test."""

    @abstractmethod
    def scores(self, losses: Tensor, right: Tensor, labels: Tensor) -> dict[str, float]:
        """Returns the figures of the table, from the loss and the correctness of each position, [B, T]."""


class RecallTask(Task):
    """Recall. The score is the share of right values among those asked for. Each seed has rows of its own."""

    def __init__(self, settings: Recall, length: int, batch_size: int, steps: int) -> None:
        self.settings, self.vocabulary, self.length, self.batch_size, self.steps = (
            settings,
            settings.vocabulary,
            length,
            batch_size,
            steps,
        )
        self._made: dict[int, Rows] = {}
        self.held_out(seed=0)  # refuses bad sizes before anything is trained

    def batch(self, seed: int, step: int) -> Rows:
        if seed not in self._made:
            self._made = {seed: self._rows(self.batch_size * self.steps, seed)}
        ids, labels = (x[step * self.batch_size : (step + 1) * self.batch_size] for x in self._made[seed])
        return ids, labels

    def held_out(self, seed: int) -> Rows:
        return self._rows(self.settings.held_out, seed, held_out=True)

    def scores(self, losses: Tensor, right: Tensor, labels: Tensor) -> dict[str, float]:
        asked = labels != IGNORED
        return {"recall": right[asked].double().mean().item(), "loss": losses[asked].double().mean().item()}

    def _rows(self, count: int, seed: int, held_out: bool = False) -> Rows:
        made = recall_data(
            count, self.settings.pairs, self.vocabulary, self.length, seed, held_out
        ).with_format("torch")[:]
        return made["input_ids"][:, :-1].long(), made["labels"][:, 1:].long()


class TextTask(Task):
    """Bytes of text. The score is nats per byte, over stretches of positions. All seeds share the held-out
    rows."""

    vocabulary = 256

    def __init__(self, settings: Text, length: int, batch_size: int) -> None:
        self.settings, self.length, self.batch_size = settings, length, batch_size
        held_out = [Path(document.name) for document in documents_in(settings.held_out)]
        kept = {file.resolve() for file in held_out}
        texts = (Path(document.name) for document in documents_in(settings.train))
        train = [file for file in texts if file.resolve() not in kept]
        if not train:
            raise InPlaceTTTError("text.held_out names every file of text.train; leave some to train on.")
        self.train = [text for text in map(read_bytes, train) if len(text) >= length]
        if not self.train:
            raise InPlaceTTTError(f"no text of text.train has {length} bytes; lower training.length.")
        self._held_out = torch.cat(
            [spread(read_bytes(file), settings.rows, length, file) for file in held_out]
        )
        self._starts = torch.tensor([len(text) - length + 1 for text in self.train]).cumsum(0)

    def batch(self, seed: int, step: int) -> Rows:
        """Returns rows of the texts. Every start in every text is equally likely."""
        g = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(int(self._starts[-1]), (self.batch_size,), generator=g)
        texts = torch.searchsorted(self._starts, starts, right=True)
        rows = []
        for start, text in zip(starts.tolist(), texts.tolist(), strict=True):
            start -= int(self._starts[text - 1]) if text else 0
            rows.append(self.train[text][start : start + self.length])
        return shifted(torch.stack(rows))

    def held_out(self, seed: int) -> Rows:
        return shifted(self._held_out)

    def scores(self, losses: Tensor, right: Tensor, labels: Tensor) -> dict[str, float]:
        stops = [round(bound * (self.length - 1)) for bound in self.settings.bounds]
        means = losses.double().mean(dim=0)
        stretches = zip([0, *stops], stops, strict=False)
        return {f"{start}–{stop - 1}": means[start:stop].mean().item() for start, stop in stretches} | {
            "loss": means.mean().item()
        }


def task_of(settings: Scratch) -> Task:
    training = settings.training
    if settings.recall is not None:
        return RecallTask(settings.recall, training.length, training.batch_size, training.steps)
    assert settings.text is not None
    return TextTask(settings.text, training.length, training.batch_size)


def read_bytes(file: Path) -> Tensor:
    """Returns the bytes of a file as uint8 [n]."""
    require_regular(file, "cannot read the text")
    try:
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty"
        raise InPlaceTTTError(
            f"cannot read the text {file}: {reason}; `make text` fetches the recipes' texts."
        ) from None


def spread(text: Tensor, rows: int, length: int, file: Path) -> Tensor:
    """Returns rows [rows, length] of a text that do not overlap, at equal distances."""
    if len(text) < rows * length:
        raise InPlaceTTTError(
            f"{file} has {len(text)} bytes, too few for {rows} rows of {length}; lower text.rows or name "
            "another file."
        )
    apart = len(text) // rows
    return torch.stack([text[i * apart : i * apart + length] for i in range(rows)])


def shifted(rows: Tensor) -> Rows:
    return rows[:, :-1].long(), rows[:, 1:].long()
