"""Measures a layer's target source, its P, and the directions that its targets span."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from ..layer.fast_linear import FastWeight
from ..layer.target import TargetGenerator
from ..layout import ChunkLayout
from ..surgery import fast_weights
from .keys import participation
from .writes import longest_document


@dataclass(frozen=True)
class TargetHealth:
    """Targets of one layer over the longest document.

    Attributes:
        size: root mean square of the source, after normalization.
        spread: fraction of the source's square that is not its mean over tokens.
        source_rank: participation ratio of the source's directions, the mean included.
        target_rank: participation ratio of the targets' directions, the mean included.
        proj_rank: participation ratio of P.
    """

    size: float
    spread: float
    source_rank: float
    target_rank: float
    proj_rank: float


_AWAY = -0.5
"""Largest cosine with the identity at which P points away. P = -I has -1. The paper's start has 0 ± 1/√d."""


def direction(layer: FastWeight) -> float:
    """Returns the cosine with the identity of P times conv's largest tap, or of P alone.

    P alone is used without a conv, or if the product's cosine is within ±0.5. A cosine of 1 means that a
    target has the direction of its source.
    """
    conv, proj = layer.ttt.conv, layer.ttt.proj.detach().float()
    own = _cosine(proj)
    if conv is None:
        return own
    taps = conv.detach().float()[:, 0]  # [d, k]
    whole = _cosine(taps[:, taps.norm(dim=0).argmax(), None] * proj)
    return whole if abs(whole) > -_AWAY else own


def points_away(layer: FastWeight) -> bool:
    """Returns True if a layer's targets point away from their source; False for loss gradients."""
    return layer.ttt.proj is not None and direction(layer) < _AWAY


def _cosine(matrix: Tensor) -> float:
    """Returns a matrix's cosine with the identity; 0 for a zero matrix."""
    size = float(matrix.norm()) * len(matrix) ** 0.5
    return float(matrix.trace()) / size if size > 0 else 0.0


@contextmanager
def observing_targets(model: nn.Module, found: dict[int, TargetHealth]) -> Iterator[None]:
    """Records the health of every layer's targets in `found`, by layer index, during a forward pass."""

    def hook_of(index: int) -> object:
        def hook(module: TargetGenerator, args: tuple[Tensor, ChunkLayout], out: Tensor) -> None:
            row, (start, stop) = longest_document(args[1])
            source = module.normalize_source(args[0][row, start:stop].detach().to(module.proj)).float()
            found[index] = _health(
                source, out[row, start:stop].detach().float(), module.proj.detach().float()
            )

        return hook

    handles = [layer.ttt.register_forward_hook(hook_of(i)) for i, layer in fast_weights(model).items()]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _health(source: Tensor, targets: Tensor, proj: Tensor) -> TargetHealth:
    square = float(source.square().sum())
    off_mean = float((source - source.mean(0)).square().sum())
    ranks = [participation(x @ x.T if len(x) < x.shape[1] else x.T @ x) for x in (source, targets, proj)]
    return TargetHealth(
        (square / max(1, source.numel())) ** 0.5, off_mean / square if square > 0 else 0.0, *ranks
    )
