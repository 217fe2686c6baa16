"""Computes an initial P from gradients (extension).

With it, a layer writes so that the model expects the token that came next.

If P is random or the identity, the layers above need not understand the reads of an untrained layer.
Training then has to find a suitable form. One backward pass gives that form. Let g_t be the gradient, at the
down-projection's output, of the loss of token t + 1 and all later ones. Then -g_t is the vector that should
have been added there. P is the least-squares map onto it from the source x_{t+1}, which the next tap of the
look-ahead convolution passes to P.
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
"""Ridge of the least squares, as a fraction of the source's mean variance."""


def initial_projections(model: Any, rows: Sequence[Tensor], *, progress: bool = False) -> dict[int, Tensor]:
    """Computes P of every TTT layer, with a forward and a backward pass per row.

    P has the size of the identity: the mean of ‖x P‖² is that of ‖x‖².

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
            "no gradient reached a TTT layer over the calibration text; give rows of two tokens and more "
            "of real text."
        )
    return (proj * (moment.trace() / size).sqrt()).float()
