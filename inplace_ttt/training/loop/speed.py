"""The speed of training: seconds per step without pauses, tokens per second, and use of the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from ..recipe.recipe import Recipe


class Clock:
    """Counts seconds of training. It stops while a run evaluates, saves or diagnoses."""

    def __init__(self) -> None:
        self._gone, self._since = 0.0, time.perf_counter()

    def read(self) -> float:
        return self._gone + time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock inside the block, after waiting for the work that the device has queued."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = self.read()
        try:
            yield
        finally:
            self._gone, self._since = seconds, time.perf_counter()


@dataclass
class Speed:
    """The speed of the steps of one run.

    Attributes:
        flops: the model's operations in one step, over all devices, without recomputation.
        peak: operations per second of one device, None if unknown.
    """

    recipe: Recipe
    clock: Clock
    flops: int
    peak: float | None
    first: tuple[int, float] | None = None
    """Steps done and clock after the first step of this process.

    The first step is slower: it compiles and allocates memory.
    """
    last: tuple[int, float] | None = None

    def after_step(self, steps: int) -> None:
        self.last = steps, self.clock.read()
        self.first = self.first or self.last

    def since(self, then: tuple[int, float]) -> dict[str, float]:
        """Returns the speed of the steps after `then`.

        Args:
            then: steps done, and the clock.

        Returns:
            Seconds per step and tokens per second; per device, TFLOP per second and the fraction of its peak.
        """
        assert self.last is not None
        steps = self.last[0] - then[0]
        seconds = (self.last[1] - then[1]) / steps
        of_device = self.flops / self.recipe.parallel.world / seconds
        found = {
            "step_seconds": seconds,
            "tokens_per_second": self.recipe.rows_per_step * self.recipe.data.sequence_length / seconds,
            "model_tflops_per_device": of_device / 1e12,
        }
        if self.peak is not None:
            found["mfu"] = of_device / self.peak
        return {name: float(f"{value:.4g}") for name, value in found.items()}

    def of_run(self) -> dict[str, float]:
        """Returns the speed without the first step; empty after only one step."""
        return self.since(self.first) if self.first and self.last and self.last > self.first else {}


class SpeedLog(TrainerCallback):
    """Adds the speed of the steps since the last log to each log."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.since: tuple[int, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.since is None:
            self.since = state.global_step, self.speed.clock.read()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.speed.after_step(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is not None and "loss" in logs and self.since is not None:
            logs.update(self.speed.since(self.since))
            self.since = self.speed.last
