"""The law: In-Place TTT as the plain sequential loop (paper Eq. (1), Algorithm 1). Slow, short, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ChunkLayout
from .precision import state_dtype


def clip_factor(delta: Tensor, tau: float | Tensor | None) -> Tensor:
    """c = min(1, tau / ‖delta‖_F) [..., 1, 1] of deltas [..., d, h], safe at ‖delta‖ = 0; 1 without a bound."""
    if tau is None:
        return delta.new_ones(())
    norm = torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
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
    """Outputs [B, T, d] and final state, [B, d, h] or, with damping, [B, d + h, h]; arguments as in `inplace_ttt.ops.fast_weight`."""
    accurate = state_dtype(z.dtype)
    keys, values = z.to(accurate), v.to(accurate)
    w0 = keys.new_zeros(v.shape[-1], z.shape[-1]) if weight is None else weight.to(accurate)
    out = keys @ w0.T  # what padding reads; documents are written over below
    empty = w0.new_zeros(len(w0) if damping is None else sum(w0.shape), w0.shape[1])
    states = []
    for row, documents in enumerate(layout.documents):
        state = empty if initial_state is None else initial_state[row]
        for number, document in enumerate(documents):
            if number > 0:
                state = empty  # reset at a document's first token
            for start, stop in layout.chunks(document):
                chunk = keys[row, start:stop]
                effective = w0 + eta * _read(state, damping)  # apply …
                out[row, start:stop] = chunk @ effective.T
                if layout.is_complete((start, stop)):  # … then update
                    delta = values[row, start:stop].T @ chunk
                    factor = clip_factor(delta, clip)
                    state = state + factor * (delta if damping is None else torch.cat([delta, chunk.T @ chunk]))
        states.append(state)
    return out.to(z.dtype), torch.stack(states)


def _read(state: Tensor, damping: float | None) -> Tensor:
    """What a key is read with [d, h]: the sum B of VᵀZ itself, or with damping λ what minimises Σ ‖V - ZMᵀ‖² + λ‖M‖².

    For that the state holds the sum G of ZᵀZ below B, and M = B (G + λI)⁻¹, the normal equations.
    """
    if damping is None:
        return state
    width = state.shape[1]
    total, gram = state[:-width], state[-width:]
    damped = (gram + gram.T) / 2 + damping * torch.eye(width, dtype=state.dtype, device=state.device)
    return torch.linalg.solve(damped, total.T).T
