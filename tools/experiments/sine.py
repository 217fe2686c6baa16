"""Repeats the proof of concept of Titans: predict the next element of a noisy sine wave.

A window of C elements has C noisy points. A model that remembers the whole wave has a better estimate of its
frequency and phase. The models are Titans' memory as context with one or two memory layers, attention on the
window alone, and an LSTM.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.files.schema import require
from inplace_ttt.memories.mac import MACModel, encoder
from inplace_ttt.reports.statistics import Mean


@dataclass(frozen=True)
class Waves:
    """Waves sin(2πt / period + phase) + noise.

    Periods are log-uniform between two bounds. Phases are uniform. `noise` is the standard deviation of
    normal noise.
    """

    length: int = 500
    train: int = 64
    validation: int = 16
    test: int = 64
    noise: float = 0.1
    periods: list[float] = field(default_factory=lambda: [10.0, 100.0])

    def __post_init__(self) -> None:
        require(
            len(self.periods) == 2 and 0 < self.periods[0] <= self.periods[1],
            "periods",
            "give two, the shorter first",
        )
        for name in ("train", "validation", "test"):
            require(getattr(self, name) >= 1, name, "must be at least 1")


@dataclass(frozen=True)
class Training:
    """Training by Adam.

    Attributes:
        phases: number of residues modulo C on which a step is trained, drawn anew for each step.
        validation_phases: number of residues modulo C for the validation error; always the same ones.
    """

    epochs: int = 50
    batch_size: int = 4
    learning_rate: float = 1e-3
    phases: int = 4
    validation_phases: int = 4

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "phases", "validation_phases"):
            require(getattr(self, name) >= 1, name, "must be at least 1")


@dataclass(frozen=True)
class Sine:
    """Settings of one table: every model with every seed.

    A seed sets the waves, the start and the order of the data.

    Attributes:
        segment: C.
        mac: more options of `MACModel`.
        published: a test error for each model, to print beside ours.
    """

    models: list[str] = field(default_factory=lambda: ["attention", "mac-1", "mac-2", "lstm"])
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    waves: Waves = field(default_factory=Waves)
    training: Training = field(default_factory=Training)
    dim: int = 16
    segment: int = 16
    mac: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            bool(self.models) and set(self.models) <= set(BUILDERS),
            "models",
            f"choose from {', '.join(BUILDERS)}",
        )
        phases = max(self.training.phases, self.training.validation_phases)
        require(
            phases <= self.segment,
            "training",
            f"phases and validation_phases cannot exceed segment, {self.segment}",
        )
        require(self.waves.length > self.segment, "waves", f"length must exceed segment, {self.segment}")


class WindowAttention(nn.Module):
    """The MAC model without memory and persistent tokens: encoder layers on the last C elements, and a linear
    map."""

    def __init__(self, dim: int, segment: int) -> None:
        super().__init__()
        self.segment = segment
        self.embed = nn.Linear(1, dim)
        self.attention = encoder(dim, heads=2, layers=2, feedforward=4 * dim)
        self.answer = nn.Linear(segment * dim, 1)

    def every_next(self, x: Tensor, phases: Tensor) -> Tensor:
        # [B, segments, n, C]
        windows = by_phase(x[:, :-1].unfold(1, self.segment, 1).squeeze(2), self.segment, phases)
        y = self.attention(F.silu(self.embed(windows.flatten(0, 2).unsqueeze(-1))))
        return self.answer(y.flatten(1)).view(*windows.shape[:3], 1)


class Recurrent(nn.Module):
    """An LSTM from the wave's first element on, with a learned start."""

    def __init__(self, dim: int, segment: int) -> None:
        super().__init__()
        self.segment = segment
        self.embed = nn.Linear(1, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.start = nn.Parameter(torch.randn(2, 1, 1, dim))
        self.answer = nn.Linear(dim, 1)

    def every_next(self, x: Tensor, phases: Tensor) -> Tensor:
        h, c = self.start.expand(-1, -1, len(x), -1).contiguous()
        y = self.answer(F.relu(self.lstm(F.relu(self.embed(x)), (h, c))[0]))
        return by_phase(y[:, self.segment - 1 : -1], self.segment, phases)


BUILDERS: dict[str, Callable[[Sine], nn.Module]] = {
    "attention": lambda s: WindowAttention(s.dim, s.segment),
    "mac-1": lambda s: MACModel(dim=s.dim, segment=s.segment, memory_layers=1, **s.mac),
    "mac-2": lambda s: MACModel(dim=s.dim, segment=s.segment, memory_layers=2, **s.mac),
    "lstm": lambda s: Recurrent(s.dim, s.segment),
}


def by_phase(every: Tensor, segment: int, phases: Tensor, fill: float = 0.0) -> Tensor:
    """Groups values of the positions C … T − 1 by their residue modulo C.

    Args:
        every: values [B, T − C, …].
        segment: C.
        phases: the n residues to keep.
        fill: value of positions behind T.

    Returns:
        Values [B, ⌈(T − C) / C⌉, n, …].
    """
    tail = every.new_full((every.shape[0], -every.shape[1] % segment, *every.shape[2:]), fill)
    return torch.cat([every, tail], dim=1).unflatten(1, (-1, segment))[:, :, phases]


def waves(count: int, settings: Waves, seed: int) -> Tensor:
    """Returns waves [count, length, 1]."""
    g = torch.Generator().manual_seed(seed)
    short, long = (math.log(period) for period in settings.periods)
    frequency = torch.exp(-torch.empty(count, 1).uniform_(short, long, generator=g))
    phase = torch.rand(count, 1, generator=g)
    clean = torch.sin(2 * math.pi * (frequency * torch.arange(settings.length) + phase))
    return (clean + settings.noise * torch.randn(clean.shape, generator=g)).unsqueeze(-1)


def error(model: nn.Module, x: Tensor, segment: int, phases: Tensor) -> Tensor:
    """Returns the mean squared error over elements of x [B, T, 1] whose position modulo C is among `phases`."""
    wanted = by_phase(x[:, segment:], segment, phases, fill=math.nan)
    inside = ~wanted.isnan()
    return F.mse_loss(model.every_next(x, phases)[inside], wanted[inside])  # type: ignore[operator]


def train_one(name: str, seed: int, settings: Sine) -> dict[str, Any]:
    """Trains one model with one seed, and tests it on every position.

    The tested weights are those of the epoch with the lowest validation error.
    """
    started = time.monotonic()
    training, c = settings.training, settings.segment
    data, held, test = (waves(n, settings.waves, 3 * seed + i) for i, n in enumerate(sizes(settings.waves)))
    torch.manual_seed(seed)
    model, order = BUILDERS[name](settings), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), training.learning_rate)
    spread = torch.arange(training.validation_phases) * c // training.validation_phases
    best, kept = math.inf, copy.deepcopy(model.state_dict())
    for _ in tqdm(range(training.epochs), desc=f"{name}, seed {seed}", disable=None):
        for rows in torch.randperm(len(data), generator=order).split(training.batch_size):
            loss = error(
                model, data[rows], c, torch.randperm(c, generator=order)[: training.phases].sort().values
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            found = error(model, held, c, spread).item()
        if found < best:
            best, kept = found, copy.deepcopy(model.state_dict())
    if not math.isfinite(best):
        raise InPlaceTTTError(
            f"{name} diverged with seed {seed}; lower training.learning_rate, or theta under mac."
        )
    model.load_state_dict(kept)
    with torch.no_grad():
        mse = torch.stack([error(model, part, c, torch.arange(c)) for part in test.split(16)]).mean().item()
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "model": name,
        "seed": seed,
        "test_mse": mse,
        "validation_mse": best,
        "parameters": parameters,
        "seconds": time.monotonic() - started,
    }


def sizes(settings: Waves) -> tuple[int, int, int]:
    return settings.train, settings.validation, settings.test


def table(rows: list[dict[str, Any]], settings: Sine) -> list[dict[str, Any]]:
    """Returns the mean and standard error over the seeds of each model, beside the published error."""
    lines = []
    for name in settings.models:
        found = Mean.of((row["test_mse"] for row in rows if row["model"] == name), alone=math.nan)
        lines.append({"model": name, **vars(found), "published": settings.published.get(name)})
    return lines
