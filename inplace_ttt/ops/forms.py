"""Selects the fast code of each rule by backend, dtype and device, and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import linear

from ..errors import InPlaceTTTError
from ..layout import ChunkLayout, Span
from ..rules import RidgeRule, Rule, SumRule
from . import chunked, chunked_sums, compiled, least_squares, normal_equations, row_norms, triton
from .compiled import TracedLayout

Backend = Literal["auto", "reference", "chunked", "triton"]


@dataclass(frozen=True)
class Form:
    """The fast code of a rule.

    Attributes:
        fast_weight: Returns the outputs and the final state or None. Its arguments are those of
            `inplace_ttt.ops.fast_weight`.
        sum_of_writes: Returns the state after the complete chunks of one span per row.
        readout: Returns the matrix [..., d, r] that keys are multiplied by, from states [..., ·, r].
        read_once: Returns the reads of keys [..., n, r] from states, more cheaply than with a readout if
            n < d. None if a readout costs nothing.
    """

    fast_weight: Callable[..., tuple[Tensor, Tensor | None]]
    sum_of_writes: Callable[..., Tensor]
    readout: Callable[[Tensor, Any], Tensor]
    read_once: Callable[[Tensor, Tensor, Any], Tensor] | None


def form_of(rule: Rule) -> Form:
    """Returns the fast code of a rule."""
    return _FORMS[type(rule)]


def preferred(x: Tensor) -> ModuleType:
    """Returns the module that "auto" selects for tensors like x, for a rule that has kernels."""
    return triton if triton.preferred(x.device, x.dtype) else chunked


def _by_sum(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    rule: SumRule,
    backend: Backend,
    gate: None,
    keep_norms_of: Tensor | None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    has_norms = rule.write_norm is not None or keep_norms_of is not None
    if has_norms and backend == "triton":
        raise InPlaceTTTError(
            "the kernels implement neither write_norm nor keep_norms_of; use backend='auto' with them."
        )
    if keep_norms_of is not None:
        out, state = row_norms.fast_weight(z, v, keep_norms_of, rule=rule, **given)
        return (out if weight is None else out + linear(z, weight)), state
    if has_norms:
        return chunked.fast_weight(z, v, weight, rule=rule, **given)
    form = {"triton": triton, "chunked": chunked}.get(backend) or preferred(z)
    if isinstance(given["layout"], TracedLayout) and form is chunked:
        return compiled.fast_weight(z, v, weight, rule=rule, gate=None, **_traced(given)), None
    return form.fast_weight(z, v, weight, **given)


def _by_ridge(
    z: Tensor, v: Tensor, weight: Tensor | None, *, rule: RidgeRule, backend: Backend, gate: Tensor | None,
    keep_norms_of: None, **given: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if backend == "triton":
        raise InPlaceTTTError(
            "the kernels implement the sum rule alone; use backend='auto' with the ridge rule."
        )
    if isinstance(given["layout"], TracedLayout):
        out, state = compiled.fast_weight(z, v, None, rule=rule, gate=gate, **_traced(given)), None
    else:
        out, state = least_squares.fast_weight(z, v, rule=rule, gate=gate, **given)
    return (out if weight is None else out + linear(z, weight)), state


def _traced(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a traced call. Such a call starts from a zero state and returns no state."""
    return {name: given[name] for name in ("eta", "layout", "clip")}


def _sum_of_sums(
    z: Tensor,
    v: Tensor,
    spans: Sequence[Span | None],
    *,
    layout: ChunkLayout,
    rule: SumRule,
    clip: float | Tensor | None,
    gate: None,
) -> Tensor:
    return chunked_sums.sum_of_writes(z, v, spans, layout=layout, clip=clip, rule=rule)


_FORMS: dict[type[Rule], Form] = {
    SumRule: Form(_by_sum, _sum_of_sums, lambda state, rule: state, None),
    RidgeRule: Form(
        _by_ridge, least_squares.sum_of_writes, normal_equations.readout, normal_equations.read_once
    ),
}
