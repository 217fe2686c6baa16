"""The fast-weight op. It reads a sequence with a weight that the sequence itself updates, chunk by chunk.

Shapes, for B sequences, T tokens, model width d and MLP width h:

    z        [B, T, h]    keys: the down-projection's input
    v        [B, T, d]    targets
    weight   [d, h]       W0
    gate     [B, T]       β, the weight of each token's write (ridge rule)
    state    [B, d, h]    S; under the ridge rule [B, d + h, h], the sum of VᵀZ above the sum of ZᵀZ
    out      [B, T, d]

The state is float32 (float64 for float64 inputs). All other tensors have z's dtype, except that the gate may
have another floating dtype.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..errors import InPlaceTTTError
from ..layout import ChunkLayout
from ..rules import PAPER_RULE, RidgeRule, Rule, SumRule
from . import conv, reference, triton
from .forms import Backend, form_of, preferred
from .indexed_reads import add_indexed_reads
from .norms import keeping_row_norms
from .precision import state_dtype
from .reference import write_factor, written

__all__ = [
    "add_indexed_reads",
    "chunk_conv",
    "fast_weight",
    "form_of",
    "keeping_row_norms",
    "next_in_chunk",
    "state_dtype",
    "takes_weight",
    "write_factor",
    "written",
]


@overload
def fast_weight(
    z: Tensor, v: Tensor, weight: Tensor | None, *, eta: float, layout: ChunkLayout,
    initial_state: Tensor | None = ..., clip: float | Tensor | None = ..., rule: Rule = ...,
    gate: Tensor | None = ..., keep_norms_of: Tensor | None = ..., backend: Backend = ...,
    return_state: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def fast_weight(
    z: Tensor, v: Tensor, weight: Tensor | None, *, eta: float, layout: ChunkLayout,
    initial_state: Tensor | None = ..., clip: float | Tensor | None = ..., rule: Rule = ...,
    gate: Tensor | None = ..., keep_norms_of: Tensor | None = ..., backend: Backend = ...,
    return_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
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
    backend: Backend = "auto",
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes O_i = Z_i (W0 + η S_i)ᵀ for every chunk i (paper §3.4, Eq. (1) and Algorithm 1).

    S_i = S_init + Σ c_j V_jᵀZ_j over the complete chunks j < i of the same document. The factor c_j is 1
    without `clip` and without the rule's `write_norm`. The result is differentiable once in z, v, weight,
    gate, keep_norms_of and initial_state.

    Args:
        z: Keys, the down-projection's input, [B, T, h].
        v: Targets [B, T, d], of z's dtype.
        weight: W0 [d, h], of z's dtype. None leaves W0 out: the op returns η Z_i S_iᵀ, and the caller adds it
            to its own product with W0.
        eta: η, the factor of S.
        layout: The documents and their chunks. Tokens outside every document read W0 and write nothing.
        initial_state: S at the first token of each row's first document, [B, d, h], float32 (float64 for
            float64 inputs); [B, d + h, h] under the ridge rule. None: zero.
        clip: Largest Frobenius norm of one chunk's delta V_jᵀZ_j. The backward treats it as a constant.
        rule: The sum that a chunk adds to, and the matrix that keys are multiplied by (`inplace_ttt.rules`).
            The default is the paper's rule.
        gate: β [B, T], 0 or more, only with the ridge rule (extension). It weighs each token's write: the
            sums B and G add β_t v_tᵀz_t and β_t z_tᵀz_t.
        keep_norms_of: W0 [d, h] (extension), required if the rule has `preserve_row_norms`. A read then
            scales each row of W0 + ηS_i to the norm of W0's row. S stays the unscaled sum.
        backend: "auto" selects the Triton kernels in half precision on CUDA, and "chunked" elsewhere.
            `ops/forms.py` lists the fast code of each rule.
        return_state: True also returns S after the complete chunks of each row's last document.

    Returns:
        The outputs [B, T, d] in z's dtype. With `return_state`, a pair of the outputs and the state [B, d, h]
        ([B, d + h, h] under the ridge rule).

    Raises:
        InPlaceTTTError: If shapes or dtypes disagree, if an option does not belong to the rule, or if the
            requested backend does not exist or cannot run here.

    Examples:
        >>> import torch
        >>> from inplace_ttt.layout import ChunkLayout
        >>> from inplace_ttt.ops import fast_weight
        >>> z, v, weight = torch.randn(1, 40, 48), torch.randn(1, 40, 16), torch.randn(16, 48)
        >>> layout = ChunkLayout.from_lengths([[40]], chunk_size=16)
        >>> out, state = fast_weight(z, v, weight, eta=0.1, layout=layout, return_state=True)
        >>> torch.allclose(state[0], v[0, :32].T @ z[0, :32], atol=1e-3)  # two complete chunks
        True
        >>> torch.allclose(out[0, :16], z[0, :16] @ weight.T, atol=1e-3)  # the first chunk reads W0
        True
    """
    _check(z, v, weight, layout, initial_state, rule)
    _check_gate(z, rule, gate)
    _check_norms(v, z, clip, rule, keep_norms_of)
    if backend == "reference":
        out, state = reference.fast_weight(
            z, v, weight, eta=eta, layout=layout, initial_state=initial_state, clip=clip, rule=rule,
            gate=gate, keep_norms_of=keep_norms_of,
        )  # fmt: skip
        return (out, state) if return_state else out
    if backend not in ("auto", "chunked", "triton"):
        raise InPlaceTTTError(
            f"backend {backend!r} does not exist; choose auto, triton, chunked or reference."
        )
    if backend == "triton":
        triton.require(z.device, z.dtype)
    out, kept = form_of(rule).fast_weight(
        z, v, weight, eta=eta, layout=layout, initial_state=initial_state, clip=clip, rule=rule, gate=gate,
        keep_norms_of=keep_norms_of, backend=backend, return_state=return_state,
    )  # fmt: skip
    return out if kept is None else (out, kept)


