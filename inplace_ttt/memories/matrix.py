"""The base class of memories whose state is one matrix. On a GPU it calls flash-linear-attention."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from .protocol import HeadMemory, Tokens


class MatrixMemory(HeadMemory[Tensor]):
    """A memory whose state is a matrix S [B, H, d, d], zero at the start; it reads S q.

    `kernel` is the name of the function of flash-linear-attention that computes the same memory. That
    function is called if the package is installed and x is in half precision on CUDA.
    """

    kernel: ClassVar[str | None] = None

    def initial_state(self, batch: int) -> Tensor:
        return self.zeros(batch, self.head_dim, self.head_dim)

    def query(self, state: Tensor, q: Tensor) -> Tensor:
        return q @ state.mT

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.kernel is None or not (
            x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and find_spec("fla")
        ):
            return super().forward(x, state)
        y, state = flash(self.kernel, self.tokens(x), self.initial_state(len(x)) if state is None else state)
        return self.output(y), state


def flash(kernel: str, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Calls one of flash-linear-attention's chunked forms.

    That package stores tokens as [B, n, H, d], and the state transposed as [key, value].
    """
    import fla.ops

    q, k, v, rates = (x.transpose(1, 2) for x in tokens)
    rates = rates.squeeze(-1) if kernel == "chunk_delta_rule" else rates
    y, state = getattr(fla.ops, kernel)(
        q, k, v, rates, scale=1.0, initial_state=state.mT.contiguous(), output_final_state=True
    )
    return y.transpose(1, 2), state.mT
