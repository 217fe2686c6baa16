"""What a call gives the device to do: torch operators that are no views and no allocations, and Triton
launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import jit

_NO_WORK = ("empty", "new_empty", "detach")


class _Operators(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.removeprefix("aten::")
        if not operator.is_view and not name.startswith(_NO_WORK):
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """The names of what is launched within, kernels without running them: outputs are what memory held."""
    names: list[str] = []

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: names.append(kernel.__name__)

    with mock.patch.object(jit.KernelInterface, "__getitem__", launch), _Operators(names):
        yield names
