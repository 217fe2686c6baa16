"""The start of P from gradients (extension): what a layer has to write so that the model expects the token
that came next.

With P random or the identity, what an untrained layer recalls need not be in a form that the layers behind it
understand, and training has to find the form. One backward pass knows it: where g_t is the gradient of the
loss of token t + 1 and all later ones at the down-projection's output, -g_t is what should have been added
there, and P is the least-squares map onto it from the source x_{t+1}, which the look-ahead convolution's next
tap hands to P.
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
"""Of the least squares, as a fraction of the source's mean variance."""


def initial_projections(model: Any, rows: Sequence[Tensor], *, progress: bool = False) -> dict[int, Tensor]:
    """P [d, d] of every TTT layer, float32, from a forward and a backward over each of `rows` of token ids
    [1, T].

    P is as large as the identity: the mean of ‖x P‖² is that of ‖x‖².
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
    """(M + ρI)⁻¹ B, scaled to the identity's size under M, for the sums M = x xᵀ [d, d] and B = -x gᵀ [d,
    d]."""
    rho = RIDGE * moment.diagonal().mean()
    ridged = moment.double() + rho * torch.eye(len(moment), dtype=torch.float64, device=moment.device)
    proj = torch.cholesky_solve(slope.double(), torch.linalg.cholesky(ridged)) if rho > 0 else slope.double()
    size = torch.einsum("ij,ik,kj->", proj, moment.double(), proj)
    if not size > 0:
        raise InPlaceTTTError(
            "no gradient reached a TTT layer over the calibration text; give rows of two tokens and more "
            "of real text."
        )
    return (proj * (moment.trace() / size).sqrt()).float()
