"""The operators `torch.ops.inplace_ttt.*`, through which autograd and torch.compile use the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import conv as convolution
from .operands import operands_of
from .passes import backward, forward
from .support import on_device_of

Gradients = tuple[Tensor | None, ...]


@torch.library.custom_op("inplace_ttt::fast_weight", mutates_args=())
def fast_weight(
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    initial_state: Tensor | None,
    tau: Tensor | None,
    spans: Tensor,
    chunk_size: int,
    eta: float,
    return_state: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs and the state S after each row's last document.

    Args:
        z: Keys [B, T, h].
        v: Targets [B, T, d], of z's dtype.
        weight: W0 [d, h], of z's dtype, or None.
        initial_state: [B, d, h] float32, or None.
        tau: [] float32, the largest norm of a chunk's delta, or None.
        spans: [n, 3] int64 on the CPU: row, start and stop of each document, in order.
        chunk_size: Tokens per chunk.
        eta: η, the factor of S.
        return_state: True also computes the state.

    Returns:
        Outputs [B, T, d] in z's dtype, and the state [B, d, h] float32 (an empty tensor without
        `return_state`).
    """
    with on_device_of(z):
        given = operands_of(z, v, weight, initial_state, tau, spans, chunk_size, eta, return_state)
        out, state = forward(given, z.shape[0], return_state)
    return out.view(v.shape), state


@fast_weight.register_fake
def _(z: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return_state = rest[-1]
    return _like(v), z.new_empty(
        z.shape[0] if return_state else 0, v.shape[-1], z.shape[-1], dtype=torch.float32
    )


@torch.library.custom_op("inplace_ttt::fast_weight_backward", mutates_args=())
def fast_weight_backward(
    d_out: Tensor,
    d_state: Tensor | None,
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    initial_state: Tensor | None,
    tau: Tensor | None,
    spans: Tensor,
    chunk_size: int,
    eta: float,
    return_state: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of z, v, weight and initial_state.

    The gradient of weight is empty unless `needs_weight`. That of initial_state is empty if there is none.
    """
    with on_device_of(z):
        given = operands_of(z, v, weight, initial_state, tau, spans, chunk_size, eta, return_state)
        d_rows = d_out.flatten(0, 1).contiguous()
        d_last = None if d_state is None else d_state.contiguous()
        dz, dv, d_weight, d_start = backward(given, d_rows, d_last, z.shape[0], needs_weight)
    return (
        dz.view(z.shape),
        dv.view(v.shape),
        z.new_empty(0) if d_weight is None else d_weight.to(z.dtype),
        z.new_empty(0, dtype=torch.float32) if d_start is None else d_start,
    )


@fast_weight_backward.register_fake
def _(
    d_out: Tensor,
    d_state: Tensor | None,
    z: Tensor,
    v: Tensor,
    weight: Tensor | None,
    initial_state: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_weight = rest[-1]
    matrix = (v.shape[-1], z.shape[-1]) if needs_weight else (0,)
    start = z.new_empty(0, dtype=torch.float32) if initial_state is None else _like(initial_state)
    return _like(z), _like(v), z.new_empty(matrix), start


def _like(x: Tensor) -> Tensor:
    """Returns an uninitialized contiguous tensor of x's shape and dtype."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, v, weight, initial_state, tau, spans, ctx.chunk_size, ctx.eta, ctx.return_state = inputs
    ctx.save_for_backward(z, v, weight, initial_state, tau, spans)
    ctx.set_materialize_grads(False)


def _fast_weight_gradients(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> Gradients:
    z, v, weight, initial_state, tau, spans = ctx.saved_tensors
    needs_weight = weight is not None and ctx.needs_input_grad[2]
    d_out = torch.zeros_like(v) if d_out is None else d_out
    d_state = d_state if ctx.return_state else None
    dz, dv, d_weight, d_start = fast_weight_backward(
        d_out,
        d_state,
        z,
        v,
        weight,
        initial_state,
        tau,
        spans,
        ctx.chunk_size,
        ctx.eta,
        ctx.return_state,
        needs_weight,
    )
    return (
        dz,
        dv,
        d_weight if needs_weight else None,
        None if initial_state is None else d_start,
        None,
        None,
        None,
        None,
        None,
    )


fast_weight.register_autograd(_fast_weight_gradients, setup_context=_keep_for_backward)


@torch.library.custom_op("inplace_ttt::chunk_conv", mutates_args=())
def chunk_conv(x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
    """Computes the depthwise correlation of x [B, T, d] with conv [d, 1, k] inside chunks.

    chunk_ids: [B, T] int32.
    """
    with on_device_of(x):
        return convolution.convolve(_with_dense_rows(x), conv.contiguous(), chunk_ids.contiguous(), first_tap)


@chunk_conv.register_fake
def _(x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
    return _like(x)


@torch.library.custom_op("inplace_ttt::chunk_conv_backward", mutates_args=())
def chunk_conv_backward(
    d_out: Tensor, x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and conv."""
    d_out, x, chunk_ids = _with_dense_rows(d_out), _with_dense_rows(x), chunk_ids.contiguous()
    with on_device_of(x):
        dx = convolution.convolve(d_out, conv.contiguous(), chunk_ids, first_tap, reverse=True)
        d_conv = convolution.taps_gradient(d_out, x, chunk_ids, first_tap, conv.shape[-1])
    return dx, d_conv.to(conv.dtype).contiguous()


@chunk_conv_backward.register_fake
def _(d_out: Tensor, x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> tuple[Tensor, Tensor]:
    return _like(x), _like(conv)


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _keep_for_conv_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, conv, chunk_ids, ctx.first_tap = inputs
    ctx.save_for_backward(x, conv, chunk_ids)


def _chunk_conv_gradients(ctx: Any, d_out: Tensor) -> Gradients:
    return *chunk_conv_backward(d_out, *ctx.saved_tensors, ctx.first_tap), None, None


chunk_conv.register_autograd(_chunk_conv_gradients, setup_context=_keep_for_conv_backward)
