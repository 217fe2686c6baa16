"""Binds the Triton kernels of `kernels`. It tests if they can run here, and calls them.

Shapes:

    z        [B, T, h]    half precision or float32, on CUDA
    v        [B, T, d]    z's dtype
    weight   [d, h]       z's dtype, or None
    state    [B, d, h]    float32
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..errors import InPlaceTTTError, how_to_install
from ..layout import ChunkLayout

_HALF = (torch.float16, torch.bfloat16)
_warned: set[str] = set()


@torch.compiler.assume_constant_result
def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why the kernels cannot run on this device and dtype, or None if they can.

    The reason is the end of a sentence.
    """
    try:
        from ..kernels import unsupported
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed ({how_to_install('kernels')})"
    return unsupported(device, dtype)


@torch.compiler.assume_constant_result
def preferred(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if "auto" selects the kernels: in half precision on CUDA, if they can run there.

    It warns once per reason if they cannot run. In float32, products take so long that the time to store the
    running matrix in memory is negligible, and cuBLAS is faster.
    """
    if device.type != "cuda" or dtype not in _HALF:
        return False
    reason = unavailable(device, dtype)
    if reason is not None and reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"The fast weight runs without its Triton kernels, which is slower: {reason}.", stacklevel=2
        )
    return reason is None


def require(device: torch.device, dtype: torch.dtype) -> None:
    """Raises InPlaceTTTError if the kernels cannot run on this device and dtype."""
    reason = unavailable(device, dtype)
    if reason is not None:
        raise InPlaceTTTError(f"backend 'triton' cannot run here: {reason}; use backend 'chunked' or 'auto'.")


def fuses(dtype: torch.dtype) -> bool:
    """Returns True for every dtype, since the kernels keep W0 + ηS as one matrix with stochastic rounding."""
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
    """Returns the outputs [B, T, d] and the final state [B, d, h], or None without `return_state`.

    The arguments are those of `inplace_ttt.ops.fast_weight`.
    """
    if isinstance(clip, Tensor):
        clip = clip.detach().to(z.device, torch.float32)
    elif clip is not None:
        clip = torch.full((), clip, dtype=torch.float32, device=z.device)
    out, state = torch.ops.inplace_ttt.fast_weight(
        z, v, weight, initial_state, clip, layout.spans, layout.chunk_size, float(eta), return_state
    )
    return out, state if return_state else None


def chunk_conv(x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
    """Computes the convolution of `inplace_ttt.ops.conv` in one pass.

    x [B, T, d], conv [d, 1, k], chunk_ids [B, T] int32.
    """
    return torch.ops.inplace_ttt.chunk_conv(x, conv, chunk_ids, first_tap)


def factors(device: torch.device) -> bool:
    """Returns True if the kernels can factor float32 matrices on this device."""
    return device.type == "cuda" and unavailable(device, torch.float32) is None


def inverse_factor(matrices: Tensor) -> Tensor:
    """Returns L⁻¹ [n, r, r] of the Cholesky factors L of float32 matrices [n, r, r], which are overwritten.

    The result is NaN for a matrix without a Cholesky factor.
    """
    from ..kernels import inverse_factor

    return inverse_factor(matrices)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two bfloat16 tensors whose sum is the float32 x [n, a, b], except for x's last 8 bits."""
    from ..kernels import halves

    return halves(x)


def reads_by_index(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if the kernel reads single keys from matrices of this dtype on this device."""
    return device.type == "cuda" and unavailable(device, dtype) is None


def add_indexed_reads(
    out: Tensor, z: Tensor, maps: Tensor, places: Tensor, rows: Tensor, factors: Tensor | None, scale: float
) -> None:
    """Adds scale · factor[row] · M[row] z[place] to out[place], as `inplace_ttt.ops.add_indexed_reads`."""
    from ..kernels import add_indexed_reads

    add_indexed_reads(out, z, maps, places, rows, factors, scale)
