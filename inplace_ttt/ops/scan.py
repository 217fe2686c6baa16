"""The op over a sequence split across ranks (paper §3.4, Algorithm 1).

Each rank sums its writes, the ranks exchange sums in a scan, and each rank reads its chunks. Rank r of P
holds tokens [r·T/P, (r+1)·T/P) of every row:

    z                 [B, T/P, h]
    v                 [B, T/P, d]
    sums              [B, d, h]        writes of the rank's last document, which may continue on the next rank
    links             [B, P+1, P+1]    1 if a rank's start (row) includes a sum (column), else 0
    start, final      [B, d, h]

Under the ridge rule d + h replaces d in sums, start and final. A rank's starting state is a sum of earlier
ranks' sums, which the 0/1 matrix `ChunkLayout.links` selects. The backward uses the transposed matrix. Each
rank computes the starting states for one slice of d. One all-to-all collects that slice from all ranks, and a
second one returns the results. So a rank sends less than 2·d·h numbers for any P. Example: one document over
three ranks, with a, b, c for the three slices of d.

                  rank 0             rank 1             rank 2
    local sums    Σ0                 Σ1                 Σ2                 [d, h]
    all-to-all    Σ0a  Σ1a  Σ2a      Σ0b  Σ1b  Σ2b      Σ0c  Σ1c  Σ2c      into slices
    times links   0  Σ0a  Σ0a+Σ1a    0  Σ0b  Σ0b+Σ1b    0  Σ0c  Σ0c+Σ1c    starts of ranks 0, 1 and 2
    all-to-all    0                  Σ0                 Σ0 + Σ1            back to the ranks, [d, h]
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..device_copies import on_device
from ..layout import ChunkLayout
from ..rules import PAPER_RULE, Rule
from . import fast_weight
from .forms import form_of
from .precision import state_dtype


@overload
def fast_weight_across_ranks(
    z: Tensor, v: Tensor, weight: Tensor | None, *, eta: float, layout: ChunkLayout, group: ProcessGroup,
    initial_state: Tensor | None = ..., clip: float | Tensor | None = ..., rule: Rule = ...,
    gate: Tensor | None = ..., keep_norms_of: Tensor | None = ..., return_state: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def fast_weight_across_ranks(
    z: Tensor, v: Tensor, weight: Tensor | None, *, eta: float, layout: ChunkLayout, group: ProcessGroup,
    initial_state: Tensor | None = ..., clip: float | Tensor | None = ..., rule: Rule = ...,
    gate: Tensor | None = ..., keep_norms_of: Tensor | None = ..., return_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def fast_weight_across_ranks(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: ChunkLayout,
    group: ProcessGroup,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    rule: Rule = PAPER_RULE,
    gate: Tensor | None = None,
    keep_norms_of: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `fast_weight` for this rank's part of each row. All ranks must call it, forward and backward.

    Args:
        z: This rank's keys [B, T/P, h].
        v: This rank's targets [B, T/P, d].
        weight: W0 [d, h] or None, as in `fast_weight`.
        eta: η, the factor of S.
        layout: The layout of the full rows of T tokens.
        group: The process group whose P ranks share each row.
        initial_state: The full rows' state, equal on every rank: [B, d, h], or [B, d + h, h] under the ridge
            rule. The sum of its gradients over the ranks is the full gradient.
        clip: As in `fast_weight`.
        rule: As in `fast_weight`.
        gate: This rank's gate [B, T/P].
        keep_norms_of: As in `fast_weight`.
        return_state: True also returns the full rows' final state, equal on every rank.

    Returns:
        This rank's outputs [B, T/P, d]. With `return_state`, a pair of the outputs and the state.

    Raises:
        InPlaceTTTError: If a border between ranks would cut a chunk.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    part = layout.part(rank, ranks)
    links, links_here = _links(
        layout, ranks, initial_state is not None, return_state, z.device, state_dtype(z.dtype)
    )
    given: dict[str, Any] = {"clip": clip, "rule": rule, "gate": gate}
    if not links.any():  # no document crosses a border
        return fast_weight(z, v, weight, eta=eta, layout=part, keep_norms_of=keep_norms_of, **given)
    wanted = links[:, :, rank + 1].any(dim=1).tolist()
    spans = [spans[-1] if spans and wanted[row] else None for row, spans in enumerate(part.documents)]
    sums = form_of(rule).sum_of_writes(z, v, spans, layout=part, **given)
    start, final = _Scan.apply(sums, initial_state, links_here, group, return_state)
    out = fast_weight(
        z, v, weight, eta=eta, layout=part, initial_state=start, keep_norms_of=keep_norms_of, **given
    )
    return (out, final) if return_state else out


@functools.lru_cache(maxsize=16)
def _links(
    layout: ChunkLayout, ranks: int, starts: bool, hands_on: bool, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the links that this call uses, on the host and on the device. All layers share one copy.

    starts: the call has an initial state. hands_on: the call returns the final state.
    """
    links = layout.links(ranks)
    if not starts:
        links[:, :, 0] = 0
    if not hands_on:
        links[:, -1] = 0
    return links, on_device(links.to(dtype), device)


