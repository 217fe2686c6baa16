"""What the probes ask of a module: one protocol, with adapters for modules of others.

A probe drives one TTT layer through `AuditedModule`: inputs and a target source in, outputs out, plus handles
on the fast weight and on the target generator's parameters. What a module cannot do is left out, and the
items that need it say "not checked". To audit another implementation, derive from `AuditedModule` and pass an
instance to `audit_module`.
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

    It may have `state`, the tensor that it carries, and `tensors()`, where it works on other tensors than the
    module's own; `take_back(n)`, which makes its last n tokens unread, and `saved()`, a stream that goes on
    from what it would save.
    """

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        """Outputs [1, n, d] of the next n tokens: inputs [1, n, input], target source [1, n, d]."""

    def reset(self) -> None:
        """Forget the sequence, for another one to begin."""


class AuditedModule(ABC):
    """One TTT layer. `forward`, `keys`, `fast_weight`, `conv` and `proj` are needed; the rest is used where
    given.

    name: for the report. input_size, d, h: features of an input token, of an output token, and of a key.
    chunk_size: tokens a chunk, as the module means it. eta: η as the module means it, or None where unknown.
    ridge: λ where what is read is the least-squares map of all that was written, None for the paper's sum.
    whitening: what keys are in the place of Z, in words; None where they are Z.
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
    """Whether tokens that are read one at a time are meant to write; None where unknown."""
    detaches_target: bool | None = None
    """Whether the target is meant to give its source no gradient; None where unknown."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, T, d] of whole sequences: inputs x [B, T, input], target source [B, T, d].

        documents: lengths of the documents packed in each row. padding: bool [B, T], True where a token is
            padding.
        Both are None for plain rows; raise NotChecked for what the module has no argument for.
        """

    @abstractmethod
    def keys(self, x: Tensor) -> Tensor:
        """What is written under [..., h], of inputs [..., input]: Z, unless keys are something else."""

    def features(self, x: Tensor) -> Tensor:
        """Z [..., h], what the down-projection multiplies, of inputs [..., input]."""
        return self.keys(x)

    @property
    @abstractmethod
    def fast_weight(self) -> Tensor:
        """The model's own down-projection W0 [d, h], which is to be the fast weight."""

    @property
    @abstractmethod
    def conv(self) -> Tensor:
        """Kernel of the target's convolution: [d, 1, k] where depthwise, [d, d, k] where dense."""

    @property
    @abstractmethod
    def proj(self) -> Tensor | None:
        """W_target [d, d], as stored; None where the target is the convolution's output."""

    @property
    def bias(self) -> Tensor | None:
        """What the down-projection adds [d]."""
        return None

    @property
    def tau(self) -> float | None:
        """The norm that a chunk's delta is meant to be held to at inference; None where unknown or not
        clipped."""
        return None

    @property
    def own_chunk(self) -> int:
        """Tokens a chunk when nobody audits; differs from `chunk_size` where the adapter shortens chunks for
        the probes."""
        return self.chunk_size

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer, to see what a forward changes."""
        found = {"fast weight": self.fast_weight, "conv": self.conv, "proj": self.proj}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def is_fast(self, name: str) -> bool:
        """Whether a tensor of `tensors` is the fast weight or a place for its state, and not a slow
        weight."""
        return name == "fast weight"

    def inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """Inputs [n, input] whose keys are linearly independent (n ≤ h)."""
        return torch.randn(n, self.input_size, generator=generator, dtype=torch.float64)

    def inputs_of(self, keys: Tensor) -> Tensor:
        """Inputs [n, input] that have these keys [n, h]."""
        raise NotChecked("the adapter does not find inputs for given keys")

    def targets(self, target: Tensor) -> Tensor:
        """V [T, d] of the target source [T, d] of one document."""
        raise NotChecked("the adapter does not show the targets")

    def train(self, mode: bool) -> None:
        """Training or evaluation mode."""
        raise NotChecked("the adapter does not switch between training and evaluation")

    def stream(self) -> Stream:
        """A fresh sequence to be read in pieces."""
        raise NotChecked("the module takes whole sequences only, so there is no streaming to compare")

    @contextmanager
    def resized(self, chunk_size: int) -> Iterator[AuditedModule]:
        """The same layer with another chunk size."""
        raise NotChecked("the adapter does not change the chunk size")
        yield self

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        """The same layer in float32, for what rounding does; the other probes run in the widest type it
        has."""
        raise NotChecked("the adapter has one precision only")
        yield self

    @contextmanager
    def deployed(self) -> Iterator[AuditedModule]:
        """The same layer in the precision that it was given in."""
        raise NotChecked("the adapter does not know what precision the layer is used in")
        yield self

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Within it W0 is zero, where writes beside it would be lost in the only precision that the module
        has."""
        yield

    def ranks(self, x: Tensor, target: Tensor, parts: int) -> Tensor:
        """Outputs as computed by `parts` ranks, each with an equal share of whole chunks."""
        raise NotChecked("the module has no way to spread a sequence over ranks")

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Within it the module's own clip of a delta is off, if that can be chosen."""
        yield

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within it a run may change tensors, as a state kept in a parameter would; they are put back
        afterwards."""
        before = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        try:
            yield
        finally:
            for name, tensor in self.tensors().items():
                if not torch.equal(tensor.detach(), before[name]):
                    tensor.data.copy_(before[name])


class CopiedModule(AuditedModule):
    """Common ground of adapters of modules in memory: a gated MLP of somebody else's, copied and widened to
    float64.

    Those derived from it say how they are made in another precision: `_in(dtype)`.
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
        """The given module anew, in another precision."""

    def _part(self, name: str) -> Any:
        return getattr(self.module, name)

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        yield self._in(torch.float32)

    @contextmanager
    def deployed(self) -> Iterator[AuditedModule]:
        yield self._in(next(self._given.parameters()).dtype)


class ReferenceMLP(CopiedModule):
    """A module with the signature of the public reference code: `mlp(x, t)` on whole rows, without documents
    or masks.

    mlp: has `gate_proj`, `up_proj`, `down_proj`, `act_fn`, and the target generator as `ttt_conv` (a
        depthwise nn.Conv1d)
    and `ttt_proj` (its weight [d, d] multiplied from the right as stored). chunk_size, eta: as its config
    sets them.
    stream: makes a fresh stream over the copied module that it is given, if the module can be read in pieces.
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
