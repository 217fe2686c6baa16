"""The rule as a plain loop under autograd, with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from audit.mutation import Patch
from inplace_ttt.layer.buffers import State
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.rules import RidgeRule

RAW: dict[str, Any] = {"update_rule": "ridge", "ridge": 0.03}


def solved(total: Tensor, gram: Tensor, ridge: float) -> Tensor:
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), total.T).T


def loop(
    *,
    damped: Callable[[float, int, int], float] = lambda ridge, chunk, tokens: ridge,
    read: Callable[[Tensor, Tensor, float], Tensor] = solved,
    read_with: Callable[[Tensor], Tensor] = lambda keys: keys,
    accumulates: bool = True,
    inclusive: bool = False,
) -> Callable[[Patch], None]:
    """damped: λ, the chunk's size and the tokens written -> λ. read: B, G, λ -> M. read_with: what keys are
        when they read.

    accumulates: whether G keeps more than the last chunk. inclusive: whether a complete chunk's own keys are
        in its G.
    """

    def op(
        z: Tensor, v: Tensor, weight: None, *, eta: float, layout: ChunkLayout, rule: RidgeRule, clip: Any,
        initial_state: Tensor | None = None, return_state: bool = False, **none: Any,
    ) -> Any:  # fmt: skip
        rows, states, (d, r) = [], [], (v.shape[-1], z.shape[-1])
        for row, documents in enumerate(layout.documents):
            out = torch.zeros_like(v[row])
            total, gram = z.new_zeros(d, r), z.new_zeros(r, r)
            for number, (begin, stop) in enumerate(documents):
                total, gram = (
                    initial_state[row].split([d, r])
                    if number == 0 and initial_state is not None
                    else (z.new_zeros(d, r), z.new_zeros(r, r))
                )
                parts = [out[:begin]]
                for start, end in layout.chunks((begin, stop)):
                    keys, values, whole = (
                        z[row, start:end],
                        v[row, start:end],
                        layout.is_complete((start, end)),
                    )
                    own = keys.mT @ keys
                    seen = gram + own if inclusive and whole else gram
                    parts.append(
                        eta
                        * read_with(keys)
                        @ read(total, seen, damped(rule.ridge, layout.chunk_size, start - begin)).mT
                    )
                    if whole:
                        total, gram = total + values.mT @ keys, gram + own if accumulates else own
                out = torch.cat([*parts, out[stop:]])
            rows.append(out)
            states.append(torch.cat([total, gram]))
        return (torch.stack(rows), torch.stack(states)) if return_state else torch.stack(rows)

    return lambda patch: patch.setattr("inplace_ttt.layer.fast_linear.fast_weight", op)


def times_chunk(ridge: float, chunk: int, tokens: int) -> float:
    return ridge * chunk


def plus_tokens(ridge: float, chunk: int, tokens: int) -> float:
    return ridge + tokens / 1e3


def half_solved(total: Tensor, gram: Tensor, ridge: float) -> Tensor:
    factor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    return torch.linalg.solve_triangular(factor, total.T, upper=False).T


def read_unwhitened(patch: Patch) -> None:
    """Keys are read with at other sizes of their numbers than they were written under."""

    def other(keys: Tensor) -> Tensor:
        return keys * torch.linspace(0.5, 1.5, keys.shape[-1], dtype=keys.dtype)

    def add_read(self: State, out: Tensor, z: Tensor, *how: Any, **named: Any) -> None:
        real(self, out, other(z), *how, **named)

    real = State.add_read
    loop(read_with=other)(patch)
    patch.setattr(State, "add_read", add_read)
