"""Test-time training layers of Sun et al., "Learning to (Learn at Test Time)" (arXiv 2407.04620)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .network import LinearMap, NetworkMemory, fixed, stepped, taken
from .protocol import Tokens, Weights, chunks


class TTTState(NamedTuple):
    start: Weights
    """The weights at the start of the open mini-batch, where its gradients are taken."""
    now: Weights
    """The weights after the last token."""
    filled: int
    """Tokens in the open mini-batch."""


class TTT(NetworkMemory[TTTState]):
    """W_t = W_{t−1} − η(x_t) ∇‖f(θ_K x_t; W_t') − θ_V x_t‖², W_t' at the start of t's mini-batch; reads f(θ_Q x_t; W_t).

    η(x) = eta_base · σ(θ_lr x), a number a head. The paper's text has no more in it; its public code divides η by the
    head's width, and the step of a mini-batch's token by its place there, adds biases, and norms what is read.

    mini_batch: tokens b whose gradients are taken together. At b ≥ T this is batch gradient descent.
    learnt_rate, residual_norm: off, η = eta_base and f has neither LN nor residual. Rows of the paper's ablation.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mini_batch: int,
        shapes: Sequence[tuple[int, int]],
        eta_base: float,
        learnt_rate: bool,
        residual_norm: bool,
    ) -> None:
        super().__init__(dim, heads, mini_batch, shapes, std=0.02)
        self.eta_base = eta_base
        self.to_rate = nn.Linear(dim, heads) if learnt_rate else None
        self.norm = nn.ParameterList([torch.ones(heads, 1, dim // heads), torch.zeros(heads, 1, dim // heads)]) if residual_norm else None

    def initial_state(self, batch: int) -> TTTState:
        weights = self.initial_weights(batch)
        return TTTState(weights, weights, 0)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = self.qkv(x)
        rates = torch.ones_like(q[..., :1]) if self.to_rate is None else self.split(self.to_rate(x).sigmoid())
        return Tokens(q, k, v, self.eta_base * rates)

    def residual(self, x: Tensor, z: Tensor) -> Tensor:
        """x + LN(z)."""
        if self.norm is None:
            return z
        weight, bias = self.norm
        return x + F.layer_norm(z, z.shape[-1:], eps=1e-6) * weight + bias

    def update(self, state: TTTState, token: Tokens) -> TTTState:
        gradients = self.gradients(state.start, token)
        return self.after(state, tuple(w - token.rates * g for w, g in zip(state.now, gradients, strict=True)), 1)

    def query(self, state: TTTState, q: Tensor) -> Tensor:
        return self.f(fixed(state.now), q)

    def parallel(self, state: TTTState, tokens: Tokens) -> tuple[Tensor, TTTState]:
        """Dual form, a mini-batch at a time: f reads every map with the steps of the tokens up to its own."""
        read = []
        for part in chunks(tokens, self.chunk, state.filled):
            steps = self.steps(state.start, part)
            n = part.k.shape[2]
            mix = torch.tril(part.rates.mT.expand(-1, -1, n, -1))
            maps = [stepped(base, step, mix) for base, step in zip(fixed(state.now), steps, strict=True)]
            read.append(self.f(maps, part.q))
            state = self.after(state, tuple(w - taken(step, part.rates) for w, step in zip(state.now, steps, strict=True)), n)
        return torch.cat(read, dim=2), state

    def after(self, state: TTTState, now: Weights, tokens: int) -> TTTState:
        filled = (state.filled + tokens) % self.chunk
        return TTTState(state.start if filled else now, now, filled)


class TTTLinear(TTT):
    """f(x) = x + LN(W x), W [d, d]."""

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        mini_batch: int = 16,
        eta_base: float = 1.0,
        learnt_rate: bool = True,
        residual_norm: bool = True,
    ) -> None:
        d = dim // heads
        super().__init__(dim, heads, mini_batch, [(d, d)], eta_base, learnt_rate, residual_norm)

    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        return self.residual(x, maps[0](x))


class TTTMLP(TTT):
    """f(x) = x + LN(W2 gelu(W1 x)), W1 [4d, d] and W2 [d, 4d]."""

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        mini_batch: int = 16,
        eta_base: float = 0.1,
        learnt_rate: bool = True,
        residual_norm: bool = True,
    ) -> None:
        d = dim // heads
        super().__init__(dim, heads, mini_batch, [(4 * d, d), (d, 4 * d)], eta_base, learnt_rate, residual_norm)

    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        return self.residual(x, maps[1](F.gelu(maps[0](x))))
