"""The memory-saving form, a loop over the chunks with one running matrix, on any device.

The loop is called a walk, and the running matrix is called the carry M [d, h]. M is the running weight W0 +
ηS ("fused", if `weight` is given) or the state S alone ("additive"). The backward is written by hand.

                                fused        additive
    out_i = read · Z_i Mᵀ       read = 1     read = η     Z_i [C, h]
    M += write · c_i V_iᵀZ_i    write = η    write = 1    V_i [C, d]

The backward first repeats the forward walk, for dZ through M. Then it walks from the last chunk to the first
with the gradient R [d, h] of the carry. It stores no matrix per chunk. So the extra memory is a few [d, h]
matrices for any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import ChunkLayout, Span
from ..rules import PAPER_RULE, SumRule
from .norms import spectral_norm
from .precision import add_product_, state_dtype, without_autocast
from .products import multiplies_directly, product
from .reference import clip_factor, write_factor


def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: ChunkLayout,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    return_state: bool = False,
    rule: SumRule = PAPER_RULE,
) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs [B, T, d] and the final state [B, d, h], or None without `return_state`.

    The arguments are those of `inplace_ttt.ops.fast_weight`. Full-precision weights use the fused form.
    Half-precision weights use the additive form. W0 + ηS in the precision of W0 would lose every change below
    half a unit in the last place. Calls that return the state use the additive form too, because the fused
    form never computes S.
    """
    fused = weight is not None and not return_state and fuses(weight.dtype)
    out, state = _FastWeight.apply(
        z, v, weight if fused else None, initial_state, float(eta), clip, layout, return_state, rule
    )
    if weight is not None and not fused:
        out = out + torch.nn.functional.linear(z, weight)
    return out, state if return_state else None


def fuses(dtype: torch.dtype) -> bool:
    """Returns True if W0 of this dtype can be the running weight, which needs full precision."""
    return dtype == state_dtype(dtype)


class _FastWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        v: Tensor,
        weight: Tensor | None,
        initial_state: Tensor | None,
        eta: float,
        clip: float | Tensor | None,
        layout: ChunkLayout,
        return_state: bool,
        rule: SumRule,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(z, v, weight, initial_state)
        ctx.settings = eta, clip, layout, return_state, rule
        ctx.set_materialize_grads(False)
        with without_autocast(z.device):
            return Walk(z, v, weight, initial_state, *ctx.settings).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        z, v, weight, initial_state = ctx.saved_tensors
        found = gradients(d_out, d_state, z, v, weight, initial_state, *ctx.settings)
        return *found, None, None, None, None, None


