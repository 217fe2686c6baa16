"""The op for torch.compile, as custom operators over tensors. A graph cannot hold a Python layout object.

The documents are known only when the graph runs. The operators then run the same code as eager mode.

    z        [B, T, h]
    v        [B, T, d]
    weight   [d, h] or None
    gate     [B, T] or None
    tau      [] or None    largest norm of a chunk's delta
    spans    [n, 3]        int64 on the CPU: row, start and stop of each document
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import ChunkLayout, Span
from ..rules import RidgeRule, Rule, rule_of_text
from . import chunked, least_squares
from .precision import state_dtype


@dataclass(frozen=True)
class TracedLayout:
    """A `ChunkLayout` whose documents are known only when the graph runs.

    spans: row, start and stop of each document, [n, 3] int64 on the CPU. The other attributes are those of
    `ChunkLayout`.
    """

    spans: Tensor
    batch: int
    length: int
    chunk_size: int

    def writes(self) -> int:
        """Returns 1, since the number of writes is unknown while tracing."""
        return 1

    def chunk_ids(self, device: torch.device) -> Tensor:
        """Returns `ChunkLayout.chunk_ids`, computed when the graph runs."""
        return chunk_ids(self.spans, self.batch, self.length, self.chunk_size, device)


def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    *,
    eta: float,
    layout: TracedLayout,
    clip: float | Tensor | None,
    rule: Rule,
    gate: Tensor | None,
) -> Tensor:
    """Returns the outputs [B, T, d] for a `TracedLayout`.

    The other arguments are those of `inplace_ttt.ops.fast_weight`.
    """
    if isinstance(clip, float | int):
        clip = torch.full((), clip, dtype=state_dtype(z.dtype), device=z.device)
    return read(
        z, v, weight, gate, clip, layout.spans, layout.length, layout.chunk_size, float(eta), rule.text
    )


def _layout_of(spans: Tensor, batch: int, length: int, chunk_size: int) -> ChunkLayout:
    rows: list[list[Span]] = [[] for _ in range(batch)]
    for row, start, stop in spans.tolist():
        rows[row].append((start, stop))
    return ChunkLayout.shared(tuple(map(tuple, rows)), length, chunk_size)


@torch.library.custom_op("inplace_ttt::chunk_ids", mutates_args=())
def chunk_ids(spans: Tensor, batch: int, length: int, chunk_size: int, device: torch.device) -> Tensor:
    """Returns `ChunkLayout.chunk_ids`, int32 [B, T], on the device."""
    return _layout_of(spans, batch, length, chunk_size).chunk_ids(device).clone()


@chunk_ids.register_fake
def _(spans: Tensor, batch: int, length: int, chunk_size: int, device: torch.device) -> Tensor:
    return torch.empty(batch, length, dtype=torch.int32, device=device)


@torch.library.custom_op("inplace_ttt::read", mutates_args=())
def read(
    z: Tensor, v: Tensor, weight: Tensor | None, gate: Tensor | None, tau: Tensor | None, spans: Tensor,
    length: int, chunk_size: int, eta: float, rule: str,
) -> Tensor:  # fmt: skip
    """Returns the outputs [B, T, d] over the documents `spans`. `weight` is None unless the form is fused."""
    layout, of = _layout_of(spans, z.shape[0], length, chunk_size), rule_of_text(rule)
    if isinstance(of, RidgeRule):
        return least_squares.fast_weight(z, v, eta=eta, layout=layout, clip=tau, rule=of, gate=gate)[0]
    return chunked.fast_weight(z, v, weight, eta=eta, layout=layout, clip=tau)[0].contiguous()


@read.register_fake
def _(z: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@torch.library.custom_op("inplace_ttt::read_backward", mutates_args=())
def read_backward(
    d_out: Tensor, z: Tensor, v: Tensor, weight: Tensor | None, gate: Tensor | None, tau: Tensor | None,
    spans: Tensor, length: int, chunk_size: int, eta: float, rule: str,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of z and v, then those of weight and gate where they are given."""
    layout, of = _layout_of(spans, z.shape[0], length, chunk_size), rule_of_text(rule)
    gradients: tuple[Tensor | None, ...]
    if isinstance(of, RidgeRule):
        gradients = least_squares.gradients(d_out, None, z, v, gate, None, eta, tau, of, layout, False)
    else:
        gradients = chunked.gradients(d_out, None, z, v, weight, None, eta, tau, layout, False)
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@read_backward.register_fake
def _(
    d_out: Tensor, z: Tensor, v: Tensor, weight: Tensor | None, gate: Tensor | None, *rest: Any
) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _given(z, v, weight, gate)]


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.length, ctx.chunk_size, ctx.eta, ctx.rule = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    dz, dv, *others = read_backward(d_out, *ctx.saved_tensors, ctx.length, ctx.chunk_size, ctx.eta, ctx.rule)
    _, _, weight, gate, *_ = ctx.saved_tensors
    return (
        dz,
        dv,
        *(None if tensor is None else others.pop(0) for tensor in (weight, gate)),
        None,
        None,
        None,
        None,
        None,
        None,
    )


read.register_autograd(_gradients, setup_context=_keep_for_backward)
