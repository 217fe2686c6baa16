"""The law: In-Place TTT as the plain sequential loop (paper Eq. (1), Algorithm 1). Slow, short, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ChunkLayout
from .precision import state_dtype


def clip_factor(delta: Tensor, tau: float | Tensor | None) -> Tensor:
    """c = min(1, tau / ‖delta‖_F), safe at ‖delta‖ = 0; 1 without a bound."""
    if tau is None:
        return delta.new_ones(())
    norm = torch.linalg.vector_norm(delta)
    exceeds = norm > tau
    return torch.where(exceeds, tau / torch.where(exceeds, norm, 1.0), 1.0)


def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: ChunkLayout,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    damping: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, d] and final state [B, d, h]; arguments as in `inplace_ttt.ops.fast_weight`."""
    accurate = state_dtype(z.dtype)
    keys, values = z.to(accurate), v.to(accurate)
    w0 = keys.new_zeros(v.shape[-1], z.shape[-1]) if weight is None else weight.to(accurate)
    out = keys @ w0.T  # what padding reads; documents are written over below
    states = []
    for row, documents in enumerate(layout.documents):
        state = torch.zeros_like(w0) if initial_state is None else initial_state[row]
        for number, document in enumerate(documents):
            if number > 0:
                state = torch.zeros_like(w0)  # reset at a document's first token
            for start, stop in layout.chunks(document):
                chunk = keys[row, start:stop]
                effective = w0 + eta * state  # apply …
                out[row, start:stop] = chunk @ effective.T
                if layout.is_complete((start, stop)):  # … then update
                    delta = _delta(chunk, values[row, start:stop], state, damping)
                    state = state + clip_factor(delta, clip) * delta
        states.append(state)
    return out.to(z.dtype), torch.stack(states)


def _delta(keys: Tensor, values: Tensor, state: Tensor, damping: float | None) -> Tensor:
    """A chunk's write [d, h]: VᵀZ, or with damping λ what minimises ‖V - Z(S + Δ)ᵀ‖² + λ‖Δ‖², by its normal equations."""
    if damping is None:
        return values.T @ keys
    error = values - keys @ state.T
    gram = keys.T @ keys + damping * torch.eye(keys.shape[1], dtype=keys.dtype, device=keys.device)
    return torch.linalg.solve(gram, keys.T @ error).T
