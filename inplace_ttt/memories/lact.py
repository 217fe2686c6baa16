"""LaCT, large-chunk test-time training (Zhang et al., arXiv 2505.23884).

The memory is a SwiGLU network of fast weights, which Muon updates once per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InPlaceTTTError
from .network import LinearMap, NetworkMemory, fixed, taken
from .protocol import Tokens, Weights, chosen, chunks, head_width

Muon = Literal["usual", "public"]
COEFFICIENTS: dict[Muon, tuple[tuple[float, float, float], ...]] = {
    "usual": ((3.4445, -4.7750, 2.0315),) * 5,
    "public": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients of each Newton-Schulz step.

"usual" is Muon's quintic. "public" are the five quintics of LaCT's published code, which bring every singular
value nearer to 1.
"""


class LaCTState(NamedTuple):
    """The state of `LaCT`; all weights are [B, H, out, in]."""

    weights: Weights
    """Weights that the open (unfinished) chunk reads. Its gradients are also taken at these weights."""
    gradients: Weights
    """Σ rate · ∇ over the open chunk's tokens. Its update needs no more than this sum."""
    filled: int
    """Tokens in the open chunk."""


class LaCT(NetworkMemory[LaCTState]):
    """f(x) = W2 (silu(W1 x) ∘ W3 x), loss −⟨f(k), v⟩, W ← norm(W − Muon(Σ η_t ∇_t)) once per chunk.

    A chunk is read first, then written. q, k, v pass through silu, and q and k are then normalized. η =
    softplus(x w + b) is one number per head, token and matrix. The norm scales every row of W to the length
    that it has in the initial weights. Muon is five Newton-Schulz steps. Two parts of the paper are left out:
    momentum, and the window attention on the same q, k, v around the memory.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        chunk: Tokens that are written together. The paper uses 2,048 to 1M; shorter chunks leave a GPU idle.
        expand: Hidden width of f in multiples of the head's width.
        base_rate: η at the start of training where x w = 0. It must be above 0.
        muon: Coefficients of the Newton-Schulz steps. "usual" are Muon's, "public" those of LaCT's code.
    """

    reads_first = True

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        chunk: int = 2048,
        expand: int = 2,
        base_rate: float = 0.01,
        muon: Muon = "usual",
    ) -> None:
        d = head_width(dim, heads)
        chosen("muon", muon, *COEFFICIENTS)
        if not 0 < base_rate < math.inf or expand < 1:
            raise InPlaceTTTError(
                f"base_rate must be above 0, and expand must be at least 1, got {base_rate} and {expand}."
            )
        self.muon = COEFFICIENTS[muon]
        super().__init__(dim, heads, chunk, [(expand * d, d), (expand * d, d), (d, expand * d)])
        self.to_rates = nn.Linear(dim, 3 * heads)
        nn.init.constant_(self.to_rates.bias, math.log(math.expm1(base_rate)))  # softplus⁻¹

    def initial_state(self, batch: int) -> LaCTState:
        weights = self.initial_weights(batch)
        return LaCTState(weights, tuple(torch.zeros_like(w) for w in weights), 0)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = (F.silu(part) for part in self.qkv(x))
        return Tokens(
            F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, self.split(F.softplus(self.to_rates(x)))
        )

    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        gate, up, down = maps
        return down(F.silu(gate(x)) * up(x))

    def loss(self, y: Tensor, v: Tensor) -> Tensor:
        return -y * v

    def query(self, state: LaCTState, q: Tensor) -> Tensor:
        return self.f(fixed(state.weights), q)

    def update(self, state: LaCTState, token: Tokens) -> LaCTState:
        rates = token.rates.split(1, dim=-1)
        return self.after(
            state,
            tuple(rate * g for rate, g in zip(rates, self.gradients(state.weights, token), strict=True)),
            1,
        )

    def parallel(self, state: LaCTState, tokens: Tokens) -> tuple[Tensor, LaCTState]:
        read = []
        for part in chunks(tokens, self.chunk, state.filled):
            read.append(self.query(state, part.q))
            steps, rates = self.steps(state.weights, part), part.rates.split(1, dim=-1)
            state = self.after(
                state,
                tuple(taken(step, rate) for step, rate in zip(steps, rates, strict=True)),
                part.k.shape[2],
            )
        return torch.cat(read, dim=2), state

    def after(self, state: LaCTState, gradients: Weights, tokens: int) -> LaCTState:
        """Returns the state after more tokens of the open chunk. The chunk's last token writes it."""
        total = tuple(sum_ + g for sum_, g in zip(state.gradients, gradients, strict=True))
        if state.filled + tokens < self.chunk:
            return LaCTState(state.weights, total, state.filled + tokens)
        weights = (
            F.normalize(w - orthogonal(g, self.muon), dim=-1) * start.norm(dim=-1, keepdim=True)
            for w, g, start in zip(state.weights, total, self.initial_weights(1), strict=True)
        )
        return LaCTState(tuple(weights), tuple(torch.zeros_like(g) for g in total), 0)


def orthogonal(
    g: Tensor, coefficients: Sequence[tuple[float, float, float]] = COEFFICIENTS["usual"]
) -> Tensor:
    """Approximates UVᵀ of g = UΣVᵀ [.., out, in] by Newton-Schulz steps, as Muon does.

    The usual coefficients bring the singular values Σ into 0.7 to 1.2.
    """
    wide = g.shape[-2] <= g.shape[-1]
    x = g if wide else g.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in coefficients:
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x if wide else x.mT
