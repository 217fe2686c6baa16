"""The tensors of an audited layer, and contexts that change or restore the layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class LayerTensors(ABC):
    """Gives the probes a layer's tensors, and contexts that change or restore the layer.

    `AuditedModule` derives from it.
    """

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

    def tensors(self) -> dict[str, Tensor]:
        """Lists every parameter and buffer. A probe compares them before and after a forward.

        Returns:
            The tensors by name.

        Examples:
            >>> list(layer.tensors())
            ['fast weight', 'conv', 'proj']
        """
        found = {"fast weight": self.fast_weight, "conv": self.conv, "proj": self.proj}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def is_fast(self, name: str) -> bool:
        """Checks if a tensor is the fast weight or holds its state.

        Args:
            name: its name in `tensors`.

        Returns:
            True for the fast weight and for every tensor that holds its state.

        Examples:
            >>> [name for name in layer.tensors() if layer.is_fast(name)]
            ['fast weight']
        """
        return name == "fast weight"

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Sets W0 to zero inside the context, if rounding next to W0 would hide the writes.

        Override it for a module that runs in one low precision only. The default changes nothing.

        Yields:
            None.

        Examples:
            >>> with layer.bare():
            ...     bool(layer.fast_weight.any())  # the default keeps W0
            True
        """
        yield

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Disables the module's own clip of a chunk's write inside the context, if the module can do so.

        Yields:
            None.

        Examples:
            >>> with layer.unclipped():
            ...     layer.forward(x, target).shape
            torch.Size([1, 40, 16])
        """
        yield

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Restores on exit every tensor that a run inside the context changed.

        A module that keeps its state in a parameter makes such changes.

        Yields:
            None.

        Examples:
            >>> before = layer.fast_weight.clone()
            >>> with layer.guarded():
            ...     _ = layer.fast_weight.zero_()
            >>> layer.fast_weight.equal(before)
            True
        """
        before = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        try:
            yield
        finally:
            for name, tensor in self.tensors().items():
                if not torch.equal(tensor.detach(), before[name]):
                    tensor.data.copy_(before[name])
