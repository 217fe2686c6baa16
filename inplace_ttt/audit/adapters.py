"""The interface between the probes and a TTT layer.

A probe drives one TTT layer through `AuditedModule`. It passes inputs and a target source, receives outputs,
and can access the fast weight and the target generator's parameters. If a module cannot offer a method, that
method raises NotChecked. The items that need the method then have the verdict "not checked". To audit another
implementation, derive from `AuditedModule` and pass an instance to `audit_module`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .layer_tensors import LayerTensors
from .outcome import NotChecked
from .stream import Stream


class AuditedModule(LayerTensors):
    """Gives the probes access to one TTT layer. Derive from it to audit another implementation.

    `forward`, `keys`, `fast_weight`, `conv` and `proj` are required. The probes use the other members if they
    are overridden.

    A method that the module cannot offer raises NotChecked. The items that need it then have the verdict
    "not checked".

    Attributes:
        name: name of the layer in the report.
        input_size: features of an input token.
        d: features of an output token.
        h: features of a key.
        chunk_size: tokens per chunk, as the module declares it.
        eta: η as the module declares it, or None if unknown.
        ridge: λ if reads use the least-squares map of all writes, None for the paper's sum.
        whitening: description of the keys that replace Z, or None if the keys are Z.
        writes_generated: True if tokens that are read one at a time are meant to write; None if unknown.
        detaches_target: True if the target is meant to pass no gradient to its source; None if unknown.

    Examples:
        The example of `forward` audits this layer.

        >>> import torch
        >>> from inplace_ttt.audit import AuditedModule, NotChecked, audit_module
        >>> class Sum(AuditedModule):
        ...     name, input_size, d, h, chunk_size, eta = "a plain sum", 48, 16, 48, 12, 1.0
        ...     fast_weight = torch.randn(16, 48, dtype=torch.float64)
        ...     conv = torch.ones(16, 1, 1, dtype=torch.float64)  # one tap, of the token itself
        ...     proj = torch.eye(16, dtype=torch.float64)
        ...     def keys(self, x):
        ...         return x
        ...     def forward(self, x, target, *, documents=None, padding=None):
        ...         if documents is not None or padding is not None:
        ...             raise NotChecked("the layer takes whole rows")
        ...         weight, outputs = self.fast_weight, []
        ...         for z, v in zip(x.split(self.chunk_size, 1), target.split(self.chunk_size, 1)):
        ...             outputs.append(z @ weight.mT)
        ...             weight = weight + v.mT @ z
        ...         return torch.cat(outputs, 1)
        >>> layer = Sum()
        >>> x, target = torch.randn(1, 40, 48).double(), torch.randn(1, 40, 16).double()
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
    detaches_target: bool | None = None

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Computes the outputs of whole sequences.

        Args:
            x: inputs [B, T, input].
            target: target source [B, T, d].
            documents: lengths of the documents packed in each row, or None for one document per row.
            padding: bool [B, T], True where a token is padding, or None for rows without padding.

        Returns:
            The outputs [B, T, d].

        Raises:
            NotChecked: if the module lacks an argument for `documents` or `padding`.

        Examples:
            >>> layer.forward(x, target).shape
            torch.Size([1, 40, 16])
            >>> audit_module(layer).undeclared  # the audit calls `forward` and `keys`
            ['chunk-size', 'conv-size', 'conv-lookahead']
        """

    @abstractmethod
    def keys(self, x: Tensor) -> Tensor:
        """Computes the keys, which are Z unless the module has other keys.

        Args:
            x: inputs [..., input].

        Returns:
            The keys [..., h].

        Examples:
            >>> layer.keys(x).shape
            torch.Size([1, 40, 48])
        """

    def features(self, x: Tensor) -> Tensor:
        """Computes Z, the input of the down-projection.

        Args:
            x: inputs [..., input].

        Returns:
            Z [..., h].

        Examples:
            >>> layer.features(x).equal(layer.keys(x))  # the default
            True
        """
        return self.keys(x)

    @property
    def tau(self) -> float | None:
        """Declared bound on the norm of a chunk's delta at inference; None if unknown or not clipped."""
        return None

    @property
    def own_chunk(self) -> int:
        """Tokens per chunk outside the audit; `chunk_size` may be shorter for the probes."""
        return self.chunk_size

    def inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws inputs whose keys are linearly independent.

        Args:
            n: number of tokens, at most h.
            generator: generator of the random numbers.

        Returns:
            The inputs [n, input], float64.

        Examples:
            >>> layer.inputs(12, torch.Generator().manual_seed(0)).shape
            torch.Size([12, 48])
        """
        return torch.randn(n, self.input_size, generator=generator, dtype=torch.float64)

    def inputs_of(self, keys: Tensor) -> Tensor:
        """Finds inputs that have given keys.

        Args:
            keys: the keys [n, h].

        Returns:
            The inputs [n, input].

        Raises:
            NotChecked: if the adapter does not find them.

        Examples:
            >>> class Invertible(Sum):
            ...     def inputs_of(self, keys):
            ...         return keys  # the keys of `Sum` are its inputs
            >>> Invertible().inputs_of(torch.eye(48)).shape
            torch.Size([48, 48])
        """
        raise NotChecked("the adapter does not find inputs for given keys")

    def targets(self, target: Tensor) -> Tensor:
        """Computes V for one document.

        Args:
            target: target source [T, d].

        Returns:
            V [T, d].

        Raises:
            NotChecked: if the adapter does not show the targets.

        Examples:
            >>> class Open(Sum):
            ...     def targets(self, target):
            ...         return target  # the convolution and P of `Sum` are identities
            >>> Open().targets(target[0]).shape
            torch.Size([40, 16])
        """
        raise NotChecked("the adapter does not show the targets")

    def train(self, mode: bool) -> None:
        """Sets training or evaluation mode.

        Args:
            mode: True for training.

        Raises:
            NotChecked: if the adapter does not switch between them.

        Examples:
            >>> try:
            ...     layer.train(True)
            ... except NotChecked as error:
            ...     print(error)
            the adapter does not switch between training and evaluation
        """
        raise NotChecked("the adapter does not switch between training and evaluation")

    def stream(self) -> Stream:
        """Begins a stream, to read a sequence in pieces.

        Returns:
            The stream, before its first token.

        Raises:
            NotChecked: if the module takes whole sequences only.

        Examples:
            >>> try:
            ...     layer.stream()
            ... except NotChecked as error:
            ...     print(error)
            the module takes whole sequences only, so streaming cannot be compared
        """
        raise NotChecked("the module takes whole sequences only, so streaming cannot be compared")

    @contextmanager
    def resized(self, chunk_size: int) -> Iterator[AuditedModule]:
        """Changes the chunk size inside the context.

        Args:
            chunk_size: tokens per chunk.

        Yields:
            The same layer with that chunk size.

        Raises:
            NotChecked: if the adapter does not change it.

        Examples:
            >>> from contextlib import contextmanager
            >>> class Resizable(Sum):
            ...     @contextmanager
            ...     def resized(self, chunk_size):
            ...         before, self.chunk_size = self.chunk_size, chunk_size
            ...         try:
            ...             yield self
            ...         finally:
            ...             self.chunk_size = before
            >>> with Resizable().resized(8) as smaller:
            ...     smaller.chunk_size
            8
        """
        raise NotChecked("the adapter does not change the chunk size")
        yield self

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        """Switches the layer to float32 inside the context, to measure the effect of rounding.

        Outside it, the probes run in the widest dtype that the layer has.

        Yields:
            The same layer in float32.

        Raises:
            NotChecked: if the adapter has one precision only.

        Examples:
            >>> try:
            ...     with layer.single_precision() as rounded:
            ...         rounded.forward(x.float(), target.float())
            ... except NotChecked as error:
            ...     print(error)
            the adapter has one precision only
        """
        raise NotChecked("the adapter has one precision only")
        yield self

    @contextmanager
    def deployed(self) -> Iterator[AuditedModule]:
        """Switches the layer, inside the context, to the precision of the module given to the adapter.

        Yields:
            The same layer in that precision.

        Raises:
            NotChecked: if the adapter does not report that precision.

        Examples:
            >>> try:
            ...     with layer.deployed() as given:
            ...         given.forward(x, target)
            ... except NotChecked as error:
            ...     print(error)
            the adapter does not report the precision in which the layer is used
        """
        raise NotChecked("the adapter does not report the precision in which the layer is used")
        yield self

    def ranks(self, x: Tensor, target: Tensor, parts: int) -> Tensor:
        """Computes outputs of ranks that share the rows, each with an equal number of complete chunks.

        Args:
            x: inputs [B, T, input].
            target: target source [B, T, d].
            parts: number of ranks.

        Returns:
            The outputs [B, T, d].

        Raises:
            NotChecked: if the module cannot spread a sequence over ranks.

        Examples:
            >>> try:
            ...     layer.ranks(x[:, :24], target[:, :24], parts=2)
            ... except NotChecked as error:
            ...     print(error)
            the module cannot spread a sequence over ranks
        """
        raise NotChecked("the module cannot spread a sequence over ranks")
