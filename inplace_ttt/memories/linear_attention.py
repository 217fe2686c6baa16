"""Linear attention as a memory, with the loss −⟨S k, v⟩.

One gradient step of size 1 per token adds v kᵀ. The equivalence is Theorem 1 of arXiv 2407.04620.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .matrix import MatrixMemory
from .protocol import Tokens, chunks, gradient


class LinearAttention(MatrixMemory):
    """S ← S + v kᵀ without feature map, normalization or decay; S [B, H, d, d] is zero at the start.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        chunk: Tokens per chunk of the parallel form.
    """

    def __init__(self, dim: int, heads: int = 1, chunk: int = 64) -> None:
        super().__init__(dim, heads, chunk)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = self.qkv(x)
        return Tokens(q, k, v, k[..., :0])

    def update(self, state: Tensor, token: Tokens) -> Tensor:
        return state - gradient(lambda s: -(token.k @ s.mT * token.v), state)

    def parallel(self, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Computes a prefix sum over chunks, and causal attention without softmax inside a chunk."""
        read = []
        for q, k, v, _ in chunks(tokens, self.chunk):
            read.append(q @ state.mT + torch.tril(q @ k.mT) @ v)
            state = state + v.mT @ k
        return torch.cat(read, dim=2), state
