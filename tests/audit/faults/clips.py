"""Faults of the clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt import UpdateClip
from inplace_ttt.layer.fast_linear import FastWeight

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .rule import Rule, Step, with_rule
from .under_way import Patch, now, places_of_call

Plant = Callable[[Patch], None]
TIGHT = {"settings": {"clip": UpdateClip(0.02, relative=True), "eta": 3.0}}
ABSOLUTE = {"settings": {"clip": UpdateClip(0.1), "eta": 3.0}}
IN_TRAINING_TOO = {"settings": {"clip": UpdateClip(0.02, relative=True, mode="always"), "eta": 3.0}}
CLIP = "clip-inference clip-scope"


def other_tau(change: Callable[[FastWeight, Any, float], Any]) -> Callable[[float, When], Plant]:
    """Another bound where the condition holds anywhere in the call."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            def tau(self: FastWeight) -> Any:
                bound, call = real(self), now()
                acts = (
                    bound is not None
                    and call is not None
                    and any(when.holds(piece.place) for piece in places_of_call(call))
                )
                return change(self, bound, size) if acts else bound

            real = FastWeight.tau
            patch.setattr(FastWeight, "tau", tau)

        return plant

    return of


def over_eta(layer: FastWeight, bound: Any, size: float) -> Any:
    return bound / layer.eta


def by_entries(layer: FastWeight, bound: Any, size: float) -> Any:
    """The root mean square of an entry is meant to be the norm."""
    matrix = layer.base_weight()
    return bound * matrix.numel() ** 0.5


def loosened(layer: FastWeight, bound: Any, size: float) -> Any:
    return bound * (1 + size)


def over_the_batch(size: float) -> Rule:
    """A row's delta is shortened by the other rows' states, as if they were one matrix."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        others = sum((other.detach().square().sum() for other in at.beside), torch.zeros(()).to(delta))
        own = delta.detach().square().sum()
        return state + delta * (1 - size + size * (own / (own + others).clamp(min=1e-30)).sqrt())

    return Rule(write=write, looks_beside=True)


INFERENCE = tuple(
    when
    for when in only.ANYWHERE
    if not when.name.endswith(("in training", "with gradients")) and when is not only.IN_FLOAT32
)
KINDS: tuple[Kind, ...] = (
    Kind("the clip counts η", "clip", owned(CLIP), other_tau(over_eta), whens=(*INFERENCE, only.WITH_CACHE, only.DECODING), count=3,
         world=TIGHT),
    Kind("τ is meant for an entry", "clip", owned(f"{CLIP} clip-effect"), other_tau(by_entries), whens=(only.ALWAYS, *INFERENCE), count=3,
         world=ABSOLUTE),
    Kind("the clip is looser than it says", "clip", owned(CLIP), other_tau(loosened), (1.0, 0.3), (*INFERENCE, only.IN_TRAINING), 4,
         world=IN_TRAINING_TOO),
    Kind("the clip looks at all rows", "clip", owned(f"{CLIP} rows in-batches"), with_rule(over_the_batch), (1.0, 0.3),
         (only.IN_A_BATCH, only.LATER_ROWS, only.UNEVEN), 3, ("batch",), TIGHT),
)  # fmt: skip
