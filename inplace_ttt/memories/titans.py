"""Titans' neural memory (Behrouz et al., arXiv 2501.00663), a fast MLP with momentum and decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InPlaceTTTError
from ..ops.precision import state_dtype
from .network import LinearMap, NetworkMemory, Step, fixed, stepped, taken
from .protocol import Tokens, Weights, chunks, head_width


class TitansState(NamedTuple):
    """The state of `Titans`; all weights are [B, H, out, in]."""

    start: Weights
    """M at the start of the open (unfinished) chunk, where its gradients are taken."""
    now: Weights
    """M after the last token."""
    surprise: Weights
    """S, the momentum."""
    filled: int
    """Tokens in the open chunk."""


class Titans(NetworkMemory[TitansState]):
    """S ← η S − θ ∇‖M(k) − v‖², M ← (1 − α) M + S. A token reads M(q) after its own update.

    k = norm(silu(x W_K)), v = silu(x W_V), q = norm(silu(x W_Q)). M is W x (layers = 1) or W2 silu(W1 x) with
    a hidden width of 2d (layers = 2), without bias. Gradients are taken at the weights of the chunk's start.
    Decay and momentum act at every token (§3.2). The paper does not specify the initial M. Here it is
    learned, like W0 in TTT.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        layers: Layers of M, 1 or 2.
        chunk: Tokens whose gradients are taken at the same weights.
        alpha: α, the decay per token, 0 to 1.
        eta: η, the momentum, 0 to 1.
        theta: θ, the step size, 0 or more.
        data_dependent: True computes α, η and θ as σ(x w + b), one number per head. They start at the given
            constants, which must then be strictly between 0 and 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        layers: int = 2,
        chunk: int = 16,
        alpha: float = 0.001,
        eta: float = 0.9,
        theta: float = 0.01,
        data_dependent: bool = False,
    ) -> None:
        if layers not in (1, 2):
            raise InPlaceTTTError(f"layers must be 1 or 2, got {layers}.")
        decays = 0 <= alpha <= 1 and 0 <= eta <= 1 and 0 <= theta < math.inf
        if not (all(0 < rate < 1 for rate in (alpha, eta, theta)) if data_dependent else decays):
            kind = (
                "between 0 and 1, where they depend on the data"
                if data_dependent
                else "0 to 1, theta 0 or more"
            )
            raise InPlaceTTTError(f"alpha, eta and theta must be {kind}, got {alpha}, {eta} and {theta}.")
        d = head_width(dim, heads)
        super().__init__(dim, heads, chunk, [(d, d)] if layers == 1 else [(2 * d, d), (d, 2 * d)])
        self.rates = (alpha, eta, theta)
        self.to_rates = nn.Linear(dim, 3 * heads) if data_dependent else None
        if self.to_rates is not None:
            nn.init.zeros_(self.to_rates.weight)
            with torch.no_grad():
                self.to_rates.bias.copy_(torch.tensor(self.rates).logit().repeat(heads))

    def initial_state(self, batch: int) -> TitansState:
        weights = self.initial_weights(batch)
        return TitansState(weights, weights, tuple(torch.zeros_like(w) for w in weights), 0)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = (F.silu(part) for part in self.qkv(x))
        dtype = state_dtype(x.dtype)  # a momentum of 0.999 rounds to 1 in bfloat16
        if self.to_rates is None:
            rates = x.new_tensor(self.rates, dtype=dtype).expand(1, 1, x.shape[1], 3)
        else:
            rates = self.split(self.to_rates(x)).to(dtype).sigmoid()
        return Tokens(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, rates)

    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        for layer, linear in enumerate(maps):
            x = linear(F.silu(x) if layer else x)
        return x

    def update(self, state: TitansState, token: Tokens) -> TitansState:
        alpha, eta, theta = token.rates.split(1, dim=-1)
        gradients = self.gradients(state.start, token)
        surprise = tuple(eta * s - theta * g for s, g in zip(state.surprise, gradients, strict=True))
        return self.after(
            state, tuple((1 - alpha) * m + s for m, s in zip(state.now, surprise, strict=True)), surprise, 1
        )

    def query(self, state: TitansState, q: Tensor) -> Tensor:
        return self.f(fixed(state.now), q)

    def parallel(self, state: TitansState, tokens: Tokens) -> tuple[Tensor, TitansState]:
        """Computes the dual form, one chunk at a time.

        Within a chunk, α, η and θ determine the coefficients of M, S and all gradients in advance.
        """
        read = []
        for part in chunks(tokens, self.chunk, state.filled):
            steps = self.steps(state.start, part)
            memory, surprise = unrolled(part.rates)
            maps = [
                stepped(memory.base(m, s), step, memory.steps)
                for m, s, step in zip(state.now, state.surprise, steps, strict=True)
            ]
            read.append(self.f(maps, part.q))
            now = tuple(
                memory.last(m, s, step) for m, s, step in zip(state.now, state.surprise, steps, strict=True)
            )
            momentum = tuple(
                surprise.last(m, s, step) for m, s, step in zip(state.now, state.surprise, steps, strict=True)
            )
            state = self.after(state, now, momentum, part.k.shape[2])
        return torch.cat(read, dim=2), state

    def after(self, state: TitansState, now: Weights, surprise: Weights, tokens: int) -> TitansState:
        filled = (state.filled + tokens) % self.chunk
        return TitansState(state.start if filled else now, now, surprise, filled)


class Unrolled(NamedTuple):
    """X_t = of_memory[t] M + of_surprise[t] S − Σ_s steps[t, s] ∇_s for the tokens t of a chunk.

    of_memory and of_surprise are [.., n, 1], steps is [.., n, n].
    """

    of_memory: Tensor
    of_surprise: Tensor
    steps: Tensor

    def base(self, memory: Tensor, surprise: Tensor) -> LinearMap:
        """Returns the map x → X_t x without the gradient steps of the chunk."""
        return lambda x: self.of_memory * (x @ memory.mT) + self.of_surprise * (x @ surprise.mT)

    def last(self, memory: Tensor, surprise: Tensor, step: Step) -> Tensor:
        """Returns X after the chunk's last token."""
        of_memory, of_surprise, steps = (x[..., -1:, :] for x in self)
        return of_memory * memory + of_surprise * surprise - taken(step, steps.mT)


def unrolled(rates: Tensor) -> tuple[Unrolled, Unrolled]:
    """Returns M and S at every token of a chunk as `Unrolled`, from its α, η and θ [.., n, 3]."""
    alpha, eta, theta = rates.split(1, dim=-1)
    decay, momentum = products(1 - alpha), products(eta)
    surprise = Unrolled(torch.zeros_like(eta), eta.cumprod(dim=-2), momentum * theta.mT)
    return Unrolled(
        (1 - alpha).cumprod(dim=-2), decay @ surprise.of_surprise, decay @ surprise.steps
    ), surprise


def products(factors: Tensor) -> Tensor:
    """Returns the product of the factors after s and up to t for t ≥ s, else 0: [.., n, 1] → [.., n, n]."""
    n = factors.shape[-2]
    after = torch.ones(n, n, dtype=torch.bool, device=factors.device).tril(-1)
    return torch.where(after, factors, 1.0).cumprod(dim=-2).tril()
