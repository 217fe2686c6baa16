"""The walk, a loop over chunks that keeps a running sum in registers and writes each intermediate value once.

For A [N, d] and B [N, h], over the chunks j of one document:

    S_{j+1} = S_j + c_j A_jᵀ B_j           float32; one (d, h) tile per program, from first chunk to last
    slot_q  = base + scale · S_q           in the dtype of the inputs

In the forward, A is the targets and B the keys. S is the state, and a slot is the weight that a chunk reads.
The backward walks from the last chunk to the first, and A is the gradient of the outputs. S is then the
gradient of the state, and a slot is the gradient of a chunk's write, times the write's c_j. A delta A_jᵀB_j
is never stored in memory. S is stored only where a walk stops. One launch walks a list of stretches, which
are parts of documents. Each program computes the same tile of all stretches, one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .schedule import FIELDS, Launch
from .support import has_tensor_copies
from .tuning import Tile, capability, run_tuned, tiles
from .walk_kernel import lead_kernel, walk_kernel


def walk(
    a: Tensor,
    b: Tensor,
    launch: Launch,
    *,
    chunk: int,
    shape: tuple[int, int],
    slots: Tensor | None = None,
    carry: Tensor | None = None,
    start: Tensor | None = None,
    final: Tensor | None = None,
    total: Tensor | None = None,
    base: Tensor | None = None,
    factors: Tensor | None = None,
    scale: float = 1.0,
    dither: bool = False,
) -> None:
    """Walks the stretches of a launch and writes their slots.

    Args:
        a: Rows [N, d], each row contiguous.
        b: Rows [N, h] of a's dtype, each row contiguous.
        launch: The stretches.
        chunk: Tokens per chunk.
        shape: (d, h).
        slots: [n, d, h], receives the slots.
        carry: [·, d, h] float32: sums that stretches start from and leave, numbered as in `schedule`.
        start: [B, d, h] float32: the rows' initial sums.
        final: [B, d, h] float32: receives the rows' final sums.
        total: [splits, d, h] float32; each split adds the sums of the documents that end in it.
        base: W0 [d, h], or float32 matrices [B, d, h].
        factors: c_j of every write of the call, float32; None without a clip.
        scale: Factor of the sums in a slot.
        dither: True rounds slots stochastically, in dtypes of 16 bits.
    """
    d, h = shape
    assert a.stride(1) == b.stride(1) == 1 and a.dtype == b.dtype and a.shape[0] < 2**31
    assert all(x is None or x.is_contiguous() for x in (slots, carry, start, final, total, base))
    dtype, dither = getattr(tl, str(a.dtype).removeprefix("torch.")), dither and a.dtype != torch.float32
    none = torch.empty(0, dtype=torch.float32, device=a.device)
    start, carry, final = (none if x is None else x for x in (start, carry, final))
    if launch.leads is not None:
        grid = (triton.cdiv(d, 32) * triton.cdiv(h, 64), len(launch.leads))
        lead_kernel[grid](
            start, slots, base, factors, launch.leads, scale, d, h,
            HAS_START=start.numel() > 0, HAS_BASE=base is not None, DITHER=dither,
            SCALED=factors is not None and launch.backward, DTYPE=dtype, BD=32, BH=64,
        )  # fmt: skip
    if not launch.steps and not launch.moves:
        return
    given = [x for x in (a, b, slots) if x is not None]
    can_copy = a.dtype != torch.float32 and has_tensor_copies(a.device) and all(_is_aligned(x) for x in given)
    copies = can_copy and chunk % tiles(a.dtype, capability(a.device))[0].depth == 0

    def run(tile: Tile) -> None:
        base_by_tile = (
            copies and base is not None and base.dim() == 2 and base.dtype == a.dtype and _is_aligned(base)
        )
        part = tile.columns // tile.parts
        described = [a, b, slots]
        if copies:
            described = [
                TensorDescriptor.from_tensor(a, [tile.depth, tile.rows]),
                TensorDescriptor.from_tensor(b, [tile.depth, tile.columns]),
                None if slots is None else TensorDescriptor.from_tensor(slots, [1, tile.rows, part]),
            ]
        by_pointer = not copies or launch.has_tail
        walk_kernel[(triton.cdiv(d, tile.rows) * triton.cdiv(h, tile.columns), launch.splits)](
            described[0] if copies else None, described[1] if copies else None,
            a if by_pointer else None, b if by_pointer else None,
            launch.table, launch.bounds, start, carry, final, described[2],
            TensorDescriptor.from_tensor(base, [tile.rows, part]) if base_by_tile else base, factors, total,
            chunk, launch.batch, scale, d, h, a.stride(0), b.stride(0),
            BACKWARD=launch.backward, HAS_SLOTS=slots is not None, HAS_BASE=base is not None,
            BASE_BY_TILE=base_by_tile, DITHER=dither, CLIPPED=factors is not None, ADDS=total is not None,
            HAS_TAIL=launch.has_tail, BY_TILE=copies, DTYPE=dtype,
            PRECISION="ieee" if a.dtype == torch.float32 else "tf32", FIELDS=FIELDS, BD=tile.rows,
            BH=tile.columns, BK=tile.depth, PARTS=tile.parts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    is_large = (factors is not None and not launch.backward) or (base is not None and base.dtype != a.dtype)
    candidates = tiles(a.dtype, capability(a.device), two_sums=is_large, by_pointer=not copies)
    writes_every = None if slots is None else chunk.bit_length()
    key = (
        "walk",
        a.device,
        a.dtype,
        d,
        h,
        writes_every,
        None if base is None else base.dtype,
        factors is None,
        copies,
    )
    run_tuned(
        key,
        candidates,
        run,
        repeatable=launch.is_first,
        restore=None if total is None else total.zero_,
        device=a.device,
    )


def _is_aligned(x: Tensor) -> bool:
    """Returns True if a descriptor can describe x: its rows and its start are aligned to 16 bytes."""
    return (
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
    )
