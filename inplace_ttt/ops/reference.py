"""The law: In-Place TTT as the plain sequential loop (paper Eq. (1), Algorithm 1). Slow, short,
differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ChunkLayout
from ..rules import PAPER_RULE, RidgeRule, Rule, SumRule
from .norms import keeping_row_norms, spectral_norm
from .precision import state_dtype


def clip_factor(delta: Tensor, tau: float | Tensor | None) -> Tensor:
    """c = min(1, tau / ‖delta‖_F) [..., 1, 1] of deltas [..., d, h], safe at ‖delta‖ = 0; 1 without a
    bound."""
    if tau is None:
        return delta.new_ones(())
    norm = torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
    exceeds = norm > tau
    return torch.where(exceeds, tau / torch.where(exceeds, norm, 1.0), 1.0)


def write_factor(delta: Tensor, clip: float | Tensor | None, rule: Rule) -> Tensor:
    """What a delta [..., d, h] is multiplied by before it is added [..., 1, 1]."""
    has_norm = isinstance(rule, SumRule) and rule.write_norm is not None
    return 1 / spectral_norm(delta) if has_norm else clip_factor(delta, clip)


def written(values: Tensor, keys: Tensor, counted: Tensor, clip: float | Tensor | None, rule: Rule) -> Tensor:
    """What a chunk adds to a state [·, h], of values [C, d] and keys [C, h]; counted: the keys, each times
    its gate."""
    delta = values.T @ counted
    factor = write_factor(delta, clip, rule)
    return factor * (torch.cat([delta, keys.T @ counted]) if isinstance(rule, RidgeRule) else delta)


def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: ChunkLayout,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    rule: Rule = PAPER_RULE,
    gate: Tensor | None = None,
    keep_norms_of: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, d] and final state, [B, d, h] or, by the ridge rule, [B, d + h, h]; arguments as in
    `inplace_ttt.ops.fast_weight`."""
    accurate = state_dtype(z.dtype)
    keys, values = z.to(accurate), v.to(accurate)
    w0 = keys.new_zeros(v.shape[-1], z.shape[-1]) if weight is None else weight.to(accurate)
    out = keys @ w0.T  # what padding reads; documents are written over below
    kept = None if keep_norms_of is None else keep_norms_of.to(accurate)
    empty = w0.new_zeros(rule.state_rows(*w0.shape), w0.shape[1])
    states = []
    for row, documents in enumerate(layout.documents):
        state = empty if initial_state is None else initial_state[row]
        for number, document in enumerate(documents):
            if number > 0:
                state = empty  # reset at a document's first token
            for start, stop in layout.chunks(document):
                chunk = keys[row, start:stop]
                read = _read(state, rule) if kept is None else keeping_row_norms(state, kept, eta)
                effective = w0 + eta * read  # apply …
                out[row, start:stop] = chunk @ effective.T
                if layout.is_complete((start, stop)):  # … then update
                    counted = chunk if gate is None else gate[row, start:stop, None].to(accurate) * chunk
                    state = state + written(values[row, start:stop], chunk, counted, clip, rule)
        states.append(state)
    return out.to(z.dtype), torch.stack(states)


def _read(state: Tensor, rule: Rule) -> Tensor:
    """What a key is read with [d, h]: the sum B of VᵀZ itself, or by the ridge rule the M that minimizes Σ ‖V
    - ZMᵀ‖² + λ‖M‖².

    For the second the state holds the sum G of ZᵀZ below B, and M = B (G + λI)⁻¹, the normal equations. To λ
    comes what rounding may have taken from G, 8 ε tr G, a constant to the gradient.
    """
    if not isinstance(rule, RidgeRule):
        return state
    width = state.shape[1]
    total, gram = state[:-width], state[-width:]
    ridge = rule.ridge + 8 * torch.finfo(state.dtype).eps * float(gram.detach().trace())
    damped = (gram + gram.T) / 2 + ridge * torch.eye(width, dtype=state.dtype, device=state.device)
    return torch.linalg.solve(damped, total.T).T
