"""Forward and backward of the op. Walks compute matrices, and products read these matrices, group by group.

The forward is O_i = Z_i E_iᵀ with E_i = W0 + ηS_i. In the backward, let R_j be the gradient of S_{j+1}, which
is also the gradient of chunk j's write:

    dZ_i = dO_i E_i + c_i V_i R_i      dV_i = c_i Z_i R_iᵀ
    R_j = η Σ_{i>j} dO_iᵀZ_i + dS      dW0 = Σ_i dO_iᵀZ_i

The backward repeats the walk over S. A second walk, from the last chunk to the first, computes R. Its final
sum is dW0. Short documents use the dual form, in addition to a product with W0 alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import dual
from .clip import add_gradient
from .documents import Plan
from .operands import Operands
from .products import multiply
from .schedule import to_device, writes
from .walk import walk


def forward(given: Operands, batch: int, hands_on: bool) -> tuple[Tensor, Tensor]:
    """Returns the outputs [N, d] and, if `hands_on`, the last states [B, d, h] (else an empty tensor)."""
    out = torch.empty(given.v.shape, dtype=given.v.dtype, device=given.v.device)
    given.read_plain(given.z, None if given.weight is None else given.weight.T, out)
    state = given.matrices(batch if hands_on else 0)
    for slots, runs in given.readers(state if hands_on else None):
        multiply(given.z, slots.mT, runs, out)
    dual.add_reads(given.z, given.v, given.plan, given.eta, out)
    return out, state


def backward(
    given: Operands, d_out: Tensor, d_state: Tensor | None, batch: int, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of z and v [N, …], of W0 and of the start states; d_out [N, d].

    W0's gradient is [d, h] float32, or None if it is not needed. The gradient of the start states is [B, d,
    h], or None without a start state.
    """
    dz = torch.empty(given.z.shape, dtype=given.z.dtype, device=given.z.device)
    given.read_plain(d_out, given.weight, dz)
    for slots, runs in given.readers():
        multiply(d_out, slots, runs, dz)
        del slots  # frees their memory before the slots of the second walk are allocated

    dv = torch.zeros_like(given.v)
    d_weight, d_start = _through_writes(given, d_out, d_state, batch, needs_weight, dz, dv)
    if given.clips is not None:
        add_gradient(given.clips, given.z, given.v, dz, dv)
    dual.add_gradients(given.z, given.v, d_out, given.plan, given.eta, dz, dv)
    return dz, dv, d_weight, d_start


def _through_writes(
    given: Operands,
    d_out: Tensor,
    d_state: Tensor | None,
    batch: int,
    needs_weight: bool,
    dz: Tensor,
    dv: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Sets dv, and adds the part of each write to dz, from cR of one group at a time.

    Returns dW0, if needed, and the start states' gradients.
    """
    launches = writes(given.plan, needs_weight, *given.limits())
    slots, carry = (
        given.slots(launches),
        given.matrices(max((launch.carries for launch in launches), default=0)),
    )
    begun = None if given.start is None else given.matrices(batch)
    splits = max((launch.splits for launch in launches), default=1)
    total = given.matrices(splits).zero_() if needs_weight else None
    for launch in launches:
        walk(
            d_out, given.z, launch, chunk=given.plan.chunk, shape=given.shape,
            slots=slots if launch.slots else None, carry=carry, final=begun, total=total, base=d_state,
            factors=given.factors if launch.slots else None, scale=given.eta,
        )  # fmt: skip
        if slots is not None:
            multiply(given.z, slots.mT, launch.runs, dv)
            multiply(given.v, slots, launch.runs, dz, add=True)
    d_weight = None if total is None else total[0] if splits == 1 else total.sum(dim=0)
    return d_weight, None if begun is None else _starts(given, begun, d_state)


def _starts(given: Operands, begun: Tensor, d_state: Tensor | None) -> Tensor:
    """Returns the start states' gradients [B, d, h] from the sums over each row's first document.

    If a row's single document starts from the start state and ends in the last state, dS is included.
    """
    begun.mul_(given.eta)
    if d_state is not None:
        through, others = _undivided(given.plan, given.z.device)
        begun += d_state if all(through) else d_state.masked_fill(others[:, None, None] > 0, 0.0)
    return begun


@lru_cache(maxsize=64)
def _undivided(plan: Plan, device: torch.device) -> tuple[tuple[bool, ...], Tensor]:
    """Returns True for each row whose last state depends on its first state, and the negation on the device.

    The dependence exists only if a single document connects both.
    """
    rows = {document.row for document in plan.documents if document.begins and document.ends}
    through = tuple(row in rows for row in range(plan.batch))
    return through, to_device([not is_through for is_through in through], device)
