"""Test-time training layers of Sun et al., "Learning to (Learn at Test Time)" (arXiv 2407.04620)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InPlaceTTTError
from ..ops.precision import state_dtype
from .network import LinearMap, NetworkMemory, fixed, moved, stepped, taken
from .protocol import Tokens, Weights, chosen, chunks, head_width

Form = Literal["paper", "public"]


class TTTState(NamedTuple):
    """The state of `TTT`; all weights are [B, H, out, in]."""

    start: Weights
    """The weights at the start of the open (unfinished) mini-batch, where its gradients are taken."""
    steps: Weights
    """Σ η(x_s) ∇_s over the open mini-batch's tokens s, zero before the first."""
    filled: int
    """Tokens in the open mini-batch."""


class TTT(NetworkMemory[TTTState]):
    """W_t = W' − c_t Σ_s η(x_s) ∇‖f(θ_K x_s; W') − θ_V x_s‖². A token reads f(θ_Q x_t; W_t).

    The sum is over the tokens s ≤ t of t's mini-batch. W' are the weights at the mini-batch's start. η(x) =
    eta_base · σ(θ_lr x) is one number per head, and c_t = 1.

    The form "public" adds the parts that only the published code has. η is divided by twice the head's width
    d. The token at place i ∈ 0…b−1 of a mini-batch has c_t = 1/(i + 1) + a learned number, and at least 0. q
    and k are rotated by i (RoPE, base 10,000). The maps of f have biases, which are updated like their
    weights. A layer norm (LN) precedes the output map. Neither form includes the code's convolutions and
    gate, which belong to its backbone.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        mini_batch: b, tokens whose gradients are taken together. At b ≥ T this is batch gradient descent.
        shapes: (out, in) of each linear map of f.
        eta_base: Largest rate, 0 or more.
        learned_rate: False sets η = eta_base, as in one row of the paper's ablation.
        residual_norm: False leaves LN and the residual out of f, as in one row of the paper's ablation.
        form: "paper" follows the paper's text, "public" the published code.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mini_batch: int,
        shapes: Sequence[tuple[int, int]],
        eta_base: float,
        learned_rate: bool,
        residual_norm: bool,
        form: Form,
    ) -> None:
        chosen("form", form, "paper", "public")
        if not 0 <= eta_base < math.inf:
            raise InPlaceTTTError(f"eta_base must be a number of at least 0, got {eta_base}.")
        self.public = form == "public"
        super().__init__(
            dim, heads, mini_batch, [(out, inner + self.public) for out, inner in shapes], std=0.02
        )
        self.to_rate = nn.Linear(dim, heads) if learned_rate else None
        self.norm = (
            nn.ParameterList([torch.ones(heads, 1, dim // heads), torch.zeros(heads, 1, dim // heads)])
            if residual_norm
            else None
        )
        self.eta_base = eta_base
        if self.public:
            if self.head_dim % 2:
                raise InPlaceTTTError(
                    "the public form rotates pairs of channels; choose heads of an even width, not "
                    f"{self.head_dim}."
                )
            self.eta_base = eta_base / (2 * self.head_dim)
            for weight in self.initial:
                nn.init.zeros_(weight[..., -1])  # the biases: `mapped` appends a 1 to each input
            self.learned_scale = nn.Parameter(torch.zeros(mini_batch))
            self.read_norm = nn.LayerNorm(dim, eps=1e-6)

    def initial_state(self, batch: int) -> TTTState:
        return self.opened(self.initial_weights(batch))

    def opened(self, start: Weights) -> TTTState:
        """Returns the state at the start of a mini-batch with weights `start`."""
        return TTTState(start, tuple(torch.zeros_like(w) for w in start), 0)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = self.qkv(x)
        exact = q[..., :1].to(state_dtype(x.dtype))
        rates = (
            torch.ones_like(exact)
            if self.to_rate is None
            else self.split(self.to_rate(x)).to(exact.dtype).sigmoid()
        )
        return Tokens(q, k, v, self.eta_base * rates)

    def scales(self, places: Tensor) -> Tensor:
        """Returns c [n, 1] for places [n] of the mini-batch."""
        plain = torch.ones(len(places), 1, dtype=state_dtype(self.to_q.weight.dtype), device=places.device)
        return (
            (plain / (places + 1)[:, None] + self.learned_scale[places][:, None]).clamp_min(0)
            if self.public
            else plain
        )

    def placed(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotates pairs of channels of x [B, H, n, d] by the tokens' places, [n], or [1] for all tokens."""
        if not self.public:
            return x
        pairs = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=x.dtype)
        angles = places[:, None] * 10_000.0 ** -(pairs / x.shape[-1])
        cos, sin, (even, odd) = angles.cos(), angles.sin(), x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def mapped(self, linear: LinearMap, x: Tensor) -> Tensor:
        """Applies one of f's linear maps to x [B, H, n, in]."""
        return linear(F.pad(x, (0, 1), value=1.0) if self.public else x)

    def residual(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns x + LN(z)."""
        if self.norm is None:
            return z
        weight, bias = self.norm
        return x + F.layer_norm(z, z.shape[-1:], eps=1e-6) * weight + bias

    def places(self, first: int, tokens: int = 1) -> Tensor:
        """Returns the places [n] of `tokens` tokens in their mini-batch, from `first` on."""
        return torch.arange(first, first + tokens, device=self.to_q.weight.device)

    def now(self, state: TTTState) -> Weights:
        """Returns the weights after the last token."""
        if not state.filled:
            return state.start
        scale = self.scales(self.places(state.filled - 1))
        return tuple(w - scale * s for w, s in zip(state.start, state.steps, strict=True))

    def update(self, state: TTTState, token: Tokens) -> TTTState:
        gradients = self.gradients(
            state.start, token._replace(k=self.placed(token.k, self.places(state.filled)))
        )
        return self.after(state, tuple(token.rates * g for g in gradients), 1)

    def query(self, state: TTTState, q: Tensor) -> Tensor:
        """Returns the reads of the weights after the last token. Every q has that token's place."""
        return self.f(fixed(self.now(state)), self.placed(q, self.places((state.filled - 1) % self.chunk)))

    def parallel(self, state: TTTState, tokens: Tokens) -> tuple[Tensor, TTTState]:
        """Computes the dual form, one mini-batch at a time.

        For each token, f uses every linear map after the steps of the tokens up to this token.
        """
        read = []
        for part in chunks(tokens, self.chunk, state.filled):
            n = part.k.shape[2]
            places = self.places(state.filled, n)
            part, scale = (
                part._replace(q=self.placed(part.q, places), k=self.placed(part.k, places)),
                self.scales(places),
            )
            steps = self.steps(state.start, part)
            mix = scale * torch.tril(part.rates.mT.expand(-1, -1, n, -1))
            before = (
                [moved(w, s, scale) for w, s in zip(state.start, state.steps, strict=True)]
                if state.filled
                else fixed(state.start)
            )
            read.append(
                self.f([stepped(base, step, mix) for base, step in zip(before, steps, strict=True)], part.q)
            )
            state = self.after(state, tuple(taken(step, part.rates) for step in steps), n)
        return torch.cat(read, dim=2), state

    def after(self, state: TTTState, steps: Weights, tokens: int) -> TTTState:
        """Returns the state after more tokens of the open mini-batch. Its b-th token closes it."""
        total = tuple(s + new for s, new in zip(state.steps, steps, strict=True)) if state.filled else steps
        if state.filled + tokens < self.chunk:
            return TTTState(state.start, total, state.filled + tokens)
        return self.opened(self.now(TTTState(state.start, total, self.chunk)))

    def output(self, y: Tensor) -> Tensor:
        if not self.public:
            return super().output(y)
        return self.to_out(self.read_norm(y.transpose(1, 2).flatten(2)))


class TTTLinear(TTT):
    """f(x) = x + LN(W x) with W [d, d]. The arguments are those of `TTT`."""

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        mini_batch: int = 16,
        eta_base: float = 1.0,
        learned_rate: bool = True,
        residual_norm: bool = True,
        form: Form = "paper",
    ) -> None:
        d = head_width(dim, heads)
        super().__init__(dim, heads, mini_batch, [(d, d)], eta_base, learned_rate, residual_norm, form)

    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        return self.residual(x, self.mapped(maps[0], x))


class TTTMLP(TTT):
    """f(x) = x + LN(W2 gelu(W1 x)) with W1 [4d, d] and W2 [d, 4d]. The arguments are those of `TTT`.

    The published code uses the tanh form of gelu.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        mini_batch: int = 16,
        eta_base: float = 0.1,
        learned_rate: bool = True,
        residual_norm: bool = True,
        form: Form = "paper",
    ) -> None:
        d = head_width(dim, heads)
        super().__init__(
            dim, heads, mini_batch, [(4 * d, d), (d, 4 * d)], eta_base, learned_rate, residual_norm, form
        )
        self.gelu = nn.GELU("tanh" if self.public else "none")

    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        first, second = maps
        return self.residual(x, self.mapped(second, self.gelu(self.mapped(first, x))))
