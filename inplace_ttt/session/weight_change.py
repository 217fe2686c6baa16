"""The change of W0 that equals the effect of a session's writes (paper Eq. (1): W0 + ηS)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..errors import InPlaceTTTError
from ..layer.cache import streams
from ..layer.whitened_keys import WhitenedKeys
from ..surgery import fast_weights


@dataclass(frozen=True)
class WeightChange:
    """One layer's fast weight, as an addition to W0.

    Attributes:
        left: η times the matrix that keys are multiplied by, [d, r], float32 or float64.
        keys: the map from z [h] to keys [r]; None if keys are z itself.
    """

    left: Tensor
    keys: WhitenedKeys | None = None

    @property
    def is_linear(self) -> bool:
        """True if reads are linear in z. A matrix then computes them."""
        return self.keys is None or not bool(self.keys.center.any())

    def read(self, z: Tensor) -> Tensor:
        """Returns the term [..., d] that the session adds to the layer's output, in z's dtype.

        Args:
            z: inputs of the down-projection [..., h].
        """
        keys = z if self.keys is None else self.keys(z)
        return (keys.to(self.left.dtype) @ self.left.mT).to(z.dtype)

    def matrix(self) -> Tensor:
        """Returns ΔW [d, h], of `left`'s dtype.

        Raises:
            InPlaceTTTError: if reads are not linear in z. No matrix computes them then.
        """
        if not self.is_linear:
            raise InPlaceTTTError(
                "whitened keys subtract a center times the norm of each input, which is not linear, so no "
                "weight can express this session; convert with --set whitening.centered=false, or without "
                "whitening."
            )
        return self.left if self.keys is None else self.left @ self.keys.directions.to(self.left.dtype)


@dataclass(frozen=True)
class LowRank:
    """The best approximation ΔW ≈ B A of rank k.

    Attributes:
        b: B [d, k], orthonormal columns.
        a: A [k, h].
        lost: ‖ΔW - B A‖ / ‖ΔW‖, Frobenius norms.
    """

    b: Tensor
    a: Tensor
    lost: float

    def read(self, z: Tensor) -> Tensor:
        """Returns the term [..., d] that the adapter adds to the layer's output, in z's dtype.

        Args:
            z: inputs of the down-projection [..., h].
        """
        return (z.to(self.a.dtype) @ self.a.mT @ self.b.mT).to(z.dtype)


@torch.no_grad()
def weight_changes(model: PreTrainedModel, cache: Cache, row: int = 0) -> dict[int, WeightChange]:
    """Returns the change of each TTT layer's W0 by the chunks that a session has written.

    Args:
        model: the session's model.
        cache: the session's cache.
        row: index of the sequence in the session.

    Returns:
        The changes by layer.

    Raises:
        InPlaceTTTError: if the session has written nothing, or lacks that row.
    """
    held, layers = streams(cache), fast_weights(model)
    if not held or any(stream.state is None for stream in held.values()):
        raise InPlaceTTTError(
            "this session has written nothing, so it does not change the model's weights; read a text of at "
            "least one chunk first."
        )
    rows = next(iter(held.values())).batch
    if not 0 <= row < rows:
        raise InPlaceTTTError(f"the session holds rows 0 to {rows - 1}, not row {row}.")
    return {
        index: WeightChange(stream.read_matrix(row, layers[index]), layers[index].ttt.keys)
        for index, stream in held.items()
    }


def low_rank(change: Tensor, rank: int) -> LowRank:
    """Returns the best approximation of a matrix by one of lower rank, computed in float64.

    Args:
        change: ΔW [d, h].
        rank: k, at least 1. From d on, the approximation is exact.
    """
    exact = change.double()
    energies, vectors = torch.linalg.eigh(exact @ exact.mT)  # ascending
    b = vectors[:, -rank:].flip(1)
    total = float(energies.clamp_min(0).sum())
    lost = float(energies[:-rank].clamp_min(0).sum()) / total if total else 0.0
    return LowRank(b.to(change.dtype), (b.mT @ exact).to(change.dtype), lost**0.5)