class _Scan(torch.autograd.Function):
    """Maps (sums, initial state) of all ranks to this rank's start and the final state, each [B, ·, h]."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, initial: Tensor | None, links: Tensor, group: ProcessGroup, wants_final: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.links, ctx.group, ctx.has_initial, ctx.wants_final = (
            links,
            group,
            initial is not None,
            wants_final,
        )
        ctx.set_materialize_grads(False)
        exchange = _Exchange(sums, group)
        first = (
            sums.new_zeros(()).expand(exchange.slice_shape)
            if initial is None
            else exchange.own_slice(initial)
        )
        into = torch.einsum(
            "brq,qbdh->rbdh", links, torch.cat([first[None], exchange.all_to_all_into_slices(sums)])
        )
        return exchange.all_to_all_back(into[:-1]), exchange.all_to_all_back(
            into[-1:].expand_as(into[:-1])
        ) if wants_final else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_start: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        some = d_start if d_start is not None else d_final
        assert some is not None
        exchange = _Exchange(some, ctx.group)
        into_start = exchange.all_to_all_into_slices(torch.zeros_like(some) if d_start is None else d_start)
        into_final = torch.zeros_like(into_start[:1])
        if ctx.wants_final:  # every rank returns the final state, so its gradient is the sum over ranks
            into_final = exchange.all_to_all_into_slices(
                torch.zeros_like(some) if d_final is None else d_final
            ).sum(0, keepdim=True)
        d_from = torch.einsum("brq,rbdh->qbdh", ctx.links, torch.cat([into_start, into_final]))
        return (
            exchange.all_to_all_back(d_from[1:]),
            exchange.placed(d_from[0]) if ctx.has_initial else None,
            None,
            None,
            None,
        )


class _Exchange:
    """Exchanges matrices [B, d, h] of all ranks in slices of d.

    Rank r holds slice r of every rank's matrix: [P, B, ⌈d/P⌉, h].
    """

    def __init__(self, like: Tensor, group: ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.rows = like.shape[1]
        self.slice_shape = (like.shape[0], -(-self.rows // self.ranks), like.shape[2])

    def _slices(self, whole: Tensor) -> Tensor:
        batch, width, columns = self.slice_shape
        padded = torch.nn.functional.pad(whole, (0, 0, 0, width * self.ranks - self.rows))
        return padded.view(batch, self.ranks, width, columns).transpose(0, 1)

    def _all_to_all(self, slices: Tensor) -> Tensor:
        received = torch.empty(slices.shape, dtype=slices.dtype, device=slices.device)
        dist.all_to_all_single(received, slices.contiguous(), group=self.group)
        return received

    def own_slice(self, whole: Tensor) -> Tensor:
        return self._slices(whole)[self.rank]

    def all_to_all_into_slices(self, whole: Tensor) -> Tensor:
        """Sends each rank its slice of this rank's matrix. Returns this rank's slice of all matrices."""
        return self._all_to_all(self._slices(whole))

    def all_to_all_back(self, slices: Tensor) -> Tensor:
        """Reverses the exchange. Returns this rank's matrix [B, d, h] from the slices of all matrices."""
        batch, width, columns = self.slice_shape
        received = self._all_to_all(slices).transpose(0, 1)
        return received.reshape(batch, width * self.ranks, columns)[:, : self.rows].contiguous()

    def placed(self, own: Tensor) -> Tensor:
        """Returns a matrix that holds this rank's slice and zero elsewhere."""
        batch, width, columns = self.slice_shape
        whole = own.new_zeros(batch, self.ranks, width, columns)
        whole[:, self.rank] = own
        return whole.view(batch, -1, columns)[:, : self.rows].contiguous()
