"""Error-correcting writes (extension): a chunk writes what the state does not say yet.

Where the paper adds VᵀZ, this adds the Δ that minimises ‖V - Z(S + Δ)ᵀ‖² + λ‖Δ‖², that is Δ = (V - ZSᵀ)ᵀ(ZZᵀ + λI)⁻¹Z:
the regularised affine projection of adaptive filtering, and the delta rule taken implicitly. Keys that collide, in the
chunk or with what is written, are told apart as far as λ lets them, and no step is too long, whatever the keys. Towards
large λ it is the paper's rule with η/λ. The state is no sum any more, so that nothing here is parallel over chunks or
shared by ranks, and autograd keeps one state [d, h] for each chunk that is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ChunkLayout
from .precision import state_dtype, without_autocast
from .reference import clip_factor


def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: ChunkLayout,
    damping: float,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, d] and final state [B, d, h]; arguments as in `inplace_ttt.ops.fast_weight`."""
    accurate = state_dtype(z.dtype)
    zero = z.new_zeros(v.shape[-1], z.shape[-1], dtype=accurate)
    rows, states = [], []
    with without_autocast(z.device):
        keys, values = z.to(accurate), v.to(accurate)
        for row, documents in enumerate(layout.documents):
            reads, done = [], 0
            state = zero if initial_state is None else initial_state[row]
            for number, document in enumerate(documents):
                state = zero if number > 0 else state
                for start, stop in layout.chunks(document):
                    chunk = keys[row, start:stop]
                    read = chunk @ state.T
                    reads += [values.new_zeros(start - done, v.shape[-1]), eta * read]
                    done = stop
                    if layout.is_complete((start, stop)):
                        delta = correction(chunk, values[row, start:stop] - read, damping)
                        state = state + (delta if clip is None else clip_factor(delta, clip) * delta)
            rows.append(torch.cat([*reads, values.new_zeros(layout.length - done, v.shape[-1])]))
            states.append(state)
    out = torch.stack(rows).to(z.dtype)
    return out if weight is None else out + torch.nn.functional.linear(z, weight), torch.stack(states)


def correction(keys: Tensor, error: Tensor, damping: float) -> Tensor:
    """Eᵀ(ZZᵀ + λI)⁻¹Z [d, h] of a chunk's keys [C, h] and error E = V - ZSᵀ [C, d]."""
    gram = keys @ keys.T
    gram.diagonal().add_(damping)
    return torch.cholesky_solve(error, torch.linalg.cholesky(gram)).T @ keys
