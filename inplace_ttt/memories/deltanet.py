"""DeltaNet, with the loss ½‖S k − v‖² and one gradient step of size β per token.

The rule is from arXiv 2102.11174, the parallel form from arXiv 2406.06484.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .matrix import MatrixMemory
from .protocol import Tokens, chunks, gradient


class DeltaNet(MatrixMemory):
    """S ← S − β (S k − v) kᵀ with β = σ(x w), one rate per head; S [B, H, d, d] is zero at the start.

    q and k are normalized after SiLU, as in arXiv 2406.06484. A step with β ≤ 1 then never overshoots.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        chunk: Tokens per chunk of the parallel form.
    """

    kernel = "chunk_delta_rule"

    def __init__(self, dim: int, heads: int = 1, chunk: int = 64) -> None:
        super().__init__(dim, heads, chunk)
        self.to_beta = nn.Linear(dim, heads)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = self.qkv(x)
        return Tokens(
            F.normalize(F.silu(q), dim=-1),
            F.normalize(F.silu(k), dim=-1),
            v,
            self.split(self.to_beta(x).sigmoid()),
        )

    def update(self, state: Tensor, token: Tokens) -> Tensor:
        return state - token.rates * gradient(lambda s: 0.5 * (token.k @ s.mT - token.v) ** 2, state)

    def parallel(self, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Solves one triangular system per chunk.

        Within a chunk S_t = S_0 + Σ_{s≤t} u_s k_sᵀ, where u = β (v − S_{t−1} k) solves the system.
        """
        read = []
        for q, k, v, beta in chunks(tokens, self.chunk):
            overlap = torch.tril(beta * (k @ k.mT), -1)
            u = torch.linalg.solve_triangular(
                overlap, beta * (v - k @ state.mT), upper=False, unitriangular=True
            )
            read.append(q @ state.mT + torch.tril(q @ k.mT) @ u)
            state = state + u.mT @ k
        return torch.cat(read, dim=2), state
