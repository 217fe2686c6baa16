"""Runs one TTT layer on chosen inputs, with a chosen target generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..adapters import AuditedModule
from ..law import key_size
from ..outcome import NotChecked
from ..stream import Stream


class Driver:
    """One module with random inputs, drawn from `seed`.

    The module's tensors are restored after each run.
    """

    def __init__(self, module: AuditedModule, seed: int = 0) -> None:
        self.module = module
        self.generator = torch.Generator().manual_seed(seed)
        self.kernel = module.conv.shape[-1]

    # Runs

    def run(self, x: Tensor, target: Tensor, **kwargs: object) -> Tensor:
        """Returns the outputs [T, d] of one row, from inputs [T, input] and a target source [T, d]."""
        return self.run_batch(x[None], target[None], **kwargs)[0]

    @torch.no_grad()
    def run_batch(self, x: Tensor, target: Tensor, **kwargs: object) -> Tensor:
        """Returns outputs [B, T, d] in float64, from inputs [B, T, input] and a target source [B, T, d]."""
        with self.module.guarded():
            return self.module.forward(x, target, **kwargs).double().cpu()  # type: ignore[arg-type]

    def response(self, x: Tensor, target: Tensor, **kwargs: object) -> Tensor:
        """Returns the change of the outputs [T, d] by the writes of `target`."""
        with self.module.bare():
            return self.run(x, target, **kwargs) - self.run(x, torch.zeros_like(target), **kwargs)

    @torch.no_grad()
    def stream(
        self, x: Tensor, target: Tensor, pieces: Sequence[int], stream: Stream | None = None
    ) -> Tensor:
        """Returns outputs [T, d] of one row that is read in pieces.

        Args:
            x: inputs [T, input].
            target: target source [T, d].
            pieces: tokens per piece.
            stream: the stream to read with; a new one by default.
        """
        assert sum(pieces) == len(x)
        with self.module.guarded():
            stream = stream or self.module.stream()
            parts = [
                stream(a[None], b[None])
                for a, b in zip(x.split(list(pieces)), target.split(list(pieces)), strict=True)
            ]
            return torch.cat(parts, 1)[0].double().cpu()

    def stream_response(self, x: Tensor, target: Tensor, pieces: Sequence[int]) -> Tensor:
        """Returns the `response` of a row that is read in pieces."""
        with self.module.bare():
            return self.stream(x, target, pieces) - self.stream(x, torch.zeros_like(target), pieces)

    @contextmanager
    def mode(self, training: bool | None) -> Iterator[None]:
        """Sets a mode inside the context, and evaluation mode on exit; None changes nothing."""
        if training is None:
            yield
            return
        self.module.train(training)
        try:
            yield
        finally:
            self.module.train(False)

    # Inputs

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def zeros(self, tokens: int) -> Tensor:
        """Returns a target source of zeros, [tokens, d]."""
        return torch.zeros(tokens, self.module.d, dtype=torch.float64)

    def units(self, rows: int) -> Tensor:
        """Returns random rows of norm 1, [rows, d]."""
        return torch.nn.functional.normalize(self.random(rows, self.module.d), dim=-1)

    def scattered(self, tokens: int, size: float = 1.0) -> Tensor:
        """Returns inputs [tokens, input] with random keys that are not orthogonal to each other.

        Args:
            tokens: number of inputs.
            size: norm of these keys over that of the bank's keys.
        """
        keys = torch.nn.functional.normalize(self.random(tokens, self.module.h), dim=-1)
        return self.module.inputs_of(size * key_size(self.module.ridge) * keys)

    def keys_of(self, x: Tensor) -> Tensor:
        """Returns the keys [n, h] of the module for writing and reading, in float64."""
        return self.module.keys(x).detach().double().cpu()

    # The target generator

    @torch.no_grad()
    def generate(self, taps: Tensor, proj: Tensor) -> None:
        """Sets the target generator: one factor per channel and tap [d, k], and P [d, d]."""
        conv = self.module.conv
        values = torch.zeros_like(conv)
        if conv.shape[1] == 1:
            values[:, 0] = taps.to(values)
        else:
            channels = torch.arange(len(conv))
            values[channels, channels] = taps.to(values)
        conv.copy_(values)
        if self.module.proj is not None:
            self.module.proj.copy_(proj.to(self.module.proj))
        elif not torch.equal(proj, self.identity()):
            raise NotChecked("the module works without P")

    def neutral(self) -> None:
        """Sets V = X, with one tap of 1 and P = 1.

        The module's padding may shift V by some tokens.
        """
        taps = torch.zeros(self.module.d, self.kernel, dtype=torch.float64)
        taps[:, self.kernel // 2] = 1
        self.generate(taps, torch.eye(self.module.d, dtype=torch.float64))

    @contextmanager
    def generator_of(self, taps: Tensor, proj: Tensor) -> Iterator[None]:
        """Sets this target generator inside the context, and the neutral one on exit."""
        self.generate(taps, proj)
        try:
            yield
        finally:
            self.neutral()

    def identity(self) -> Tensor:
        return torch.eye(self.module.d, dtype=torch.float64)
