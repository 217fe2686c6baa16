"""The common interface of memories. A memory has a state, an update rule and a query rule.

The update learns to map a key k to a value v. The query reads the memory with q.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InPlaceTTTError
from ..ops.precision import state_dtype, without_autocast

State = TypeVar("State")
Weights = tuple[Tensor, ...]
"""The matrices of a fast network, first layer first, each [B, H, out, in]."""


class Tokens(NamedTuple):
    """The inputs of a memory for n tokens.

    Attributes:
        q: Queries [B, H, n, d].
        k: Keys [B, H, n, d].
        v: Values [B, H, n, d].
        rates: Rates of the update [B or 1, H or 1, n, r]; r = 0 for an update without rates.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rates: Tensor

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(x[:, :, start:stop] for x in self))


class Memory(nn.Module, ABC, Generic[State]):
    """A layer x [B, T, dim] → y [B, T, dim]. Its state is passed in and returned, and never stored in it.

    A memory implements six methods: `tokens` (the memory's inputs from x), `initial_state`, `update` (one
    token), `query`, `parallel`, and `output`. `primal` defines the result, token by token.

    A call of the layer runs the parallel form, for any length. It also serves for streaming: call the layer
    on consecutive pieces of a sequence, and pass the state on. A piece may end anywhere, because the state
    carries the data of the open (unfinished) chunk.

    The state and all arithmetic on it are float32 (float64 for float64 inputs).
    """

    reads_first: ClassVar[bool] = False
    """True if a token reads before its own update (apply, then update), False if it reads after it."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """Returns the state before the first token. Gradients flow into its learned part."""

    @abstractmethod
    def tokens(self, x: Tensor) -> Tokens:
        """Returns the memory's inputs for x [B, T, dim]."""

    @abstractmethod
    def update(self, state: State, token: Tokens) -> State:
        """Returns the state after one token (n = 1)."""

    @abstractmethod
    def query(self, state: State, q: Tensor) -> Tensor:
        """Returns the state's reads [B, H, n, d] for queries q [B, H, n, d]."""

    @abstractmethod
    def parallel(self, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        """Returns the reads of n tokens, [B, H, n, d], and the state after them."""

    @abstractmethod
    def output(self, y: Tensor) -> Tensor:
        """Maps the reads [B, H, T, d] to the layer's output [B, T, dim]."""

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Computes the layer's output and the state after it, in the parallel form.

        Args:
            x: Inputs [B, T, dim], at least one token.
            state: The state before x; None starts from `initial_state`.

        Returns:
            The output [B, T, dim] in x's dtype, and the state after the last token.

        Raises:
            InPlaceTTTError: If x is not [B, T, dim] with at least one token, or its batch size differs from
                the state's.
        """
        return self._run(self.parallel, x, state)

    def primal(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Computes the same as `forward` token by token, with every gradient of the update by autograd.

        It is the definition of the layer. Arguments and results are those of `forward`.
        """
        return self._run(self._token_by_token, x, state)

    def recall(self, x: Tensor, state: State) -> Tensor:
        """Returns the layer's output [B, T, dim] for x [B, T, dim], by reads of `state` without a write."""
        _refuse_other_batch(x, state)
        q = self.tokens(x).q
        with without_autocast(x.device):
            y = self.query(state, q.to(state_dtype(x.dtype)))
        return self.output(y.to(x.dtype))

    def _run(
        self, form: Callable[[State, Tokens], tuple[Tensor, State]], x: Tensor, state: State | None
    ) -> tuple[Tensor, State]:
        if x.dim() != 3 or not x.shape[1]:
            raise InPlaceTTTError(f"x must be [B, T, dim] with at least one token, got {list(x.shape)}.")
        _refuse_other_batch(x, state)
        tokens = self.tokens(x)
        with without_autocast(x.device):
            accurate = Tokens(*(t.to(state_dtype(x.dtype)) for t in tokens))
            y, state = form(self.initial_state(len(x)) if state is None else state, accurate)
        return self.output(y.to(x.dtype)), state

    def _token_by_token(self, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        read = []
        for t in range(tokens.q.shape[2]):
            token = tokens.part(t, t + 1)
            if self.reads_first:
                read.append(self.query(state, token.q))
            state = self.update(state, token)
            if not self.reads_first:
                read.append(self.query(state, token.q))
        return torch.cat(read, dim=2), state


class HeadMemory(Memory[State]):
    """A memory with heads.

    Linear maps of x without bias compute q, k and v. Another linear map computes the output from the reads of
    all heads.
    """

    def __init__(self, dim: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.chunk = heads, head_width(dim, heads), checked(chunk)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(project(x)) for project in (self.to_q, self.to_k, self.to_v))
        return q, k, v

    def split(self, x: Tensor) -> Tensor:
        """Reshapes [B, T, H·d] to [B, H, T, d]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def output(self, y: Tensor) -> Tensor:
        return self.to_out(y.transpose(1, 2).flatten(2))

    def zeros(self, batch: int, *shape: int) -> Tensor:
        """Returns zeros [B, H, *shape] on the parameters' device, in the state's dtype."""
        like = self.to_q.weight
        return like.new_zeros(batch, self.heads, *shape, dtype=state_dtype(like.dtype))

    def learned(self, batch: int, *weights: Tensor) -> Weights:
        """Expands parameters [H, out, in] to the weights of every sequence, in the state's dtype."""
        return tuple(w.to(state_dtype(w.dtype)).expand(batch, *w.shape) for w in weights)


def head_width(dim: int, heads: int) -> int:
    """Returns the width of a head. Raises InPlaceTTTError if dim is not a multiple of heads."""
    if dim < 1 or heads < 1 or dim % heads:
        raise InPlaceTTTError(
            f"dim {dim} does not divide into {heads} heads; choose a number of heads that divides dim."
        )
    return dim // heads


def chosen(name: str, value: Any, *known: str) -> None:
    """Raises InPlaceTTTError if an option's value is not one of the known ones."""
    if value not in known:
        raise InPlaceTTTError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}.")


def checked(chunk: int) -> int:
    """Returns a chunk's length. Raises InPlaceTTTError if it is below 1."""
    if not isinstance(chunk, int) or chunk < 1:
        raise InPlaceTTTError(f"a chunk (or mini-batch) must hold at least 1 token, got {chunk}.")
    return chunk


def gradient(loss: Callable[..., Tensor], weights: Any) -> Any:
    """Returns the gradient of the summed loss at `weights`, by autograd. The result is differentiable."""
    return torch.func.grad(lambda w: loss(w).sum())(weights)


def chunks(tokens: Tokens, size: int, filled: int = 0) -> Iterator[Tokens]:
    """Yields the tokens in pieces that end where chunks of `size` tokens end.

    filled: number of tokens of the first chunk that came before.
    """
    start, length = 0, tokens.q.shape[2]
    while start < length:
        stop = min(start + size - filled, length)
        yield tokens.part(start, stop)
        start, filled = stop, 0


def _refuse_other_batch(x: Tensor, state: Any) -> None:
    """Raises InPlaceTTTError if the state's batch size differs from x's.

    Broadcasting would otherwise let every row read one sequence's state, or turn one row into several.
    """
    rows = {leaf.shape[0] for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)}
    if rows - {len(x)}:
        raise InPlaceTTTError(
            f"the state has {max(rows - {len(x)})} sequences, but x has {len(x)}; pass the state of these "
            "sequences."
        )


def detached(state: State) -> State:
    """Returns the state without its autograd history, for truncated backpropagation."""
    return pytree.tree_map_only(Tensor, Tensor.detach, state)


def state_bytes(state: Any) -> int:
    """Returns the bytes of a state's tensors."""
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
