"""The precision of the fast-weight state, and its products with tensors of lower precision."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for float64 inputs, else float32.

    A running sum in bfloat16 would lose most of a small update.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def emulated(dtype: torch.dtype) -> bool:
    """Returns True if this processor lacks matrix instructions for `dtype`.

    Float32 is then several times faster.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(
        dtype
    )
    supported = None if name is None else getattr(torch.ops.mkldnn, name, None)
    return supported is not None and not supported()


_LARGE = 10**7
"""Number of parameters from which a user notices slow products."""


def note_on_emulation(dtype: torch.dtype, parameters: int, remedy: str) -> str | None:
    """Returns a warning if this machine emulates `dtype` and the model is large, else None.

    Args:
        dtype: The model's dtype.
        parameters: Number of the model's parameters.
        remedy: The end of the warning, which explains how to set float32.
    """
    if torch.cuda.is_available() or parameters < _LARGE or not emulated(dtype):
        return None
    short = str(dtype).removeprefix("torch.")
    return (
        f"this processor lacks instructions for {short}, and computes several times more slowly in it than "
        f"in float32; {remedy}."
    )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context without autocast. Autocast would compute the state in half precision.

    The meta device, on which `plan` runs the op, does not support autocast. The context then does nothing.
    """
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class _WholeFloat32:
    """A context, shared by threads, in which a GPU multiplies float32 in full precision.

    torch's setting applies to the whole process. So the first thread to enter sets it, and the last thread to
    leave restores it.
    """

    def __init__(self) -> None:
        self.lock, self.within, self.before = Lock(), 0, None

    def __enter__(self) -> None:
        settings, name, full = self._setting()
        with self.lock:
            if self.within == 0:
                self.before = getattr(settings, name)
                setattr(settings, name, full)
            self.within += 1

    def __exit__(self, *error: object) -> None:
        settings, name, _ = self._setting()
        with self.lock:
            self.within -= 1
            if self.within == 0:
                setattr(settings, name, self.before)

    def _setting(self) -> tuple[Any, str, object]:
        settings = torch.backends.cuda.matmul
        if hasattr(settings, "fp32_precision"):
            return settings, "fp32_precision", "ieee"
        return settings, "allow_tf32", False  # before torch 2.9


_whole_float32 = _WholeFloat32()


@contextlib.contextmanager
def in_full_precision(device: torch.device) -> Iterator[None]:
    """A context in which float32 products are computed in float32, without autocast or TF32.

    A trainer may have enabled TF32 on a GPU. TF32 products are too inexact for a Cholesky factor.
    """
    with without_autocast(device), _whole_float32 if device.type == "cuda" else contextlib.nullcontext():
        yield


def in_range(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Converts a state's matrix to a narrower dtype, with a factor that keeps float16 in range.

    Only float16 needs the factor, a power of two. Reads use ηS, but S itself may leave float16's range of
    6e-8 to 65,504.

    Args:
        matrix: A matrix [..., d, h] of the state.
        dtype: The dtype to convert to.

    Returns:
        The converted matrix, and the factor [..., 1, 1] by which its products must be multiplied (None: 1).
    """
    if dtype != torch.float16:
        return matrix.to(dtype), None
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    factor = torch.exp2(torch.where(largest > 0, largest, 1.0).log2().ceil())
    return (matrix / factor).to(dtype), factor


def add_product_(out: Tensor, a: Tensor, matrix: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Sets out = beta · out + alpha · a @ matrix in place, for a `matrix` in the state's dtype.

    `out` and `a` have one dtype, which may be narrower.
    """
    narrow, factor = in_range(matrix, a.dtype)
    if factor is None:
        return out.addmm_(a, narrow, beta=beta, alpha=alpha)
    product = (a @ narrow).to(factor.dtype) * (alpha * factor)
    return out.copy_(product if beta == 0 else product + beta * out)
