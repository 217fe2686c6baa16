"""Gated linear attention (arXiv 2312.06635), which is linear attention with a matrix that decays.

Each key channel has its own learned rate of decay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InPlaceTTTError
from .matrix import MatrixMemory
from .protocol import Tokens, chunks, gradient


class GatedLinearAttention(MatrixMemory):
    """S ← S diag(g) + v kᵀ with g = σ(x W)^(1/16); S [B, H, d, d] is zero at the start.

    The rates of `Tokens` are log g.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        chunk: Tokens per chunk of the parallel form.
        temperature: The gate is σ(x W)^(1/temperature). It must be above 0.
    """

    kernel = "chunk_gla"

    def __init__(self, dim: int, heads: int = 1, chunk: int = 16, temperature: float = 16.0) -> None:
        super().__init__(dim, heads, chunk)
        if not temperature > 0:
            raise InPlaceTTTError(f"temperature must be above 0, got {temperature}.")
        self.temperature = temperature
        self.to_gate = nn.Linear(dim, dim)

    def tokens(self, x: Tensor) -> Tokens:
        return Tokens(*self.qkv(x), self.split(F.logsigmoid(self.to_gate(x)) / self.temperature))

    def update(self, state: Tensor, token: Tokens) -> Tensor:
        return state * token.rates.exp() - gradient(lambda s: -(token.k @ s.mT * token.v), state)

    def parallel(self, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Computes the decay between every pair of tokens in a chunk, [C, C, d]. Chunks must be short.

        The decay never exceeds 1, so it never overflows.
        """
        read = []
        for q, k, v, log_gate in chunks(tokens, self.chunk):
            total = log_gate.cumsum(dim=2)
            # product of the gates after s, up to t
            between = (total.unsqueeze(3) - total.unsqueeze(2)).clamp(max=0).exp()
            scores = torch.einsum("...td,...sd,...tsd->...ts", q, k, between)
            read.append((q * total.exp()) @ state.mT + torch.tril(scores) @ v)
            last = total[:, :, -1:]
            state = state * last.exp() + v.mT @ (k * (last - total).exp())
        return torch.cat(read, dim=2), state
