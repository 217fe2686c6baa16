"""Measures the scale of targets that are loss gradients (extension).

With this scale, one value of η has about the same effect in every layer and model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import InPlaceTTTError
from ..families import locate
from ..language_head import loss_gradient
from ..surgery import disable_ttt, fast_weights
from .activations import probing


def gradient_scales(
    model: Any, rows: Sequence[Tensor], chunk_size: int, *, progress: bool = False
) -> dict[int, float]:
    """Measures `GradientTarget.gain` of every TTT layer, with a forward and a backward pass per chunk.

    Args:
        model: a converted model.
        rows: token ids [1, T] of a text like those to be read.
        chunk_size: tokens per chunk.
        progress: show a bar on stderr.

    Returns:
        The gain by layer index.

    Raises:
        InPlaceTTTError: if no gradient reaches a layer, or no row has a chunk of two tokens.
    """
    layers = fast_weights(model)
    # sums of ‖output‖², ‖gradient‖² and ‖key‖²
    sums = {index: torch.zeros(3, dtype=torch.float64) for index in layers}
    tokens = 0
    chunks = [chunk for row in rows for chunk in row.split(chunk_size, dim=1) if chunk.shape[1] > 1]
    with disable_ttt(model), _seen(model) as seen, probing(model) as probes:
        for ids in tqdm(
            chunks, desc="scale of gradients", file=sys.stderr, disable=None if progress else True
        ):
            read = locate(model).base(ids, use_cache=False)
            gradients = torch.autograd.grad(
                read.last_hidden_state, list(probes.values()), loss_gradient(model, read, ids)
            )
            tokens += ids.shape[1]
            for index, gradient in zip(probes, gradients, strict=True):
                z, out = seen[index]
                squares = [
                    x.detach().double().square().sum().cpu() for x in (out, gradient, layers[index].keys(z))
                ]
                sums[index] += torch.stack(squares)
    found = {}
    for index, (outputs, of_loss, keys) in sums.items():
        if not of_loss > 0 or not keys > 0:
            raise InPlaceTTTError(
                "no gradient reached a TTT layer over the calibration text; give rows of real text with at "
                "least two tokens."
            )
        found[index] = float((outputs / of_loss).sqrt() * tokens / keys)
    return found


@contextmanager
def _seen(model: Any) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Yields a dict in which every forward pass stores the input and output of each down-projection."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def noting(index: int) -> Any:
        def note(down: Any, args: tuple[Tensor], out: Tensor) -> None:
            found[index] = args[0].detach(), out.detach()

        return note

    handles = [layer.register_forward_hook(noting(index)) for index, layer in fast_weights(model).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
