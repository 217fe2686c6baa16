"""Where the kernels run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from . import interpreter

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, on any device, slowly; decided by TRITON_INTERPRET=1 at
import."""

if INTERPRETED:
    interpreter.mend()

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run on tensors of this device and dtype, as the end of a sentence; None if they
    do."""
    if dtype not in DTYPES:
        return f"they take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        here = "ROCm" if torch.version.hip is not None else device.type
        return f"they run on NVIDIA GPUs, not on {here} (TRITON_INTERPRET=1 runs them anywhere, slowly)"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"they need compute capability 8.0, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    return None


def has_tensor_copies(device: torch.device) -> bool:
    """Whether the device copies tiles by descriptor (Hopper's tensor memory accelerator and later)."""
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a large tile run at a time; the interpreter counts as an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@contextlib.contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Launch where x lies, also when another GPU is current, and multiply in the dtypes given, also under
    autocast."""
    with (
        torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext(),
        torch.autocast(x.device.type, enabled=False),
    ):
        yield


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of host memory that every stream may read; the host waits for the copy alone, not for what the
    device has to do."""
    if device.type != "cuda":
        return host
    with torch.cuda.stream(_copies(device)):
        copy = host.pin_memory().to(device, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    copy.record_stream(torch.cuda.current_stream(device))
    return copy


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
