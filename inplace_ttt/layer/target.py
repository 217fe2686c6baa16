"""The target generator V = Conv(X) · P (paper §3.2) with every new parameter of a TTT layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..config import Conv
from ..errors import InPlaceTTTError
from ..layout import ChunkLayout
from ..ops import triton
from .whitened_keys import WhitenedKeys


class TargetGenerator(nn.Module):
    """V = Conv(X) · P: depthwise convolution inside each chunk, then P from the right, untransposed.

    conv [d, 1, k] and proj [d, d] are its parameters. The convolution is a correlation without bias; taps that fall
    outside the token's own chunk read zero. Tap j of a token t is t + j - k//2 ("lookahead") or t + j - k + 1 ("causal").
    With the extensions of the config, it also holds what was measured on a text: `mean` [d] and `gain` [], under which
    (X - mean) · gain stands in for X, and the whitened keys; and P starts from a text where it is calibrated.
    """

    mean: Tensor | None
    gain: Tensor | None

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        conv: Conv,
        *,
        standardised: bool = False,
        calibrated_proj: bool = False,
        keys: WhitenedKeys | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.first_tap = -(kernel_size // 2) if conv == "lookahead" else 1 - kernel_size
        self.conv = nn.Parameter(torch.zeros(dim, 1, kernel_size, **factory))
        self.proj = nn.Parameter(torch.zeros(dim, dim, **factory))
        self.register_buffer("mean", torch.zeros(dim, **factory) if standardised else None)
        self.register_buffer("gain", torch.zeros((), **factory) if standardised else None)
        self.keys = keys
        self.calibrated_proj = calibrated_proj
        self._is_measured = False

    @torch.no_grad()
    def reset_parameters(self, std: float, seed: int) -> None:
        """Conv zero, P diagonal N(0, std²) (paper appendix C.3): the model starts as its base, yet conv has a gradient.

        A calibrated P is zero until it is calibrated.
        """
        self.conv.zero_()
        self.proj.zero_()
        if not self.calibrated_proj:
            self.proj.diagonal().copy_(torch.randn(self.proj.shape[0], generator=torch.Generator().manual_seed(seed)) * std)

    def forward(self, x: Tensor, layout: ChunkLayout) -> Tensor:
        """Targets [B, T, d] of the source x [B, T, d], in the parameters' dtype."""
        x = x.to(self.conv.device, self.conv.dtype)
        self._check_measured()
        x = self.standardise(x)
        convolve = triton.chunk_conv if triton.preferred(x.device, x.dtype) else _ChunkConv.apply
        return convolve(x, self.conv, layout.chunk_ids(x.device), self.first_tap) @ self.proj

    def standardise(self, x: Tensor) -> Tensor:
        """(x - mean) · gain, or x as it is."""
        return x if self.mean is None or self.gain is None else (x - self.mean) * self.gain

    def _check_measured(self) -> None:
        """Once: what a text should have been measured for is no longer zero."""
        if not self._is_measured:
            measured = [*self.buffers(), *([self.proj] if self.calibrated_proj else [])]
            if any(not tensor.is_meta and not bool(tensor.any()) for tensor in measured):
                raise InPlaceTTTError(
                    "the extensions of this config are not measured yet; run inplace_ttt.calibrate(model, rows) on some text."
                )
            self._is_measured = True


class _ChunkConv(torch.autograd.Function):
    """Depthwise correlation whose taps do not leave the chunk; `chunk_ids` [B, T], -1 for padding, which gives zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
        ctx.save_for_backward(x, conv, chunk_ids)
        ctx.first_tap = first_tap
        out = torch.zeros_like(x)
        for tap, (here, there, inside) in enumerate(_taps(chunk_ids, first_tap, conv.shape[-1])):
            out[:, here].addcmul_(torch.where(inside, x[:, there], 0), conv[:, 0, tap])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, conv, chunk_ids = ctx.saved_tensors
        dx = torch.zeros_like(x)
        d_conv = torch.zeros_like(conv)
        for tap, (here, there, inside) in enumerate(_taps(chunk_ids, ctx.first_tap, conv.shape[-1])):
            grad = torch.where(inside, d_out[:, here], 0)
            dx[:, there].addcmul_(grad, conv[:, 0, tap])
            source = torch.where(inside, x[:, there], 0)  # padding may hold anything, NaN included
            d_conv[:, 0, tap] = (grad * source).sum(dim=(0, 1), dtype=torch.float32 if x.dtype != torch.float64 else None)
        return dx, d_conv, None, None


def _taps(chunk_ids: Tensor, first_tap: int, kernel_size: int) -> list[tuple[slice, slice, Tensor]]:
    """For each tap: the tokens that have it, the tokens it reads, and [B, n, 1] whether both are in one chunk."""
    length = chunk_ids.shape[1]
    taps = []
    for offset in range(first_tap, first_tap + kernel_size):
        reach = max(length - abs(offset), 0)
        here = slice(max(-offset, 0), max(-offset, 0) + reach)
        there = slice(max(offset, 0), max(offset, 0) + reach)
        inside = (chunk_ids[:, here] == chunk_ids[:, there]) & (chunk_ids[:, here] >= 0)
        taps.append((here, there, inside.unsqueeze(-1)))
    return taps
