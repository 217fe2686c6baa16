"""The one frame: a memory has a state, an update rule (learn that key k stands for value v) and a query rule
(read with q)."""

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
    """What a memory is told of n tokens: q, k and v [B, H, n, d], rates [B or 1, H or 1, n, r] of the update,
    if it has any."""

    q: Tensor
    k: Tensor
    v: Tensor
    rates: Tensor

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(x[:, :, start:stop] for x in self))


class Memory(nn.Module, ABC, Generic[State]):
    """A layer x [B, T, dim] → y [B, T, dim] that carries a state, which is a value: passed in, handed out,
    never kept.

    A system says what `tokens` it makes of x, what `initial_state` is, how one token makes the `update`, how
    a `query` reads, and its `parallel` form. `primal`, token by token, is the law. The layer itself is the
    parallel form, over any length; called on pieces of a sequence with the state handed on, it is the
    streaming form, and a piece may end
    anywhere: the state carries what an open chunk needs.

    The state and all arithmetic on it are float32 (float64 for float64 inputs).
    """

    reads_first: ClassVar[bool] = False
    """Whether a token is read before its own update (apply, then update) or after it."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state before the first token. Gradients flow into its learnt part."""

    @abstractmethod
    def tokens(self, x: Tensor) -> Tokens:
        """What the memory is told of x [B, T, dim]."""

    @abstractmethod
    def update(self, state: State, token: Tokens) -> State:
        """The state after one token (n = 1)."""

    @abstractmethod
    def query(self, state: State, q: Tensor) -> Tensor:
        """What the state answers to q [B, H, n, d]: [B, H, n, d]."""

    @abstractmethod
    def parallel(self, state: State, tokens: Tokens) -> tuple[Tensor, State]:
        """What n tokens read, [B, H, n, d], and the state after them."""

    @abstractmethod
    def output(self, y: Tensor) -> Tensor:
        """What is read, [B, H, T, d], as the layer's output [B, T, dim]."""

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The layer's output [B, T, dim] and the state after it."""
        return self._run(self.parallel, x, state)

    def primal(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The law: `forward` token by token, with every gradient of the update by autograd."""
        return self._run(self._token_by_token, x, state)

    def recall(self, x: Tensor, state: State) -> Tensor:
        """What the state answers to x [B, T, dim], with nothing written."""
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
    """A memory with heads: linear maps of x give q, k and v, one maps what all heads read to the output; none
    has a bias."""

    def __init__(self, dim: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.chunk = heads, head_width(dim, heads), checked(chunk)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(project(x)) for project in (self.to_q, self.to_k, self.to_v))
        return q, k, v

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H·d] → [B, H, T, d]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def output(self, y: Tensor) -> Tensor:
        return self.to_out(y.transpose(1, 2).flatten(2))

    def zeros(self, batch: int, *shape: int) -> Tensor:
        """Zeros [B, H, *shape] where the parameters are, in the state's dtype."""
        like = self.to_q.weight
        return like.new_zeros(batch, self.heads, *shape, dtype=state_dtype(like.dtype))

    def learnt(self, batch: int, *weights: Tensor) -> Weights:
        """Parameters [H, out, in] as the weights of every sequence, in the state's dtype."""
        return tuple(w.to(state_dtype(w.dtype)).expand(batch, *w.shape) for w in weights)


def head_width(dim: int, heads: int) -> int:
    """The width of a head, refused where dim does not divide into heads."""
    if dim < 1 or heads < 1 or dim % heads:
        raise InPlaceTTTError(f"dim {dim} does not divide into {heads} heads; choose heads that divide it.")
    return dim // heads


def chosen(name: str, value: Any, *known: str) -> None:
    """Refuse an option whose value is none of the known ones."""
    if value not in known:
        raise InPlaceTTTError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}.")


def checked(chunk: int) -> int:
    """A chunk's length, refused below 1."""
    if not isinstance(chunk, int) or chunk < 1:
        raise InPlaceTTTError(f"a chunk (or mini-batch) must hold at least 1 token, got {chunk}.")
    return chunk


def gradient(loss: Callable[..., Tensor], weights: Any) -> Any:
    """∇ of the summed loss in `weights`, by autograd, and itself differentiable."""
    return torch.func.grad(lambda w: loss(w).sum())(weights)


def chunks(tokens: Tokens, size: int, filled: int = 0) -> Iterator[Tokens]:
    """The tokens in pieces that end where chunks of `size` do; `filled` tokens of the first chunk came
    before."""
    start, length = 0, tokens.q.shape[2]
    while start < length:
        stop = min(start + size - filled, length)
        yield tokens.part(start, stop)
        start, filled = stop, 0


def _refuse_other_batch(x: Tensor, state: Any) -> None:
    """A state of one sequence would be read by every row, and one of several would make as many rows of
    one."""
    rows = {leaf.shape[0] for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)}
    if rows - {len(x)}:
        raise InPlaceTTTError(
            f"the state is of {max(rows - {len(x)})} sequences and x of {len(x)}; give each its own."
        )


def detached(state: State) -> State:
    """The same state without its history, for truncated backpropagation."""
    return pytree.tree_map_only(Tensor, Tensor.detach, state)


def state_bytes(state: Any) -> int:
    """Bytes that a state takes."""
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
