"""The devices and dtypes on which the kernels run, and helpers that depend on the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from . import interpreter

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if Triton's interpreter runs the kernels, slowly and on any device. TRITON_INTERPRET=1 sets it."""

if INTERPRETED:
    interpreter.mend()

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why the kernels cannot run on this device and dtype, or None if they can.

    The reason is the end of a sentence.
    """
    if dtype not in DTYPES:
        return f"they support float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        here = "ROCm" if torch.version.hip is not None else device.type
        return f"they run on NVIDIA GPUs, not on {here} (TRITON_INTERPRET=1 runs them anywhere, slowly)"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            f"they need compute capability 8.0, but {torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    return None


def has_tensor_copies(device: torch.device) -> bool:
    """Returns True if the device copies tiles by descriptor (tensor memory accelerator, from Hopper on)."""
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of programs with a large tile that run concurrently.

    For the interpreter it is 132, the number of an H200.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@contextlib.contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """A context that launches kernels on x's device, also if another GPU is current, and disables autocast.

    Without autocast, products are computed in the dtypes of their operands.
    """
    with (
        torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext(),
        torch.autocast(x.device.type, enabled=False),
    ):
        yield
