"""Forward and backward of the op: walks make the matrices that chunks read, cuBLAS reads them, a group of chunks at a time.

O_i = Z_i E_iᵀ with E_i = W0 + ηS_i, and backward, with R_j the gradient of S_{j+1} that reaches a chunk's write,

    dZ_i = dO_i E_i + c_i V_i R_i      dV_i = c_i Z_i R_iᵀ      R_j = η Σ_{i>j} dO_iᵀZ_i + dS      dW0 = Σ_i dO_iᵀZ_i

The walk over S is made again, that over R from the last chunk to the first; dW0 is where the latter ends. Short documents
take the dual form beside a product with W0 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dual
from .clip import add_clip_gradient
from .documents import Document, groups
from .operands import Operands, by_chunk
from .walk import walk


def forward(given: Operands, batch: int, hands_on: bool) -> tuple[Tensor, Tensor]:
    """Outputs [N, d] and, if handed on, the last states [B, d, h] (else an empty tensor)."""
    out = torch.empty(given.v.shape, dtype=given.v.dtype, device=given.v.device)
    _product_of_plain(given, given.z, None if given.weight is None else given.weight.T, out)
    state = torch.empty(batch if hands_on else 0, *given.shape, dtype=torch.float32, device=given.z.device)
    if hands_on:
        for row in given.plan.rows_without:
            state[row] = 0 if given.start is None else given.start[row]
    for document in given.plan.documents:
        for slots, first in given.readers(document, state[document.row] if document.ends else None):
            _product_by_chunk(given.z, slots.mT, document, first, out)
    for document in given.plan.short:
        dual.add_reads(given.z, given.v, document, given.eta, out)
    return out, state


def _product_of_plain(given: Operands, rows: Tensor, matrix: Tensor | None, out: Tensor) -> None:
    """rows · matrix for the tokens whose product with W0 no walk makes, zero without a W0."""
    for start, stop in given.plan.plain:
        if matrix is None:
            out[start:stop] = 0
        else:
            torch.mm(rows[start:stop], matrix, out=out[start:stop])


def _product_by_chunk(rows: Tensor, matrices: Tensor, document: Document, first: int, out: Tensor) -> None:
    """rows_i · matrices_i for the chunks from `first` on; the document's last may be short."""
    last = first + len(matrices)
    is_short = last == document.chunks and (document.stop - document.start) % document.chunk != 0
    whole = last - is_short
    if first < whole:
        given, wanted = by_chunk(rows, document, first, whole), by_chunk(out, document, first, whole)
        torch.bmm(given, matrices[: whole - first], out=wanted)
    if is_short:
        start, stop = document.span(whole, last)
        torch.mm(rows[start:stop], matrices[-1], out=out[start:stop])


def backward(
    given: Operands, d_out: Tensor, d_state: Tensor | None, batch: int, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of z, v [N, …], of W0 [d, h] float32 if needed and of the start states [B, d, h]; d_out [N, d]."""
    dz = torch.empty(given.z.shape, dtype=given.z.dtype, device=given.z.device)
    _product_of_plain(given, d_out, given.weight, dz)
    for document in given.plan.documents:
        for slots, first in given.readers(document):
            _product_by_chunk(d_out, slots, document, first, dz)

    dv = torch.zeros_like(given.v)
    d_start = None if given.start is None else torch.zeros_like(given.start)
    if d_start is not None and d_state is not None:
        for row in given.plan.rows_without:
            d_start[row] = d_state[row]
    d_weight = None
    for document in reversed(given.plan.documents):
        base = d_state[document.row] if d_state is not None and document.ends else None
        total = _through_writes(given, document, d_out, base, dz, dv, needs_weight, 1 if d_weight is None else 2)
        if d_start is not None and document.begins:
            torch.mul(total, given.eta, out=d_start[document.row])
            if base is not None:
                d_start[document.row] += base
        if needs_weight:
            d_weight = total if d_weight is None else d_weight.add_(total)
    for document in given.plan.short:
        dual.add_gradients(given.z, given.v, d_out, document, given.eta, dz, dv)
    if needs_weight:
        d_weight = _add_plain(given, d_out, d_weight)
    return dz, dv, d_weight, d_start


def _through_writes(
    given: Operands, document: Document, d_out: Tensor, base: Tensor | None, dz: Tensor, dv: Tensor, needs_weight: bool, matrices: int
) -> Tensor:
    """From the last chunk to the first: fill dv and add to dz through each write; gives Σ_i dO_iᵀZ_i over the chunks.

    The sum leaves out a first chunk that read W0 alone, unless W0's gradient is needed.
    """
    carry, start = given.matrix(), None
    steps = document.chunks - (0 if needs_weight or document.begins else 1)
    slots = given.slots(document.writes, matrices)
    for group in groups(document.writes, len(slots), document.writes == document.chunks, steps):
        filled = slots[-group.count :] if group.count else None
        walk(
            d_out, given.z, carry, filled, first=document.span(document.chunks - 1 - group.done, document.chunks)[0], stop=document.stop,
            chunk=document.chunk, steps=group.steps, backward=True, start=start, lead=group.lead, scale=given.eta, base=base,
        )  # fmt: skip
        start = carry
        if filled is not None:
            _through_group(given, document, filled, document.writes - group.first - group.count, dz, dv)
    return carry


def _through_group(given: Operands, document: Document, group: Tensor, first: int, dz: Tensor, dv: Tensor) -> None:
    """dV_j = c_j Z_j R_jᵀ and dZ_j += c_j V_j R_j for the chunks from `first` on, all of them complete."""
    last = first + len(group)
    keys, values, d_keys, d_values = (by_chunk(x, document, first, last) for x in (given.z, given.v, dz, dv))
    torch.bmm(keys, group.mT, out=d_values)
    if document in given.clips:
        factors, squares = (x[first:last] for x in given.clips[document])
        add_clip_gradient(keys, values, group, factors, squares, d_keys, d_values)
    else:
        d_keys.baddbmm_(values, group)


def _add_plain(given: Operands, d_out: Tensor, d_weight: Tensor | None) -> Tensor:
    """dW0 [d, h] float32 with what the tokens outside of the walked documents add."""
    for start, stop in given.plan.outside:
        into = given.matrix() if d_weight is None else d_weight
        chunk = -(-(stop - start) // 64) * 64  # one chunk, its end cut off by the span's
        walk(d_out, given.z, into, None, first=start, stop=stop, chunk=chunk, steps=1, start=d_weight)
        d_weight = into
    return torch.zeros(given.shape, dtype=torch.float32, device=given.z.device) if d_weight is None else d_weight
