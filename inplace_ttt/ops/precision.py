"""The precision of the fast-weight state, and how it meets tensors of less."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others: a running sum in bf16 loses most of a small
    update."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def emulated(dtype: torch.dtype) -> bool:
    """Returns True if this processor lacks matrix instructions for `dtype`, so that float32 is several times
    faster."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(
        dtype
    )
    supported = None if name is None else getattr(torch.ops.mkldnn, name, None)
    return supported is not None and not supported()


_FELT = 10**7
"""Parameters from which on slow products are noticed."""


def note_on_emulation(dtype: torch.dtype, parameters: int, remedy: str) -> str | None:
    """Returns a warning if this machine emulates `dtype` and the model is large, else None. remedy: how to
    set float32."""
    if torch.cuda.is_available() or parameters < _FELT or not emulated(dtype):
        return None
    short = str(dtype).removeprefix("torch.")
    return (
        f"this processor has no instructions for {short}, and computes several times slower in it than "
        f"in float32; {remedy}."
    )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast would take the state to half precision; there is none on the meta device, where `plan` runs
    the op."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class _WholeFloat32:
    """What a GPU multiplies float32 in, while any thread is within: the setting is the process's, so the last
    one out brings it back."""

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
    """Products of float32 are of float32: without autocast, and on a GPU without the shorter numbers (TF32)
    that a trainer may have them multiplied in, of which no Cholesky factor could be made."""
    with without_autocast(device), _whole_float32 if device.type == "cuda" else contextlib.nullcontext():
        yield


def in_range(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A matrix [..., d, h] of the state in `dtype`, and the factor [..., 1, 1] that its products are to be
    multiplied by.

    Only float16 needs one, a power of two: what is read is ηS, and S itself may leave 6e-8 to 65,504.
    """
    if dtype != torch.float16:
        return matrix.to(dtype), None
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    factor = torch.exp2(torch.where(largest > 0, largest, 1.0).log2().ceil())
    return (matrix / factor).to(dtype), factor


def add_product_(out: Tensor, a: Tensor, matrix: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """out = beta · out + alpha · a @ matrix, in place, where `matrix` is in the state's dtype and the others
    in another."""
    narrow, factor = in_range(matrix, a.dtype)
    if factor is None:
        return out.addmm_(a, narrow, beta=beta, alpha=alpha)
    product = (a @ narrow).to(factor.dtype) * (alpha * factor)
    return out.copy_(product if beta == 0 else product + beta * out)
