"""Code shared by forward and backward: a call's flat inputs, its plan, and the memory of its slots.

A slot is a matrix [d, h] that one chunk reads or is written with (`walk`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import dual
from .clip import Clips, clips_of
from .documents import Plan, plan_of
from .products import multiply
from .schedule import Launch, Run, reads
from .support import multiprocessors
from .walk import walk

SLOTS_BYTES = 1 << 30
"""Extra memory of a call for slots, in bytes.

With more memory, groups of chunks are larger. There are then fewer launches, and the running sum passes
through memory less often.
"""

_READING_TILE = (128, 256)
_WALKING_TILE = 128 * 256


@dataclass(frozen=True)
class Operands:
    """A call's inputs: z [N, h] and v [N, d] with N = B · T, weight [d, h] or None, start [B, d, h] or None.

    start is float32. eta is η. clips is None without a clip.
    """

    z: Tensor
    v: Tensor
    weight: Tensor | None
    start: Tensor | None
    eta: float
    plan: Plan
    clips: Clips | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.v.shape[1], self.z.shape[1]

    @property
    def factors(self) -> Tensor | None:
        return None if self.clips is None else self.clips.factors

    def matrices(self, count: int) -> Tensor:
        """Returns uninitialized matrices [count, d, h] float32."""
        return torch.empty(count, *self.shape, dtype=torch.float32, device=self.z.device)

    def slots(self, launches: Sequence[Launch]) -> Tensor | None:
        """Allocates slots [n, d, h] for the largest group; None if no launch uses slots."""
        count = max((launch.slots for launch in launches), default=0)
        return torch.empty(count, *self.shape, dtype=self.z.dtype, device=self.z.device) if count else None

    def limits(self) -> tuple[int, int, torch.device]:
        """Returns the slots per group, the number of concurrent parts of a launch, and the device."""
        programs, (d, h) = multiprocessors(self.z.device), self.shape
        slots = max(sum(document.chunks for document in self.plan.documents), 1)
        room = _room(slots, SLOTS_BYTES // (d * h * self.z.itemsize), self.plan.chunk, d, h, programs)
        return room, max(programs * _WALKING_TILE // (d * h), 1), self.z.device

    def readers(self, final: Tensor | None = None) -> Iterator[tuple[Tensor, tuple[Run, ...]]]:
        """Yields groups of the matrices that chunks read, W0 + ηS_i or ηS_i.

        Args:
            final: Receives S [B, d, h] after each row's last write; or None.

        Yields:
            The slots [n, d, h], and the chunks that use them. The next group overwrites the slots.
        """
        launches = reads(self.plan, final is not None, *self.limits())
        slots, carry = (
            self.slots(launches),
            self.matrices(max((launch.carries for launch in launches), default=0)),
        )
        for launch in launches:
            walk(
                self.v, self.z, launch, chunk=self.plan.chunk, shape=self.shape,
                slots=slots if launch.slots else None, carry=carry, start=self.start, final=final,
                base=self.weight, factors=self.factors, scale=self.eta, dither=True,
            )  # fmt: skip
            if launch.runs:
                assert slots is not None
                yield slots, launch.runs

    def read_plain(self, rows: Tensor, matrix: Tensor | None, out: Tensor) -> None:
        """Sets out = rows · matrix for the tokens whose product with W0 no walk computes, or 0 without W0."""
        if matrix is None:
            out.zero_()
        else:
            multiply(rows, matrix[None], [Run(start, stop, 0, 1) for start, stop in self.plan.plain], out)


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
    """Returns the flat operands of a call. The arguments are those of `library.fast_weight`."""
    # The clip's gradient is implemented for walks alone. In float16 a score, a sum over h, may overflow.
    longest = dual.longest(v.shape[-1], z.shape[-1]) if tau is None and z.dtype != torch.float16 else 0
    plan = plan_of(spans, z.shape[0], z.shape[1], chunk, longest, start is not None, hands_on)
    flat_z, flat_v = (x if x.stride(-1) == 1 else x.contiguous() for x in (z.flatten(0, 1), v.flatten(0, 1)))
    clips = None if tau is None else clips_of(flat_v, flat_z, plan, tau)
    weight, start = (None if x is None else x.contiguous() for x in (weight, start))
    return Operands(flat_z, flat_v, weight, start, eta, plan, clips)


@lru_cache(maxsize=256)
def _room(slots: int, fit: int, chunk: int, d: int, h: int, programs: int) -> int:
    """Returns the number of slots per group.

    If not all slots fit, it compares the sizes between half the limit and the limit. It chooses the size
    whose products leave the smallest part of the GPU idle, and among equals the largest.
    """
    fit = max(fit, 1)
    if slots <= fit:
        return slots
    rows, across = _READING_TILE
    widths = [-(-chunk // rows) * -(-width // across) for width in (d, h)]

    def waves(room: int) -> int:
        whole, rest = divmod(slots, room)
        return sum(whole * -(-room * tiles // programs) + -(-rest * tiles // programs) for tiles in widths)

    return min(range(fit, fit // 2, -1), key=waves)
