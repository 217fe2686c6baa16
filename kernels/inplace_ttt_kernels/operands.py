"""What forward and backward share: the flat inputs of a call, its plan, and the room that its slots may take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import dual
from .clip import chunk_factors
from .documents import Document, Plan, groups, plan_of
from .walk import walk

COPIES = 3
"""Extra memory of a call in float32 copies of W0, whatever the length; more makes larger groups of chunks, and fewer launches."""


@dataclass(frozen=True)
class Operands:
    """z [N, h] and v [N, d] with N = B · T; weight [d, h] or None; start [B, d, h] float32 or None; tau [] or None."""

    z: Tensor
    v: Tensor
    weight: Tensor | None
    start: Tensor | None
    tau: Tensor | None
    eta: float
    plan: Plan
    clips: dict[Document, tuple[Tensor, Tensor]]

    @property
    def shape(self) -> tuple[int, int]:
        return self.v.shape[1], self.z.shape[1]

    def matrix(self) -> Tensor:
        """An uninitialised [d, h] float32."""
        return torch.empty(self.shape, dtype=torch.float32, device=self.z.device)

    def slots(self, wanted: int, matrices: int) -> Tensor:
        """Room for at most `wanted` slots beside so many float32 matrices."""
        room = max(1, 4 * (COPIES - matrices) // self.z.itemsize)
        return torch.empty(min(room, wanted), *self.shape, dtype=self.z.dtype, device=self.z.device)

    def factors(self, document: Document) -> Tensor | None:
        return self.clips[document][0] if document in self.clips else None

    def readers(self, document: Document, final: Tensor | None = None) -> Iterator[tuple[Tensor, int]]:
        """Groups of what the document's chunks read, W0 + ηS_i or ηS_i: (slots [n, d, h], the first chunk of the group).

        final [d, h]: where to leave S after the last write. A group's slots are overwritten by the next.
        """
        reads = document.chunks - document.read_from
        if not reads and final is None:
            return
        writes = document.writes if final is not None else min(document.writes, document.chunks - 1)
        slots = self.slots(reads, 1 if final is None else 0)
        carry = self.matrix() if final is None else final
        start = self.start[document.row] if self.start is not None and document.begins else None
        for group in groups(reads, len(slots), document.begins, writes):
            filled = slots[: group.count] if group.count else None
            walk(
                self.v, self.z, carry, filled, first=document.span(group.done, group.done)[0], stop=document.stop,
                chunk=document.chunk, steps=group.steps, start=start, lead=group.lead, number=group.done,
                keeps=not group.is_last or final is not None, scale=self.eta, base=self.weight, dither=True, factors=self.factors(document),
            )  # fmt: skip
            start = carry
            if filled is not None:
                yield filled, document.read_from + group.first


def operands_of(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    start: Tensor | None,
    tau: Tensor | None,
    spans: Tensor,
    chunk: int,
    eta: float,
    hands_on: bool,
) -> Operands:
    """The flat operands of a call; arguments as in `library.fast_weight`."""
    # the clip's gradient is made for walks; in float16 a score, a sum over h, may overflow
    longest = dual.longest(v.shape[-1], z.shape[-1]) if tau is None and z.dtype != torch.float16 else 0
    plan = plan_of(spans, *z.shape[:2], chunk, longest, start is not None, hands_on)
    flat_z, flat_v = (x if x.stride(-1) == 1 else x.contiguous() for x in (z.flatten(0, 1), v.flatten(0, 1)))
    clips = {} if tau is None else chunk_factors(flat_v, flat_z, plan.documents, chunk, tau)
    weight, start = (None if x is None else x.contiguous() for x in (weight, start))
    return Operands(flat_z, flat_v, weight, start, tau, eta, plan, clips)


def by_chunk(x: Tensor, document: Document, first: int, last: int) -> Tensor:
    """Rows of the complete chunks first:last of a flat [N, n], as [chunks, C, n]."""
    start, stop = document.span(first, last)
    return x[start:stop].unflatten(0, (last - first, document.chunk))
