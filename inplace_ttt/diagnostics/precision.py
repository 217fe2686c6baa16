"""Measures the part of an update that rounding removes, and the dtype of the state.

Rounding may occur in the state, in a running weight, and in the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layer.cache import streams
from ..layer.fast_linear import FastWeight
from ..layout import ChunkLayout
from ..ops import fast_weight
from ..session.session import Session
from ..surgery import causal_lm


@dataclass(frozen=True)
class UpdateLost:
    """Fractions of the update that rounding removes, in Frobenius norm; None if nothing is written.

    Attributes:
        dtype: the assumed half precision. It is the model's own dtype, or bfloat16 for a full-precision
            model.
        state: lost fraction if S is summed in this dtype. None if the layer does not read that sum (ridge
            rule, preserved row norms).
        weight: lost fraction if W0 + ηS is summed in this dtype, as in the reference code.
        output: lost fraction in the layer's output, in the model's own dtype.
    """

    dtype: str
    state: float | None
    weight: float | None
    output: float | None


class running_sums:
    """Sums of the same deltas in half precision."""

    def __init__(self, like: Tensor, w0: Tensor | None, eta: float, dtype: torch.dtype) -> None:
        self.dtype = dtype if torch.finfo(dtype).bits < 32 else torch.bfloat16
        self.eta = eta
        self.state = torch.zeros_like(like, dtype=self.dtype)
        self.start = None if w0 is None else w0.detach().to(self.dtype)
        self.weight = None if self.start is None else self.start.clone()

    def add(self, delta: Tensor) -> None:
        self.state += delta.to(self.dtype)
        if self.weight is not None:
            self.weight += (self.eta * delta).to(self.dtype)

    def lost(self, state: Tensor, output: float | None) -> UpdateLost:
        """Returns the fractions lost, compared with the accurate `state` [d, h]."""
        in_state = _distance(self.state.to(state.dtype), state)
        in_weight = None
        if self.weight is not None and self.start is not None and self.eta > 0:
            in_weight = _distance(self.weight.to(state.dtype) - self.start.to(state.dtype), self.eta * state)
        return UpdateLost(str(self.dtype).removeprefix("torch."), in_state, in_weight, output)


def rounding_of_output(z: Tensor, w0: Tensor | None, eta: float, state: Tensor) -> float | None:
    """Returns the fraction of ηZSᵀ that is lost when Z W0ᵀ + ηZSᵀ is rounded to z's dtype.

    Args:
        z: keys [n, h].
        w0: pretrained weight [d, h], or None if it cannot be read.
        eta: η.
        state: S [d, h].

    Returns:
        The fraction; None without W0, without keys, or if the update is zero.
    """
    if w0 is None or not len(z):
        return None
    update = eta * (z.to(state.dtype) @ state.T)
    base = torch.nn.functional.linear(z, w0.to(z.dtype))
    return _distance(
        (base.to(state.dtype) + update).to(z.dtype).to(state.dtype) - base.to(state.dtype), update
    )


def _distance(found: Tensor, wanted: Tensor) -> float | None:
    norm = float(torch.linalg.vector_norm(wanted))
    return float(torch.linalg.vector_norm(found - wanted)) / norm if norm > 0 else None


def states_in_training(layers: dict[int, FastWeight]) -> dict[int, torch.dtype]:
    """Returns the dtype of the state that the op creates for each layer's dtype."""
    found = {}
    for index, layer in layers.items():
        dtype = next(layer.parameters()).dtype
        one = torch.ones(1, 1, 1, dtype=dtype if dtype.is_floating_point else torch.bfloat16)
        _, state = fast_weight(
            one, one, None, eta=1.0, layout=ChunkLayout.from_lengths([[1]], 1), return_state=True
        )
        found[index] = state.dtype
    return found


def states_in_reading(model: nn.Module, ids: Tensor) -> dict[int, torch.dtype]:
    """Returns the dtype of every layer's state in a session that reads token ids.

    Args:
        model: a converted model in eval mode.
        ids: token ids [1, n], at least one chunk.
    """
    lm = causal_lm(model)
    if not isinstance(lm, PreTrainedModel):
        return {}
    session = Session(lm)
    session.read(ids)
    return states_of(session)


def states_of(session: Session) -> dict[int, torch.dtype]:
    """Returns the dtype of the state by layer, for the layers of a session that have written."""
    return {
        index: stream.state.dtype
        for index, stream in streams(session.cache).items()
        if stream.state is not None
    }
