"""Faults of least squares and whitened keys, under conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt import KeyWhitening
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.whitened_keys import WhitenedKeys
from inplace_ttt.ops.least_squares_walk import Walk

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .op import rounded
from .rule import hand_in_states
from .under_way import Patch, Place, now, places_of_call

Plant = Callable[[Patch], None]
RAW = {"settings": {"update_rule": "ridge", "ridge": 0.5, "eta": 10.0}}
RIDGE = {
    "settings": {"update_rule": "ridge", "ridge": 0.5, "eta": 80.0, "whitening": KeyWhitening(rank=0.75)}
}


def writing(
    change: Callable[[Walk, int, Any, Tensor, Tensor, float], Tensor],
) -> Callable[[float, When], Plant]:
    """change: the walk, a row, chunks, the sums before and after them, a size -> those after them."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            def with_writes(self: Walk, row: int, group: Any, state: Tensor) -> tuple[Tensor, Tensor]:
                before, after = real(self, row, group, state)
                return (
                    (before, change(self, row, group, state, after, size))
                    if when.holds(_place(self, row, group))
                    else (before, after)
                )

            real = Walk.with_writes
            patch.setattr(Walk, "with_writes", with_writes)
            hand_in_states(patch, when)

        return plant

    return of


def _place(walk: Walk, row: int, group: Any) -> Place:
    call = now()
    if call is None:
        return Place(None)
    number = row if call.row is None else call.row
    documents = walk.layout.documents[row]
    document = next(i for i, (start, stop) in enumerate(documents) if start <= group.start < stop)
    done = call.before(number)[0] if document == 0 else 0
    return Place(
        call, number, document, done + (group.start - documents[document][0]) // walk.layout.chunk_size
    )


def fading_gram(walk: Walk, row: int, group: Any, before: Tensor, after: Tensor, size: float) -> Tensor:
    return torch.cat([after[: walk.d], after[walk.d :] - size * before[walk.d :]])


def coarse_gram(walk: Walk, row: int, group: Any, before: Tensor, after: Tensor, bits: float) -> Tensor:
    """On the diagonal, so that it stays a Gram matrix."""
    diagonal = after[walk.d :].diagonal()
    return torch.cat(
        [after[: walk.d], after[walk.d :] + (rounded(diagonal, bits) - diagonal).clamp(min=0).diag()]
    )


def gram_of_all_rows(walk: Walk, row: int, group: Any, before: Tensor, after: Tensor, size: float) -> Tensor:
    """Other rows' keys at the same place of their rows count too."""
    others = [walk.of(walk.k[other], group)[0] for other in range(len(walk.k)) if other != row]
    keys = torch.cat(others or [walk.k.new_zeros(0, walk.r)]).to(walk.dtype)
    return torch.cat([after[: walk.d], after[walk.d :] + size * keys.mT @ keys])


def with_keys(
    change: Callable[[WhitenedKeys, Tensor, Tensor, float], Tensor],
) -> Callable[[float, When], Plant]:
    """Other keys [B, T, r] where the condition holds."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            def keys(self: FastWeight, z: Tensor) -> Tensor:
                right, call = real(self, z), now()
                if self.ttt.keys is None or call is None:
                    return right
                at = torch.zeros(call.batch, call.tokens, 1, dtype=torch.bool)
                for piece in places_of_call(call):
                    at[piece.index, piece.start : piece.stop] = when.holds(piece.place)
                return torch.where(at, change(self.ttt.keys, z, right, size), right)

            real = FastWeight.keys
            patch.setattr(FastWeight, "keys", keys)

        return plant

    return of


def without_center(keys: WhitenedKeys, z: Tensor, right: Tensor, size: float) -> Tensor:
    return right + size * z.norm(dim=-1, keepdim=True) * (keys.directions @ keys.center).to(right.dtype)


def larger(keys: WhitenedKeys, z: Tensor, right: Tensor, size: float) -> Tensor:
    return right * (1 + size)


CHUNKS = tuple(
    when for when in only.ANYWHERE if when not in (only.IN_FLOAT32, only.AFTER_LOADING, only.IN_EVALUATION)
)
ROWS = (only.IN_A_BATCH, only.LATER_ROWS, only.LATER_LAYER)
LAW, SIZES = "least-squares", (1.0, 0.3, 0.1)
KINDS: tuple[Kind, ...] = (
    Kind("the Gram fades", "extension", owned(LAW), writing(fading_gram), (0.9, 0.3), (*CHUNKS, *only.STREAMED), 5, world=RAW),
    Kind("the Gram keeps few bits", "extension", owned(f"{LAW} state-precision"), writing(coarse_gram), (1, 2),
         (*CHUNKS, *only.STREAMED), 3, world=RIDGE),
    Kind("the Gram is of all rows", "extension", owned("rows in-batches"), writing(gram_of_all_rows), SIZES, ROWS, 3, ("batch",), RIDGE),
    Kind("the keys' center stays", "extension", owned("keys"), with_keys(without_center), (1.0, 0.3), (*CHUNKS, *only.STREAMED), 4,
         world=RIDGE),
    Kind("keys are too large", "extension", owned(f"keys {LAW}"), with_keys(larger), (1.0, 0.3), (*CHUNKS, *only.STREAMED), 4,
         world=RIDGE),
)  # fmt: skip