def takes_weight(z: Tensor) -> bool:
    """Returns True if the op should receive W0, False if the caller computes the product with W0 itself.

    It is True if z is in full precision. It is also True where the kernels run, since they round W0 + ηS
    without bias. Otherwise the caller adds the op's result to its own product with W0. That product is then
    the same as without TTT.
    """
    return preferred(z).fuses(z.dtype)


def chunk_conv(x: Tensor, taps: Tensor, layout: ChunkLayout, first_tap: int) -> Tensor:
    """Computes a depthwise correlation whose taps stay inside each token's chunk.

    Tap j of token t reads token t + first_tap + j, and zero outside the chunk. Differentiable once in x and
    taps.

    Args:
        x: Target sources [B, T, d].
        taps: Kernel [d, 1, k].
        layout: The documents and their chunks.
        first_tap: Offset of tap 0 from its token.

    Returns:
        A tensor [B, T, d] of x's dtype, zero for padding.
    """
    convolve = triton.chunk_conv if preferred(x) is triton else conv.chunk_conv
    return convolve(x, taps, layout.chunk_ids(x.device), first_tap)


def next_in_chunk(x: Tensor, layout: ChunkLayout) -> Tensor:
    """Returns for each token of x [B, T, d] the next token of its chunk.

    The result is zero for a chunk's last token and for padding.
    """
    ids = layout.chunk_ids(x.device)
    follows = (ids[:, :-1] == ids[:, 1:]) & (ids[:, 1:] >= 0)
    return torch.nn.functional.pad(torch.where(follows.unsqueeze(-1), x[:, 1:], 0), (0, 0, 0, 1))


def _check(
    z: Tensor, v: Tensor, weight: Tensor | None, layout: ChunkLayout, initial_state: Tensor | None, rule: Rule
) -> None:
    if z.dim() != 3 or v.dim() != 3 or z.shape[:2] != v.shape[:2]:
        raise InPlaceTTTError(
            f"z must be [B, T, h] and v [B, T, d] with the same B and T, got {list(z.shape)} and "
            f"{list(v.shape)}."
        )
    if tuple(z.shape[:2]) != (layout.batch, layout.length):
        raise InPlaceTTTError(
            f"the layout is for [{layout.batch}, {layout.length}] tokens, but z has {list(z.shape[:2])}."
        )
    matrix = (v.shape[-1], z.shape[-1])
    if weight is not None and tuple(weight.shape) != matrix:
        raise InPlaceTTTError(f"weight must be [d, h] = {list(matrix)}, got {list(weight.shape)}.")
    if v.dtype != z.dtype or (weight is not None and weight.dtype != z.dtype):
        given = [str(x.dtype) for x in (z, v, weight) if x is not None]
        raise InPlaceTTTError(f"z, v and weight must have one dtype, got {', '.join(given)}.")
    if initial_state is not None:
        state = [z.shape[0], rule.state_rows(*matrix), z.shape[-1]]
        if list(initial_state.shape) != state:
            named = "[B, d, h]" if rule.state_rows(*matrix) == matrix[0] else "[B, d + h, h]"
            raise InPlaceTTTError(
                f"initial_state must be {named} = {state}, got {list(initial_state.shape)}."
            )
        if initial_state.dtype != state_dtype(z.dtype):
            raise InPlaceTTTError(
                f"initial_state must be {state_dtype(z.dtype)} for {z.dtype} inputs, got "
                f"{initial_state.dtype}."
            )


def _check_gate(z: Tensor, rule: Rule, gate: Tensor | None) -> None:
    if gate is None:
        return
    if not isinstance(rule, RidgeRule):
        raise InPlaceTTTError(
            "gate belongs to the ridge rule; with the sum of writes, multiply v by the gate instead."
        )
    if gate.shape != z.shape[:2] or not gate.is_floating_point():
        raise InPlaceTTTError(
            f"gate must be floating-point numbers [B, T] = {list(z.shape[:2])}, got {gate.dtype} "
            f"{list(gate.shape)}."
        )


def _check_norms(
    v: Tensor, z: Tensor, clip: float | Tensor | None, rule: Rule, keep_norms_of: Tensor | None
) -> None:
    if clip is not None and isinstance(rule, SumRule) and rule.write_norm is not None:
        raise InPlaceTTTError(
            "write_norm gives every write one size, which leaves a clip nothing to bound; leave one of "
            "them out."
        )
    if isinstance(rule, SumRule) and rule.preserve_row_norms:
        if keep_norms_of is None or tuple(keep_norms_of.shape) != (v.shape[-1], z.shape[-1]):
            given = "nothing" if keep_norms_of is None else list(keep_norms_of.shape)
            raise InPlaceTTTError(
                f"keep_norms_of must be W0 [d, h] = {[v.shape[-1], z.shape[-1]]}, got {given}."
            )
    elif keep_norms_of is not None:
        raise InPlaceTTTError(
            "keep_norms_of belongs to a SumRule with preserve_row_norms; leave it out with this rule."
        )
