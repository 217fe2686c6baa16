"""Linear attention: loss −⟨S k, v⟩, one gradient step of size 1 a token, which adds v kᵀ. Theorem 1 of arXiv
2407.04620."""

from __future__ import annotations

import torch
from torch import Tensor

from .matrix import MatrixMemory
from .protocol import Tokens, chunks, gradient


class LinearAttention(MatrixMemory):
    """The state is a matrix S [B, H, d, d], zero at the start. No feature map, no normaliser, no decay."""

    def __init__(self, dim: int, heads: int = 1, chunk: int = 64) -> None:
        super().__init__(dim, heads, chunk)

    def tokens(self, x: Tensor) -> Tokens:
        q, k, v = self.qkv(x)
        return Tokens(q, k, v, k[..., :0])

    def update(self, state: Tensor, token: Tokens) -> Tensor:
        return state - gradient(lambda s: -(token.k @ s.mT * token.v), state)

    def parallel(self, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """A prefix sum over chunks; inside a chunk, causal attention without softmax."""
        read = []
        for q, k, v, _ in chunks(tokens, self.chunk):
            read.append(q @ state.mT + torch.tril(q @ k.mT) @ v)
            state = state + v.mT @ k
        return torch.cat(read, dim=2), state