def gradients(
    d_out: Tensor | None,
    d_state: Tensor | None,
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    initial_state: Tensor | None,
    eta: float,
    clip: float | Tensor | None,
    layout: ChunkLayout,
    keeps_state: bool,
    rule: SumRule = PAPER_RULE,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of z, v, weight and initial_state. If `weight` is given, the form is fused."""
    with without_autocast(z.device):
        walk = Walk(z, v, weight, initial_state, eta, clip, layout, keeps_state, rule)
        return walk.backward(torch.zeros_like(v) if d_out is None else d_out, d_state)


@dataclass(eq=False)
class Walk:
    """The walk over every row and document of a layout. The module's docstring defines walk and carry.

    keeps_state: the caller wants the state after each row's last document.
    """

    z: Tensor
    v: Tensor
    weight: Tensor | None
    initial_state: Tensor | None
    eta: float
    clip: float | Tensor | None
    layout: ChunkLayout
    keeps_state: bool
    rule: SumRule = PAPER_RULE

    def __post_init__(self) -> None:
        self.read, self.write = (self.eta, 1.0) if self.weight is None else (1.0, self.eta)
        self.dtype = state_dtype(self.z.dtype)

    @property
    def has_factors(self) -> bool:
        """True if each chunk's write has a factor of its own."""
        return self.clip is not None or self.rule.write_norm is not None

    def segments(self, row: int) -> Iterator[tuple[Span, int | None]]:
        """Yields the row's parts in order: (span, n) if document n uses the fast weight, else (span, None).

        Neighboring parts without the fast weight are merged.
        """
        documents = self.layout.documents[row]
        done = 0
        for number, (start, stop) in enumerate(documents):
            begins_with_state = number == 0 and self.initial_state is not None
            hands_state_on = number == len(documents) - 1 and self.keeps_state
            if stop - start > self.layout.chunk_size or begins_with_state or hands_state_on:
                if done < start:
                    yield (done, start), None
                yield (start, stop), number
                done = stop
        if done < self.layout.length:
            yield (done, self.layout.length), None

    def start_carry(self, row: int, number: int) -> Tensor | None:
        """Returns the carry at a document's first token. None stands for zero, with nothing to read."""
        state = self.initial_state[row] if number == 0 and self.initial_state is not None else None
        if self.weight is None:
            return None if state is None else state.to(self.dtype, copy=True)
        return self.weight.clone() if state is None else self.weight + self.eta * state

    def is_written(self, chunk: Span, row: int, number: int) -> bool:
        """Returns True if something reads the chunk's delta: a later chunk, or the returned state."""
        documents = self.layout.documents[row]
        is_last = chunk[1] == documents[number][1]
        hands_state_on = self.keeps_state and number == len(documents) - 1
        return self.layout.is_complete(chunk) and (not is_last or hands_state_on)

    def add_delta(self, carry: Tensor | None, row: int, chunk: Span) -> Tensor:
        """Adds a chunk's write to the carry in place. Without a carry it returns the write [d, h] alone.

        `chunk` may be several chunks, unless `has_factors`.
        """
        values, keys = (x[row, chunk[0] : chunk[1]] for x in (self.v, self.z))
        if not self.has_factors and carry is not None and not multiplies_directly(keys):
            return carry.addmm_(values.T.to(self.dtype), keys.to(self.dtype), alpha=self.write)
        delta = product(values.T[None], keys[None])[0]
        delta *= self.write * write_factor(delta, self.clip, self.rule)
        return delta if carry is None else carry.add_(delta)

    def read_with(self, carry: Tensor) -> Tensor:
        """Returns the matrix [d, h] that keys are multiplied by."""
        return carry

    def forward(self) -> tuple[Tensor, Tensor | None]:
        z, v = self.z, self.v
        out = torch.empty_like(v) if self.weight is not None else torch.zeros_like(v)
        state = None
        if self.keeps_state:
            state = z.new_zeros(z.shape[0], v.shape[-1], z.shape[-1], dtype=self.dtype)
            if self.initial_state is not None:
                state.copy_(self.initial_state)
        for row in range(self.layout.batch):
            for (start, stop), number in self.segments(row):
                if number is None:
                    if self.weight is not None:
                        torch.mm(z[row, start:stop], self.weight.T, out=out[row, start:stop])
                    continue
                carry = self.start_carry(row, number)
                for chunk in self.layout.chunks((start, stop)):
                    here = slice(*chunk)
                    if carry is not None:
                        add_product_(
                            out[row, here], z[row, here], self.read_with(carry).T, beta=0, alpha=self.read
                        )
                    if self.is_written(chunk, row, number):
                        carry = self.add_delta(carry, row, chunk)
                if state is not None and number == len(self.layout.documents[row]) - 1:
                    state[row] = 0 if carry is None else carry
        return out, state

    def backward(self, d_out: Tensor, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        z, v = self.z, self.v
        dz, dv = torch.zeros_like(z), torch.zeros_like(v)
        d_weight = None if self.weight is None else torch.zeros_like(self.weight)
        d_initial = None if self.initial_state is None else torch.zeros_like(self.initial_state)
        for row in range(self.layout.batch):
            if d_initial is not None and d_state is not None and not self.layout.documents[row]:
                d_initial[row] = d_state[row]  # the final state of a row of padding is its initial state
            for (start, stop), number in self.segments(row):
                if number is None:
                    if d_weight is not None and self.weight is not None:
                        grad = d_out[row, start:stop]
                        torch.mm(grad, self.weight, out=dz[row, start:stop])
                        d_weight.addmm_(grad.T, z[row, start:stop])
                    continue
                chunks = list(self.layout.chunks((start, stop)))
                carry = self._through_reads(row, number, chunks, d_out, dz)
                is_last = number == len(self.layout.documents[row]) - 1
                d_carry = z.new_zeros(v.shape[-1], z.shape[-1], dtype=self.dtype)
                if d_state is not None and is_last:
                    d_carry.copy_(d_state[row])
                self.through_writes(row, number, chunks, carry, d_out, d_carry, dz, dv)
                if d_weight is not None:
                    d_weight += d_carry
                if d_initial is not None and number == 0:
                    d_initial[row] = d_carry * (self.eta if self.weight is not None else 1.0)
        return dz, dv, d_weight, d_initial

    def _through_reads(
        self, row: int, number: int, chunks: list[Span], d_out: Tensor, dz: Tensor
    ) -> Tensor | None:
        """Rebuilds the carry, computes dZ_i = read · dO_i M_i, and returns the last chunk's carry."""
        carry = self.start_carry(row, number)
        for chunk in chunks:
            here = slice(*chunk)
            if carry is not None:
                add_product_(dz[row, here], d_out[row, here], self.read_with(carry), beta=0, alpha=self.read)
            if self.is_written(chunk, row, number) and chunk is not chunks[-1]:
                carry = self.add_delta(carry, row, chunk)
        return carry

    def through_writes(
        self,
        row: int,
        number: int,
        chunks: list[Span],
        carry: Tensor | None,
        d_out: Tensor,
        d_carry: Tensor,
        dz: Tensor,
        dv: Tensor,
    ) -> None:
        """Walks from the last chunk, which read `carry`, to the first.

        `d_carry` accumulates the gradient of the carry from later reads. At each chunk it is the gradient of
        that chunk's write.
        """
        for chunk in reversed(chunks):
            if self.is_written(chunk, row, number):
                self.through_write(row, chunk, d_carry, dz, dv)
            keys, grad = (x[row, chunk[0] : chunk[1]].to(self.dtype) for x in (self.z, d_out))
            d_carry.addmm_(grad.T, keys, alpha=self.read)

    def through_write(self, row: int, chunk: Span, d_carry: Tensor, dz: Tensor, dv: Tensor) -> None:
        """Adds to dZ and sets dV for a chunk written into a carry with gradient `d_carry` [d, h]."""
        here = slice(*chunk)
        keys, values = self.z[row, here], self.v[row, here]
        d_delta = self._through_factor(d_carry, keys, values)
        add_product_(dv[row, here], keys, d_delta.T, beta=0, alpha=self.write)
        add_product_(dz[row, here], values, d_delta, alpha=self.write)

    def _through_factor(self, d_clipped: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns the gradient of a delta D, given the gradient G of cD.

        For c = min(1, τ/‖D‖) it is c (G - [c<1] D ⟨D, G⟩ / ‖D‖²).
        """
        if not self.has_factors:
            return d_clipped
        delta = values.T.to(self.dtype) @ keys.to(self.dtype)
        if self.rule.write_norm is not None:
            with torch.enable_grad():
                delta.requires_grad_()
                return torch.autograd.grad(delta / spectral_norm(delta), delta, d_clipped)[0]
        factor = clip_factor(delta, self.clip)
        square = (delta * delta).sum()
        along = torch.where(factor < 1, (delta * d_clipped).sum() / torch.where(square > 0, square, 1.0), 0.0)
        return factor * (d_clipped - along * delta)
