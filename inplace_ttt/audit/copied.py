"""Adapters for third-party modules in memory. The probes run on copies of the modules."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import AuditedModule
from .outcome import NotChecked
from .stream import Stream


class CopiedModule(AuditedModule):
    """Base of the adapters of modules in memory. It copies a third-party gated MLP, and widens it to float64.

    Derived classes implement `_in(dtype)`, which builds the adapter in another precision.
    """

    def __init__(self, module: nn.Module, name: str | None, dtype: torch.dtype) -> None:
        self._given, self._dtype = module, dtype
        self.module = copy.deepcopy(module).to(dtype)
        self.name = name or type(module).__name__
        self.train(False)

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    @abstractmethod
    def _in(self, dtype: torch.dtype) -> AuditedModule:
        """Returns a new adapter of the given module, in another precision."""

    def _part(self, name: str) -> Any:
        return getattr(self.module, name)

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        yield self._in(torch.float32)

    @contextmanager
    def deployed(self) -> Iterator[AuditedModule]:
        yield self._in(next(self._given.parameters()).dtype)


class ReferenceMLP(CopiedModule):
    """Adapts a module with the reference code's signature `mlp(x, t)`, for `audit_module`.

    `x` is the MLP's input [B, T, d], and `t` is the target source [B, T, d]. The module returns its output
    [B, T, d]. It accepts neither documents nor masks. The adapter works on a copy of the module.

    Args:
        mlp: a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`. Its target generator is
            `ttt_conv` (a depthwise nn.Conv1d) and `ttt_proj` (weight [d, d], multiplied from the right as
            stored).
        chunk_size: tokens per chunk, as set in the module's config.
        eta: η as set in the module's config, or None if unknown.
        name: name of the module in the report; the class name by default.
        stream: a function that receives the copied module and returns a new stream; None if the module cannot
            read in pieces.
        dtype: dtype of the copy.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> from inplace_ttt.audit import ReferenceMLP, audit_module
        >>> class Mean(LlamaMLP):
        ...     def __init__(self):
        ...         super().__init__(LlamaConfig(hidden_size=32, intermediate_size=48))
        ...         self.ttt_conv = nn.Conv1d(32, 32, 5, padding=2, groups=32, bias=False)
        ...         self.ttt_proj = nn.Linear(32, 32, bias=False)
        ...     def forward(self, x, t):
        ...         z, weight = self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight
        ...         outputs = []
        ...         for keys, source in zip(z.split(12, 1), t.split(12, 1)):
        ...             outputs.append(keys @ weight.mT)
        ...             v = self.ttt_conv(source.mT).mT @ self.ttt_proj.weight
        ...             weight = weight + v.mT @ keys / 12  # the paper adds the sum
        ...         return torch.cat(outputs, 1)
        >>> audit_module(ReferenceMLP(Mean(), chunk_size=12, eta=1.0)).undeclared
        ['loss-sum', 'chunk-size']
    """

    def __init__(
        self,
        mlp: nn.Module,
        chunk_size: int,
        eta: float | None = None,
        *,
        name: str | None = None,
        stream: Callable[[nn.Module], Stream] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(mlp, name, dtype)
        self._stream = stream
        self.chunk_size, self.eta = chunk_size, eta
        self.input_size, (self.d, self.h) = self._part("gate_proj").in_features, self.fast_weight.shape

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        if documents is not None:
            raise NotChecked(
                "the module takes no document boundaries, so documents packed in one row share its state"
            )
        if padding is not None:
            raise NotChecked("the module takes no padding mask, so padding in a row is written like text")
        return self.module(x.to(self._dtype), target.to(self._dtype))

    def keys(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        return self._part("act_fn")(self._part("gate_proj")(x)) * self._part("up_proj")(x)

    @property
    def fast_weight(self) -> Tensor:
        return self._part("down_proj").weight

    @property
    def conv(self) -> Tensor:
        return self._part("ttt_conv").weight

    @property
    def proj(self) -> Tensor | None:
        return None if self._part("ttt_proj") is None else self._part("ttt_proj").weight

    @property
    def bias(self) -> Tensor | None:
        return self._part("down_proj").bias

    def is_fast(self, name: str) -> bool:
        return name == "down_proj.weight" or name in dict(self.module.named_buffers())

    def stream(self) -> Stream:
        return super().stream() if self._stream is None else self._stream(self.module)

    def _in(self, dtype: torch.dtype) -> AuditedModule:
        return ReferenceMLP(
            self._given, self.chunk_size, self.eta, name=self.name, stream=self._stream, dtype=dtype
        )
