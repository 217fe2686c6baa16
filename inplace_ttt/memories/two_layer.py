"""One mini-batch of a two-layer memory in functional form, primal and dual.

It is from the article "Implementing Test-Time Training, part 1". The memory is f(x) = W2 relu(W1 x) + x with
the loss ½‖f(k) − v‖² and η = 1, without batch or heads. Shapes: q, k, v [b, d], w1 [d_h, d], w2 [d, d_h].
Gradients are taken at the given weights. A token's query reads both layers after the steps of the tokens up
to this token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .protocol import gradient


def two_layer_primal(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the mini-batch token by token, with autograd.

    Args:
        q: Queries [b, d].
        k: Keys [b, d].
        v: Values [b, d].
        w1: First layer [d_h, d].
        w2: Second layer [d, d_h].

    Returns:
        The reads y [b, d], and both weights after the mini-batch.
    """
    start, read = (w1, w2), []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):

        def loss(weights: tuple[Tensor, Tensor], k_t: Tensor = k_t, v_t: Tensor = v_t) -> Tensor:
            return 0.5 * (weights[1] @ (weights[0] @ k_t).relu() + k_t - v_t) ** 2

        d1, d2 = gradient(loss, start)
        w1, w2 = w1 - d1, w2 - d2
        read.append(w2 @ (w1 @ q_t).relu() + q_t)
    return torch.stack(read), w1, w2


def two_layer_dual(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the result of `two_layer_primal` by products, without a gradient [d_h, d] per token."""
    z = k @ w1.T
    hidden = z.relu()
    e2 = hidden @ w2.T + k - v
    e1 = (e2 @ w2) * (z > 0)
    read = (q @ w1.T - torch.tril(q @ k.T) @ e1).relu()
    y = read @ w2.T - torch.tril(read @ hidden.T) @ e2 + q
    return y, w1 - e1.T @ k, w2 - e2.T @ hidden
