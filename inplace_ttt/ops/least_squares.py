"""Least squares from sums (extension): what is read is the best linear map from keys to targets over all that
was written.

The state is two sums in one matrix [d + r, r], B = Σ c_j V_jᵀK_j above G = Σ c_j K_jᵀK_j, so that all that
holds of the paper's sum holds of it. A chunk reads with M = B (G + λI)⁻¹, which minimises Σ c_j ‖V_j -
K_jMᵀ‖² + λ‖M‖². In keys' place:

    forward     Y = K (G + λI)⁻¹        O = η Y Bᵀ
    backward    X = η dO B (G + λI)⁻¹   dK = X   dB = η dOᵀY   dG = -YᵀX

Of dG the symmetric part counts: of G = KᵀK a key's gradient is K (dG + dGᵀ).

A gate β weighs tokens: what M minimises counts each as often, for which βK_j stands in the second place of
both products.

What reaches the sums goes on to earlier chunks as a sum that runs backward. Chunks are walked in groups, with
one running sum; nothing is kept a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import ChunkLayout, Span
from ..rules import RidgeRule
from .normal_equations import Factor, factor
from .precision import in_full_precision, state_dtype
from .products import Operand, product
from .reference import clip_factor

_SUMS_BYTES = 1 << 29
"""Of a GPU's memory for the sums of the chunks that go together. Their gradients, factors and parts take four
times as much again."""


def chunks_together(device: torch.device, state_bytes: int) -> int:
    """Chunks whose products and factorisations a device is handed at once, for states of so many bytes: a CPU
    is busy with one."""
    return 1 if device.type == "cpu" else max(_SUMS_BYTES // state_bytes, 1)


def fast_weight(
    k: Tensor,
    v: Tensor,
    *,
    eta: float,
    layout: ChunkLayout,
    rule: RidgeRule,
    gate: Tensor | None = None,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """η K_i M_iᵀ [B, T, d] for keys k [B, T, r] and targets v [B, T, d] and, if asked for, the final state
    [B, d + r, r].

    Arguments as in `inplace_ttt.ops.fast_weight`.
    """
    out, state = _LeastSquares.apply(k, v, gate, initial_state, float(eta), clip, rule, layout, return_state)
    return out, state if return_state else None


def sum_of_writes(
    k: Tensor, v: Tensor, spans: Sequence[Span | None], *, layout: ChunkLayout, rule: RidgeRule, clip: float | Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The state [B, d + r, r] after the complete chunks of one span in each row; zero without a span.

    Each span starts where a chunk does. Differentiable once in k [B, T, r], v [B, T, d] and gate [B, T].
    """
    return _SumOfWrites.apply(k, v, gate, spans, 1.0, clip, rule, layout, True)


