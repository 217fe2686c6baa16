"""Computes an initial P from gradients (extension).

With this P, the writes of an untrained layer make the model expect the token that came next.

If P is random or the identity, the layers above may be unable to use the reads of an untrained layer.
Training must then find a suitable P. One backward pass finds it directly. Let g_t be the gradient, at the
down-projection's output, of the loss of token t + 1 and all later tokens. Then -g_t is the direction in which
that output should have changed. P is the least-squares map from the source x_{t+1} to -g_t. The next tap of
the look-ahead convolution passes x_{t+1} to P.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import InPlaceTTTError
from ..families import locate
from ..language_head import loss_gradient
from ..surgery import disable_ttt, fast_weights
from .activations import probing, seeing

RIDGE = 0.1
"""Ridge of the least-squares map, as a fraction of the source's mean second moment."""


def initial_projections(model: Any, rows: Sequence[Tensor], *, progress: bool = False) -> dict[int, Tensor]:
    """Computes P of every TTT layer, with a forward and a backward pass per row.

    P is scaled to the size of the identity, so the mean of ‖x P‖² equals the mean of ‖x‖².

    Args:
        model: a converted model.
        rows: token ids [1, T] of a text like those to be read.
        progress: show a bar on stderr.

    Returns:
        P, float32 [d, d], by layer index.

    Raises:
        InPlaceTTTError: if no gradient reaches a layer.
    """
    layers = fast_weights(model)
    slopes: dict[int, Tensor] = {}
    moments: dict[int, Tensor] = {}
    with disable_ttt(model), seeing(model) as seen, probing(model) as probes:
        for row in tqdm(rows, desc="start of P", file=sys.stderr, disable=None if progress else True):
            read = locate(model).base(row, use_cache=False)
            upstream = loss_gradient(model, read, row)
            gradients = torch.autograd.grad(read.last_hidden_state, list(probes.values()), upstream)
            for index, gradient in zip(probes, gradients, strict=True):
                ahead = (
                    layers[index]
                    .ttt.normalize_source(seen[index].source[:, 1:].to(gradient.device))
                    .flatten(0, 1)
                    .float()
                )
                here = gradient.reshape(*row.shape, -1)[:, :-1].flatten(0, 1).float()
                slopes[index] = slopes.get(index, 0) - ahead.T @ here
                moments[index] = moments.get(index, 0) + ahead.T @ ahead
    return {index: least_squares(moments[index], slopes[index]) for index in slopes}


def least_squares(moment: Tensor, slope: Tensor) -> Tensor:
    """Returns (M + ρI)⁻¹ B, scaled to the identity's size under M.

    Args:
        moment: the sum M = Σ x xᵀ, float32 [d, d].
        slope: the sum B = -Σ x gᵀ, float32 [d, d].

    Returns:
        P, float32 [d, d].

    Raises:
        InPlaceTTTError: if the gradient is zero.
    """
    rho = RIDGE * moment.diagonal().mean()
    ridged = moment.double() + rho * torch.eye(len(moment), dtype=torch.float64, device=moment.device)
    proj = torch.cholesky_solve(slope.double(), torch.linalg.cholesky(ridged)) if rho > 0 else slope.double()
    size = torch.einsum("ij,ik,kj->", proj, moment.double(), proj)
    if not size > 0:
        raise InPlaceTTTError(
            "no gradient reached a TTT layer over the calibration text; give rows of real text with at least "
            "two tokens."
        )
    return (proj * (moment.trace() / size).sqrt()).float()
