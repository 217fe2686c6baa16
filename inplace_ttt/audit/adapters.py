"""The interface between the probes and a TTT layer, and adapters for third-party modules.

A probe drives one TTT layer through `AuditedModule`. It passes inputs and a target source, receives outputs,
and has handles on the fast weight and on the target generator's parameters. A method that the module cannot
offer raises NotChecked, and the items that need it result in "not checked". To audit another implementation,
derive from `AuditedModule` and pass an instance to `audit_module`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .outcome import NotChecked


class Stream(Protocol):
    """A sequence that is read in pieces.

    Optional members:

    - `state`: the tensor that it carries.
    - `tensors()`: its tensors by name, if it works on other tensors than the module's own.
    - `take_back(n)`: removes its last n tokens.
    - `saved()`: returns a stream restored from the data that a save would write.
    """

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        """Returns outputs [1, n, d] of the next n tokens; inputs x [1, n, input], target source [1, n, d]."""

    def reset(self) -> None:
        """Clears the stream, so that another sequence can begin."""


class AuditedModule(ABC):
    """One TTT layer.

    `forward`, `keys`, `fast_weight`, `conv` and `proj` are required. The probes use the other members if they
    are overridden.

    Attributes:
        name: for the report.
        input_size: features of an input token.
        d: features of an output token.
        h: features of a key.
        chunk_size: tokens per chunk, as the module declares it.
        eta: η as the module declares it, or None if unknown.
        ridge: λ if reads come from the least-squares map of all writes, None for the paper's sum.
        whitening: description of the keys that replace Z, or None if the keys are Z.
    """

    name: str
    input_size: int
    d: int
    h: int
    chunk_size: int
    eta: float | None = None
    ridge: float | None = None
    whitening: str | None = None
    writes_generated: bool | None = None
    """True if tokens that are read one at a time are meant to write; None if unknown."""
    detaches_target: bool | None = None
    """True if the target is meant to pass no gradient to its source; None if unknown."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Returns the outputs [B, T, d] of whole sequences.

        Args:
            x: inputs [B, T, input].
            target: target source [B, T, d].
            documents: lengths of the documents packed in each row, or None for one document per row.
            padding: bool [B, T], True where a token is padding, or None for rows without padding.

        Raises:
            NotChecked: if the module lacks an argument for `documents` or `padding`.
        """

    @abstractmethod
    def keys(self, x: Tensor) -> Tensor:
        """Returns the keys [..., h] of inputs [..., input]: Z, unless the module has other keys."""

    def features(self, x: Tensor) -> Tensor:
        """Returns Z [..., h], the input of the down-projection, of inputs [..., input]."""
        return self.keys(x)

    @property
    @abstractmethod
    def fast_weight(self) -> Tensor:
        """The model's own down-projection W0 [d, h], which should be the fast weight."""

    @property
    @abstractmethod
    def conv(self) -> Tensor:
        """Kernel of the target's convolution: [d, 1, k] if depthwise, [d, d, k] if dense."""

    @property
    @abstractmethod
    def proj(self) -> Tensor | None:
        """W_target [d, d], as stored; None if the target is the convolution's output."""

    @property
    def bias(self) -> Tensor | None:
        """Bias of the down-projection [d], or None."""
        return None

    @property
    def tau(self) -> float | None:
        """Declared bound on the norm of a chunk's delta at inference; None if unknown or not clipped."""
        return None

    @property
    def own_chunk(self) -> int:
        """Tokens per chunk outside the audit; `chunk_size` may be shorter for the probes."""
        return self.chunk_size

    def tensors(self) -> dict[str, Tensor]:
        """Returns every parameter and buffer by name, so that a probe can detect changes by a forward."""
        found = {"fast weight": self.fast_weight, "conv": self.conv, "proj": self.proj}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def is_fast(self, name: str) -> bool:
        """Returns True if a tensor of `tensors` is the fast weight or holds its state."""
        return name == "fast weight"

    def inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """Returns inputs [n, input] whose keys are linearly independent (n ≤ h)."""
        return torch.randn(n, self.input_size, generator=generator, dtype=torch.float64)

    def inputs_of(self, keys: Tensor) -> Tensor:
        """Returns inputs [n, input] that have these keys [n, h]."""
        raise NotChecked("the adapter does not find inputs for given keys")

    def targets(self, target: Tensor) -> Tensor:
        """Returns V [T, d] of the target source [T, d] of one document."""
        raise NotChecked("the adapter does not show the targets")

    def train(self, mode: bool) -> None:
        """Sets training or evaluation mode."""
        raise NotChecked("the adapter does not switch between training and evaluation")

    def stream(self) -> Stream:
        """Returns a new stream, to read a sequence in pieces."""
        raise NotChecked("the module takes whole sequences only, so streaming cannot be compared")

    @contextmanager
    def resized(self, chunk_size: int) -> Iterator[AuditedModule]:
        """Yields the same layer with another chunk size."""
        raise NotChecked("the adapter does not change the chunk size")
        yield self

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        """Yields the same layer in float32, to measure the effect of rounding.

        The other probes run in the widest dtype that the layer has.
        """
        raise NotChecked("the adapter has one precision only")
        yield self

    @contextmanager
    def deployed(self) -> Iterator[AuditedModule]:
        """Yields the same layer in the precision of the module that the adapter was given."""
        raise NotChecked("the adapter does not report the precision in which the layer is used")
        yield self

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Sets W0 to zero inside the context, if rounding beside W0 would hide the writes.

        That is so for a module with one, low precision. The default changes nothing.
        """
        yield

    def ranks(self, x: Tensor, target: Tensor, parts: int) -> Tensor:
        """Returns outputs [B, T, d] of `parts` ranks, each with an equal number of complete chunks."""
        raise NotChecked("the module cannot spread a sequence over ranks")

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Disables the module's own clip of a delta inside the context, if the module can do so."""
        yield

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Restores on exit every tensor that a run inside the context changed.

        A module that keeps its state in a parameter makes such changes.
        """
        before = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        try:
            yield
        finally:
            for name, tensor in self.tensors().items():
                if not torch.equal(tensor.detach(), before[name]):
                    tensor.data.copy_(before[name])


class CopiedModule(AuditedModule):
    """Base of the adapters of modules in memory: a third-party gated MLP, copied and widened to float64.

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
    """A module with the signature of the public reference code: `mlp(x, t)` on whole rows.

    It takes neither documents nor masks.

    Args:
        mlp: a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`. Its target generator is
            `ttt_conv` (a depthwise nn.Conv1d) and `ttt_proj` (weight [d, d], multiplied from the right as
            stored).
        chunk_size: tokens per chunk, as set in the module's config.
        eta: η as set in the module's config, or None if unknown.
        name: for the report; the class name by default.
        stream: returns a new stream over the copied module that it receives; None if the module cannot read
            in pieces.
        dtype: dtype of the copy.
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
                "the module takes no document boundaries: documents packed in one row share its state"
            )
        if padding is not None:
            raise NotChecked("the module takes no padding mask: padding in a row is written like text")
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