class _LeastSquares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, gate: Tensor | None, initial_state: Tensor | None, eta: float, clip: float | Tensor | None,
        rule: RidgeRule, layout: ChunkLayout, return_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.save_for_backward(k, v, gate, initial_state)
        ctx.settings = eta, clip, rule, layout, return_state
        ctx.set_materialize_grads(False)
        with in_full_precision(k.device):
            return _Walk(k, v, gate, initial_state, *ctx.settings).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        return *gradients(d_out, d_state, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


def gradients(
    d_out: Tensor | None, d_state: Tensor | None, k: Tensor, v: Tensor, gate: Tensor | None, initial_state: Tensor | None, eta: float,
    clip: float | Tensor | None, rule: RidgeRule, layout: ChunkLayout, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of k, v, gate and initial_state."""
    with in_full_precision(k.device):
        walk = _Walk(k, v, gate, initial_state, eta, clip, rule, layout, return_state)
        return walk.backward(torch.zeros_like(v) if d_out is None else d_out, d_state)


class _SumOfWrites(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, gate: Tensor | None, spans: Sequence[Span | None], *settings: Any
    ) -> Tensor:
        ctx.save_for_backward(k, v, gate)
        ctx.spans, ctx.settings = spans, settings
        walk = _Walk(k, v, gate, None, *settings)
        with in_full_precision(k.device):
            return torch.stack([walk.sum_over(row, span or (0, 0)) for row, span in enumerate(spans)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_state: Tensor) -> tuple[Tensor | None, ...]:
        k, v, gate = ctx.saved_tensors
        walk = _Walk(k, v, gate, None, *ctx.settings)
        into = _Gradients.of(k, v, gate)
        with in_full_precision(k.device):
            for row, span in enumerate(ctx.spans):
                for group in walk.groups(span or (0, 0)):
                    if group.is_complete:
                        walk.through_write(row, group, d_state[row].expand(group.chunks, -1, -1), into)
        return into.k.to(k.dtype), into.v, into.gate, None, None, None, None, None, None


_Step = tuple[Tensor | Operand, Tensor | Operand, float]
"""Two matrices [n, ·, ·] and what their product is multiplied by."""


@dataclass(frozen=True)
class _Group:
    """Consecutive chunks of a document: complete ones, or the incomplete last one alone."""

    start: int
    stop: int
    chunks: int
    is_complete: bool

    @property
    def here(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class _Gradients:
    """Of keys, in the sums' precision, targets and, where there is one, the gate: zero, to be filled."""

    k: Tensor
    v: Tensor
    gate: Tensor | None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, gate: Tensor | None) -> _Gradients:
        return cls(
            torch.zeros_like(k, dtype=state_dtype(k.dtype)),
            torch.zeros_like(v),
            None if gate is None else torch.zeros_like(gate),
        )


@dataclass(eq=False)
class _Walk:
    """The walk over every row and document of a layout, with the running sums [d + r, r] of what is
    written."""

    k: Tensor
    v: Tensor
    gate: Tensor | None
    initial_state: Tensor | None
    eta: float
    clip: float | Tensor | None
    rule: RidgeRule
    layout: ChunkLayout
    keeps_state: bool

    def __post_init__(self) -> None:
        self.d, self.r, self.dtype = self.v.shape[-1], self.k.shape[-1], state_dtype(self.k.dtype)
        self.together = chunks_together(self.k.device, (self.d + self.r) * self.r * self.dtype.itemsize)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        out, states = torch.zeros_like(self.v), []
        for row, documents in enumerate(self.layout.documents):
            state = self.start(row, 0)
            for number, document in enumerate(documents):
                state = self.start(row, number)
                if not self.matters(row, number):
                    continue
                for group in self.groups(document):
                    before, state = self.sums_around(row, number, group, state)
                    if self.may_read(row, number, group):
                        (solved,) = self.factor(before).solve(self.of(self.k[row], group))
                        read = product(
                            self.operand(solved), self.operand(before[:, : self.d]).mT, alpha=self.eta
                        )
                        out[row, group.here] = read.flatten(0, 1).to(out.dtype)
            states.append(state)
        return out, torch.stack(states) if self.keeps_state else None

    def backward(
        self, d_out: Tensor, d_state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        into = _Gradients.of(self.k, self.v, self.gate)
        d_initial = None if self.initial_state is None else torch.zeros_like(self.initial_state)
        for row, documents in enumerate(self.layout.documents):
            if d_initial is not None and d_state is not None and not documents:
                d_initial[row] = d_state[row]  # a row of padding hands its state on untouched
            # in the sums' precision: after little was written most of a solved key lies beside it, and
            # rounded it would be most of dV
            solved = self.k.new_empty(self.k.shape[1:], dtype=self.dtype)
            for number, document in enumerate(documents):
                if not self.matters(row, number):
                    continue
                groups = list(self.groups(document))
                self.through_reads(row, number, groups, d_out, solved, into.k[row])
                handed_on = self.k.new_zeros(self.d + self.r, self.r, dtype=self.dtype)
                if d_state is not None and number == len(documents) - 1:
                    handed_on += d_state[row]
                d_sums = self.through_sums(row, number, groups, d_out, solved, handed_on, into)
                if d_initial is not None and number == 0:
                    d_initial[row] = d_sums
                    by_reads = d_sums[self.d :] - handed_on[self.d :]
                    d_initial[row, self.d :] += (by_reads.mT - by_reads) / 2  # its symmetric part
        return into.k.to(self.k.dtype), into.v, into.gate, d_initial

    def through_reads(
        self, row: int, number: int, groups: list[_Group], d_out: Tensor, y: Tensor, x: Tensor
    ) -> None:
        """Y and X, which is dK of the reads, of a row [T, r], with the sums rebuilt in order."""
        state = self.start(row, number)
        for group in groups:
            before, state = self.sums_around(row, number, group, state)
            if self.may_read(row, number, group):
                keys, grad = self.of(self.k[row], group), self.of(d_out[row], group)
                wanted = product(grad, self.operand(before[:, : self.d]), alpha=self.eta)
                of_keys, of_grads = self.factor(before).solve(keys, wanted)
                y[group.here], x[group.here] = of_keys.flatten(0, 1), of_grads.flatten(0, 1)

    def through_sums(
        self,
        row: int,
        number: int,
        groups: list[_Group],
        d_out: Tensor,
        y: Tensor,
        d_sums: Tensor,
        into: _Gradients,
    ) -> Tensor:
        """From the last chunk to the first: what each one's writes did to later reads; the gradient of the
        sums before all."""
        for group in reversed(groups):
            # the gradients of the sums after each chunk of the group, the last one's first
            after, before = d_sums[None], d_sums
            if self.may_read(row, number, group):
                of_keys, of_grads = (self.operand(self.turned(rows, group)) for rows in (y, into.k[row]))
                grad = self.turned(d_out[row], group)
                after, before = self.running(
                    d_sums, (grad.mT, of_keys, self.eta), (of_keys.mT, of_grads, -1.0)
                )
            if self.is_written(row, number, group):
                self.through_write(row, group, after, into)
            else:
                into.v[row, group.here] = 0
            d_sums = before
        return d_sums

    def through_write(self, row: int, group: _Group, d_after: Tensor, into: _Gradients) -> None:
        """Add to dK, and set dV and dβ, of chunks that were added to sums with gradients `d_after` [n, d + r,
        r], the last one's first."""
        keys, values = (self.turned(x[row], group) for x in (self.k, self.v))
        counts = None if self.gate is None else self.turned(self.gate[row], group)[..., None]
        written = keys if counts is None else keys.to(self.dtype) * counts
        if self.clip is None:
            both = self.operand(d_after)
            of_b, of_g = both.rows(None, self.d), both.rows(self.d, None)
        else:
            d_b, d_g = d_after.split([self.d, self.r], dim=1)
            clipped = self.through_clip(d_b, d_g, product(values.mT, written), product(keys.mT, written))
            of_b, of_g = (self.operand(x) for x in clipped)
        into.v[row, group.here] = self.flat(product(self.operand(written), of_b.mT).to(into.v.dtype))
        by_targets, by_keys = product(values, of_b), product(keys, of_g) + product(keys, of_g.mT)
        d_keys = by_targets + by_keys
        into.k[row, group.here] += self.flat(d_keys if counts is None else d_keys * counts)
        if into.gate is not None:
            into.gate[row, group.here] = self.flat(((by_targets + by_keys / 2) * keys).sum(-1)).to(
                into.gate.dtype
            )

    def through_clip(self, d_b: Tensor, d_g: Tensor, delta: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of VᵀK and KᵀK from those of c VᵀK and c KᵀK, c = min(1, τ/‖VᵀK‖)."""
        c = clip_factor(delta, self.clip)
        square = delta.square().sum((1, 2), keepdim=True)
        inner = (delta * d_b).sum((1, 2), keepdim=True) + (gram * d_g).sum((1, 2), keepdim=True)
        along = torch.where(c < 1, inner / torch.where(square > 0, square, 1.0), 0.0)
        return c * (d_b - along * delta), c * d_g

    def sums_around(self, row: int, number: int, group: _Group, state: Tensor) -> tuple[Tensor, Tensor]:
        """The sums before each chunk of a group [n, d + r, r], and those after all [d + r, r], if anything
        reads them."""
        return (
            self.with_writes(row, group, state)
            if self.is_written(row, number, group)
            else (state[None], state)
        )

    def with_writes(self, row: int, group: _Group, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same of complete chunks that are written."""
        keys, values = self.of(self.k[row], group), self.of(self.v[row], group)
        written = (
            keys if self.gate is None else keys.to(self.dtype) * self.of(self.gate[row], group)[..., None]
        )
        # G in full precision: what is solved with must stay positive definite
        return self.running(
            state, (values.mT, self.operand(written), 1.0), (keys.mT, written, 1.0), self.clip
        )

    def running(
        self, first: Tensor, above: _Step, below: _Step, clip: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sums before each of n steps [n, d + r, r] and after all, from `first` on. A step is B above G,
        each a product of two matrices [n, ·, ·] times a number; the clip is by B."""
        n = len(above[0].parts[0] if isinstance(above[0], Operand) else above[0])
        sums = first.new_empty(n + (n > 1), self.d + self.r, self.r)
        steps = sums[-n:]
        for (a, b, alpha), place in ((above, slice(None, self.d)), (below, slice(self.d, None))):
            product(a, b, alpha=alpha, out=steps[:, place])
        if clip is not None:
            steps *= clip_factor(steps[:, : self.d], clip)
        if n == 1:
            return first[None], sums[0].add_(first)
        sums[0] = first
        sums.cumsum_(0)
        return sums[:-1], sums[-1]

    def sum_over(self, row: int, span: Span) -> Tensor:
        state = self.k.new_zeros(self.d + self.r, self.r, dtype=self.dtype)
        for group in self.groups(span):
            if group.is_complete:
                state = self.with_writes(row, group, state)[1]
        return state

    def groups(self, document: Span) -> Iterator[_Group]:
        """The first chunk alone, which may have nothing to read, then as many as go together, and what is
        left."""
        start, stop = document
        size = self.layout.chunk_size
        together = 1
        while stop - start >= size:
            n = min(together, (stop - start) // size)
            yield _Group(start, start + n * size, n, True)
            start, together = start + n * size, self.together
        if start < stop:
            yield _Group(start, stop, 1, False)

    def start(self, row: int, number: int) -> Tensor:
        """The sums at a document's first token."""
        if number == 0 and self.initial_state is not None:
            return self.initial_state[row]
        return self.k.new_zeros(self.d + self.r, self.r, dtype=self.dtype)

    def matters(self, row: int, number: int) -> bool:
        """Whether anything in the document reads a write, or anything is handed on."""
        start, stop = self.layout.documents[row][number]
        return (
            stop - start > self.layout.chunk_size or self.hands_on(row, number) or self.starts_written(number)
        )

    def hands_on(self, row: int, number: int) -> bool:
        return self.keeps_state and number == len(self.layout.documents[row]) - 1

    def is_written(self, row: int, number: int, group: _Group) -> bool:
        """Whether anything reads what a group writes: a chunk of its own, a later one, or who is handed the
        state."""
        is_last = group.stop == self.layout.documents[row][number][1]
        return group.is_complete and (group.chunks > 1 or not is_last or self.hands_on(row, number))

    def starts_written(self, number: int) -> bool:
        return number == 0 and self.initial_state is not None

    def may_read(self, row: int, number: int, group: _Group) -> bool:
        """Whether anything was written before a group."""
        return group.start > self.layout.documents[row][number][0] or self.starts_written(number)

    def factor(self, sums: Tensor) -> Factor:
        return factor(sums[:, self.d :], self.rule.ridge, self.k.dtype)

    def operand(self, x: Tensor) -> Operand:
        """As it is multiplied beside keys and targets."""
        return Operand.of(x, self.k.dtype)

    def of(self, x: Tensor, group: _Group) -> Tensor:
        """A group's part of a row [T, ·] as chunks [n, C, ·]."""
        return x[group.here].unflatten(0, (group.chunks, -1))

    def turned(self, x: Tensor, group: _Group) -> Tensor:
        """The same from the last chunk to the first."""
        chunks = self.of(x, group)
        return chunks.flip(0) if group.chunks > 1 else chunks

    def flat(self, chunks: Tensor) -> Tensor:
        """Rows [n C, ·] of chunks that lie from the last one to the first."""
        return (chunks.flip(0) if len(chunks) > 1 else chunks).flatten(0, 1)
