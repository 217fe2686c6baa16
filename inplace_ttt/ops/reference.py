"""The definition of In-Place TTT as a plain sequential loop (paper Eq. (1), Algorithm 1).

It is slow and differentiable. Every other form of the op must agree with it. Shapes: z [B, T, h], v [B, T,
d], W0 [d, h], gate [B, T], and state [B, d, h], or [B, d + h, h] under the ridge rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ChunkLayout
from ..rules import PAPER_RULE, RidgeRule, Rule, SumRule
from .norms import keeping_row_norms, spectral_norm
from .precision import state_dtype


def clip_factor(delta: Tensor, tau: float | Tensor | None) -> Tensor:
    """Returns c = min(1, tau / ‖delta‖_F), [..., 1, 1], for deltas [..., d, h]; 1 if tau is None.

    Values and gradients stay finite at ‖delta‖ = 0.
    """
    if tau is None:
        return delta.new_ones(())
    norm = torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
    exceeds = norm > tau
    return torch.where(exceeds, tau / torch.where(exceeds, norm, 1.0), 1.0)


def write_factor(delta: Tensor, clip: float | Tensor | None, rule: Rule) -> Tensor:
    """Returns the factor [..., 1, 1] by which a delta [..., d, h] is multiplied before it is added."""
    has_norm = isinstance(rule, SumRule) and rule.write_norm is not None
    return 1 / spectral_norm(delta) if has_norm else clip_factor(delta, clip)


def written(values: Tensor, keys: Tensor, counted: Tensor, clip: float | Tensor | None, rule: Rule) -> Tensor:
    """Returns the matrix [·, h] that a chunk adds to a state.

    Args:
        values: Targets [C, d].
        keys: Keys [C, h].
        counted: The keys [C, h], each times its gate.
        clip: Largest Frobenius norm of VᵀZ, or None.
        rule: The update rule. Under the ridge rule KᵀK is stacked below VᵀK.
    """
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
    """Returns the outputs [B, T, d] and the final state.

    The final state is [B, d, h], or [B, d + h, h] under the ridge rule. The arguments are those of
    `inplace_ttt.ops.fast_weight`.
    """
    accurate = state_dtype(z.dtype)
    keys, values = z.to(accurate), v.to(accurate)
    w0 = keys.new_zeros(v.shape[-1], z.shape[-1]) if weight is None else weight.to(accurate)
    out = keys @ w0.T  # the outputs of padding; those of documents are overwritten below
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
    """Returns the matrix M [d, h] that keys are multiplied by.

    Under the sum rule M is the state itself, the sum B of VᵀZ. Under the ridge rule M minimizes Σ ‖V - ZMᵀ‖²
    + λ‖M‖². The state then also holds the sum G of ZᵀZ below B, and M = B (G + λI)⁻¹ by the normal equations.
    λ is at least 8 ε tr G, a bound on the rounding error of G. The gradient treats it as a constant.
    """
    if not isinstance(rule, RidgeRule):
        return state
    width = state.shape[1]
    total, gram = state[:-width], state[-width:]
    ridge = max(rule.ridge, 8 * torch.finfo(state.dtype).eps * float(gram.detach().trace()))
    damped = (gram + gram.T) / 2 + ridge * torch.eye(width, dtype=state.dtype, device=state.device)
    return torch.linalg.solve(damped, total.T).T
