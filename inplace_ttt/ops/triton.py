"""Binds the Triton kernels of `kernels`: whether they can run here, and the call."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..errors import InPlaceTTTError, how_to_install
from ..layout import ChunkLayout

_HALF = (torch.float16, torch.bfloat16)
_said: set[str] = set()


@torch.compiler.assume_constant_result
def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run on tensors of this device and dtype, as the end of a sentence; None if they
    do."""
    try:
        from ..kernels import unsupported
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed ({how_to_install('kernels')})"
    return unsupported(device, dtype)


@torch.compiler.assume_constant_result
def preferred(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether "auto" takes the kernels: in half precision on CUDA, where they can run. Says once why they
    cannot.

    In float32 a product takes so much longer that the running matrix in memory costs nothing, and cuBLAS is
    the faster.
    """
    if device.type != "cuda" or dtype not in _HALF:
        return False
    reason = unavailable(device, dtype)
    if reason is not None and reason not in _said:
        _said.add(reason)
        warnings.warn(
            f"The fast weight runs without its Triton kernels, which is slower: {reason}.", stacklevel=2
        )
    return reason is None


def require(device: torch.device, dtype: torch.dtype) -> None:
    """Raise where the kernels do not run."""
    reason = unavailable(device, dtype)
    if reason is not None:
        raise InPlaceTTTError(f"backend 'triton' cannot run here: {reason}; use backend 'chunked' or 'auto'.")


def fuses(dtype: torch.dtype) -> bool:
    """Whether W0 of this dtype can be the running weight: always, since the kernels keep W0 + ηS with
    stochastic rounding."""
    return True


def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: ChunkLayout,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, d] and, if asked for, the final state [B, d, h]; arguments as in
    `inplace_ttt.ops.fast_weight`."""
    if isinstance(clip, Tensor):
        clip = clip.detach().to(z.device, torch.float32)
    elif clip is not None:
        clip = torch.full((), clip, dtype=torch.float32, device=z.device)
    out, state = torch.ops.inplace_ttt.fast_weight(
        z, v, weight, initial_state, clip, layout.spans, layout.chunk_size, float(eta), return_state
    )
    return out, state if return_state else None


def chunk_conv(x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
    """The convolution of `inplace_ttt.ops.conv`, in one pass; x [B, T, d], conv [d, 1, k], chunk_ids [B,
    T]."""
    return torch.ops.inplace_ttt.chunk_conv(x, conv, chunk_ids, first_tap)


def factors(device: torch.device) -> bool:
    """Whether the kernels factor float32 matrices here: on CUDA, where they can run."""
    return device.type == "cuda" and unavailable(device, torch.float32) is None


def inverse_factor(matrices: Tensor) -> Tensor:
    """L⁻¹ [n, r, r] of the Cholesky factors of float32 matrices [n, r, r], which are overwritten; NaN where
    there is none."""
    from ..kernels import inverse_factor

    return inverse_factor(matrices)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two of bfloat16 that add up to x [n, a, b] float32, but for its last 8 bits."""
    from ..kernels import halves

    return halves(x)
