"""The loop over chunks for ridge regression, with running sums, solves and gradients (see `least_squares`).

Reads are computed stretch by stretch (`stretches`), and the gradients of the sums chunk by chunk. Below, a
part is a stretch or a chunk.

Shapes:

    k           [B, T, r]        keys
    v           [B, T, d]        targets
    sums        [d + r, r]       B above G; [n, d + r, r] for the n parts of a group
    Y, X        [T, r]           per row: solved keys, and the gradient of the keys from reads
    d_sums      [d + r, r]       gradient of the sums, passed from later chunks to earlier ones
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import ChunkLayout, Span
from ..rules import RidgeRule
from .groups import Group, chunks_together, groups
from .least_squares_gradients import Gradients
from .normal_equations import Factor, damping, factor
from .precision import state_dtype
from .products import Operand, product
from .reference import clip_factor
from .stretches import Stretch, chunks_in_stretch, serve_gradients

_Step = tuple[Tensor | Operand, Tensor | Operand, float]
"""Two matrices [n, ·, ·] and the number that multiplies their product."""


@dataclass(eq=False)
class Walk:
    """The walk over every row and document of a layout, with the running sums [d + r, r] of the writes."""

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

    def stretch(self, *, for_gradients: bool = False) -> int:
        """Returns the tokens of a stretch, whose chunks read from one factor."""
        chunk = self.layout.chunk_size
        # a clip gives each chunk's write a factor of its own, which is known once the write is computed
        if self.clip is not None or (for_gradients and not serve_gradients(self.k.device)):
            return chunk
        return chunk * chunks_in_stretch(chunk, self.d, self.r, self.k.device)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        out, states, stretch = torch.zeros_like(self.v), [], self.stretch()
        for row, documents in enumerate(self.layout.documents):
            state = self.start(row, 0)
            for number, document in enumerate(documents):
                state = self.start(row, number)
                if not self.matters(row, number):
                    continue
                for group in self.groups(document, stretch):
                    before, state = self.sums_around(row, number, group, state)
                    read = self.read(row, number, group, before)
                    if read is not None:
                        out[row, group.here] = read.mul_(self.eta).flatten(0, 1).to(out.dtype)
            states.append(state)
        return out, torch.stack(states) if self.keeps_state else None

    def read(self, row: int, number: int, group: Group, before: Tensor) -> Tensor | None:
        """Returns the reads [n, g, d] of a group, without η, in the sums' precision; None if all are zero.

        before: the sums before each part [n, d + r, r].
        """
        may_read, has_inside = self.may_read(row, number, group), self.reads_inside(group)
        if not may_read and not has_inside:
            return None
        (solved,) = self.solved(row, number, group, before)
        read = product(self.operand(solved), self.operand(before[:, : self.d]).mT) if may_read else None
        if has_inside:
            stretch = self.stretch_of(row, group, solved)
            inside = stretch.inside(stretch.errors(self.of(self.v[row], group), read))
            read = inside if read is None else read.add_(inside)
        return read

    def solved(
        self, row: int, number: int, group: Group, before: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns keys (G + λI)⁻¹ [n, g, r], for G before each part of a group, and the same of `more`."""
        keys = self.of(self.k[row], group)
        if self.may_read(row, number, group):
            return self.factor(before, self.added(row, group)).solve(keys, *more)
        damped_by = damping(self.rule.ridge, self.added(row, group))[:, None, None]
        return tuple(x.to(self.dtype) / damped_by for x in (keys, *more))

    def stretch_of(self, row: int, group: Group, solved: Tensor) -> Stretch:
        counts = None if self.gate is None else self.of(self.gate[row], group)[..., None]
        return Stretch(self.of(self.k[row], group), solved, counts, self.layout.chunk_size)

    def reads_inside(self, group: Group) -> bool:
        """Returns True if a part of the group holds a complete chunk and a later one."""
        return (group.stop - group.start) // group.parts > self.layout.chunk_size

    def added(self, row: int, group: Group) -> Tensor:
        """Returns the trace [n] of each part's KᵀK if chunks of the part read it, else 0."""
        if not self.reads_inside(group):
            return self.k.new_zeros(group.parts, dtype=self.dtype)
        squares = self.of(self.k[row], group).to(self.dtype).square().sum(-1)
        return (squares if self.gate is None else squares * self.of(self.gate[row], group)).sum(-1)

    def backward(
        self, d_out: Tensor, d_state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        into = Gradients.of(self.k, self.v, self.gate)
        d_initial = None if self.initial_state is None else torch.zeros_like(self.initial_state)
        for row, documents in enumerate(self.layout.documents):
            if d_initial is not None and d_state is not None and not documents:
                d_initial[row] = d_state[row]  # the final state of a row of padding is its initial state
            # Solved keys have the sums' precision. After few writes, most of a solved key is orthogonal to
            # the keys written, and in lower precision its rounding error would be most of dV.
            solved = self.k.new_empty(self.k.shape[1:], dtype=self.dtype)
            for number, document in enumerate(documents):
                if not self.matters(row, number):
                    continue
                self.through_reads(row, number, document, d_out, solved, into.k[row])
                handed_on = self.k.new_zeros(self.d + self.r, self.r, dtype=self.dtype)
                if d_state is not None and number == len(documents) - 1:
                    handed_on += d_state[row]
                d_sums = self.through_sums(row, number, document, d_out, solved, handed_on, into)
                if d_initial is not None and number == 0:
                    d_initial[row] = d_sums
                    by_reads = d_sums[self.d :] - handed_on[self.d :]
                    d_initial[row, self.d :] += (by_reads.mT - by_reads) / 2  # keeps the symmetric part
        return into.k.to(self.k.dtype), into.v, into.gate, d_initial

    def through_reads(
        self, row: int, number: int, document: Span, d_out: Tensor, y: Tensor, x: Tensor
    ) -> None:
        """Rebuilds the sums in order, and computes a row's Y and X, [T, r].

        X is the part of dK that comes from reads: η dO_i M_i for chunk i. If M is the matrix at the start of
        its stretch, M_i = M + F_<ᵀ W_<.
        """
        state = self.start(row, number)
        for group in self.groups(document, self.stretch(for_gradients=True)):
            before, state = self.sums_around(row, number, group, state)
            may_read, has_inside = self.may_read(row, number, group), self.reads_inside(group)
            if not may_read and not has_inside:
                continue
            grad, sums = self.of(d_out[row], group), self.operand(before[:, : self.d])
            wanted = [product(grad, sums, alpha=self.eta)] if may_read else []
            of_keys, *of_grads = self.solved(row, number, group, before, *wanted)
            if has_inside:
                stretch = self.stretch_of(row, group, of_keys)
                read = product(self.operand(of_keys), sums.mT) if may_read else None
                errors, directions = stretch.errors(self.of(self.v[row], group), read), stretch.directions()
                seen = stretch.seen(grad, errors)
                of_grads.append(product(seen, self.operand(directions), alpha=self.eta))
                of_keys = of_keys - stretch.inside(directions)
            y[group.here], x[group.here] = of_keys.flatten(0, 1), sum(of_grads[1:], of_grads[0]).flatten(0, 1)

    def through_sums(
        self,
        row: int,
        number: int,
        document: Span,
        d_out: Tensor,
        y: Tensor,
        d_sums: Tensor,
        into: Gradients,
    ) -> Tensor:
        """Walks from the last chunk to the first and collects each write's effect on later reads.

        Returns the gradient [d + r, r] of the sums before the document's first chunk.
        """
        for group in reversed(list(self.groups(document, self.layout.chunk_size))):
            # the gradients of the sums after each chunk of the group, from the last chunk to the first
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

    def through_write(self, row: int, group: Group, d_after: Tensor, into: Gradients) -> None:
        """Adds to dK, and sets dV and dβ, for chunks that were added to sums.

        d_after: the gradients of those sums [n, d + r, r], from the last chunk to the first.
        """
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
        """Returns gradients of VᵀK and KᵀK, given those of c VᵀK and c KᵀK with c = min(1, τ/‖VᵀK‖)."""
        c = clip_factor(delta, self.clip)
        square = delta.square().sum((1, 2), keepdim=True)
        inner = (delta * d_b).sum((1, 2), keepdim=True) + (gram * d_g).sum((1, 2), keepdim=True)
        along = torch.where(c < 1, inner / torch.where(square > 0, square, 1.0), 0.0)
        return c * (d_b - along * delta), c * d_g

    def sums_around(self, row: int, number: int, group: Group, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums before each part of a group [n, d + r, r], and after all of them [d + r, r].

        The group is added only if something reads its writes. Otherwise both results are the given state.
        """
        return (
            self.with_writes(row, group, state)
            if self.is_written(row, number, group)
            else (state[None], state)
        )

    def with_writes(self, row: int, group: Group, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the result of `sums_around`, for a group whose complete chunks are written."""
        group = dataclasses.replace(group, stop=group.written)
        keys, values = self.of(self.k[row], group), self.of(self.v[row], group)
        written = (
            keys if self.gate is None else keys.to(self.dtype) * self.of(self.gate[row], group)[..., None]
        )
        # G in full precision, because it must stay positive definite
        return self.running(
            state, (values.mT, self.operand(written), 1.0), (keys.mT, written, 1.0), self.clip
        )

    def running(
        self, first: Tensor, above: _Step, below: _Step, clip: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sums before each of n steps [n, d + r, r] and after all of them [d + r, r].

        The sums start at `first`. A step consists of B above G. Both B and G are products of two matrices
        [n, ·, ·], times a number. The clip depends on B.
        """
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
        for group in self.groups(span, self.stretch()):
            if group.is_complete:
                state = self.with_writes(row, group, state)[1]
        return state

    def groups(self, document: Span, size: int) -> Iterator[Group]:
        """Yields a document's groups in order, with parts of `size` tokens."""
        return groups(document, size, self.layout.chunk_size, self.together)

    def start(self, row: int, number: int) -> Tensor:
        """Returns the sums at a document's first token."""
        if number == 0 and self.initial_state is not None:
            return self.initial_state[row]
        return self.k.new_zeros(self.d + self.r, self.r, dtype=self.dtype)

    def matters(self, row: int, number: int) -> bool:
        """Returns True if something in the document reads a write, or if its final state is returned."""
        start, stop = self.layout.documents[row][number]
        return (
            stop - start > self.layout.chunk_size or self.hands_on(row, number) or self.starts_written(number)
        )

    def hands_on(self, row: int, number: int) -> bool:
        """Returns True if the document's final state is returned."""
        return self.keeps_state and number == len(self.layout.documents[row]) - 1

    def is_written(self, row: int, number: int, group: Group) -> bool:
        """Returns True if something reads the sums after a part of the group.

        The reader may be another part of the group, a later group, or the caller that receives the state.
        """
        is_last = group.stop == self.layout.documents[row][number][1]
        return group.is_complete and (group.parts > 1 or not is_last or self.hands_on(row, number))

    def starts_written(self, number: int) -> bool:
        return number == 0 and self.initial_state is not None

    def may_read(self, row: int, number: int, group: Group) -> bool:
        """Returns True if something was written before a group."""
        return group.start > self.layout.documents[row][number][0] or self.starts_written(number)

    def factor(self, sums: Tensor, added: Tensor) -> Factor:
        return factor(sums[:, self.d :], self.rule.ridge, self.k.dtype, added)

    def operand(self, x: Tensor) -> Operand:
        """Returns x as an operand for products with keys and targets."""
        return Operand.of(x, self.k.dtype)

    def of(self, x: Tensor, group: Group) -> Tensor:
        """Returns a group's tokens of a row [T, ·] as parts [n, g, ·]."""
        return x[group.here].unflatten(0, (group.parts, -1))

    def turned(self, x: Tensor, group: Group) -> Tensor:
        """Returns the parts of `of` from the last to the first."""
        parts = self.of(x, group)
        return parts.flip(0) if group.parts > 1 else parts

    def flat(self, chunks: Tensor) -> Tensor:
        """Returns the rows [n C, ·] of chunks [n, C, ·] that are ordered from the last to the first."""
        return (chunks.flip(0) if len(chunks) > 1 else chunks).flatten(0, 1)
