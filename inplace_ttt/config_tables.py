"""The tables inside a config, and checks of their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import InPlaceTTTError

ClipMode = Literal["inference", "always"]

_LEAST, _LARGEST = 1e-30, 1e30
"""Smallest and largest allowed magnitude. float32 can represent both, with a margin for products."""

MOST_TOKENS = 2**31 - 1


def require(holds: bool, message: str) -> None:
    if not holds:
        raise InPlaceTTTError(message)


def is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value == value
        and abs(value) != float("inf")
    )


def require_size(name: str, *values: float | None) -> None:
    for value in values:
        require(
            not value or _LEAST <= value <= _LARGEST,
            f"{name} must be from {_LEAST:g} to {_LARGEST:g}, got {value!r}.",
        )


@dataclass(frozen=True)
class UpdateClip:
    """Bounds the Frobenius norm of one chunk's write V_jᵀZ_j, without η (paper appendix C.2, "Clipping").

    Args:
        max_norm: the paper's τ, absolute or, if `relative`, as a fraction of ‖W0‖_F. The gradient treats it
            as a constant.
        relative: `max_norm` is a fraction of ‖W0‖_F.
        mode: "inference" clips in eval mode only (the paper), "always" in training too.

    Raises:
        InPlaceTTTError: if `max_norm` is not a finite number above 0, `relative` is not a bool, or `mode` is
            unknown.

    Examples:
        >>> from inplace_ttt import InPlaceTTTConfig, UpdateClip
        >>> config = InPlaceTTTConfig(clip=UpdateClip(0.01, relative=True))  # 1 % of ‖W0‖ per chunk
    """

    max_norm: float
    relative: bool = False
    mode: ClipMode = "inference"

    def __post_init__(self) -> None:
        require(
            is_number(self.max_norm) and self.max_norm > 0,
            f"clip.max_norm must be a number above 0, got {self.max_norm!r}; leave clip out for no clipping.",
        )
        require_size("clip.max_norm", self.max_norm)
        require(
            isinstance(self.relative, bool), f"clip.relative must be true or false, got {self.relative!r}."
        )
        require(
            self.mode in get_args(ClipMode),
            f"clip.mode must be one of {get_args(ClipMode)}, got {self.mode!r}; leave clip out for never.",
        )


@dataclass(frozen=True)
class KeyWhitening:
    """Whitens keys (extension): k = s (Λ + ρI)^(-1/2) Uᵀ (z - ‖z‖c), with r numbers in place of the h of z.

    z is the down-projection's input, and c = E[‖z‖z] / E[‖z‖²] is its center over a calibration text. U and Λ
    are the r directions of largest variance of z - ‖z‖c, and these variances. Raw inputs vary in few
    directions. Raw keys are therefore nearly collinear, and every read returns a mixture of all writes. The
    factor s makes the mean of ‖k‖² about one. A key that was written once then reads its own target back
    with a weight of about one.

    Args:
        rank: the number r of directions. A float up to 1.0 is a fraction of the model's width d, and None
            stands for all h directions.
        shrinkage: ρ as a fraction of the mean variance.
        centered: subtract ‖z‖c. If False, keys are linear in z, U and Λ are those of z itself, and a session
            can be exported as a weight (`Session.bake`).

    Raises:
        InPlaceTTTError: if a value has a wrong type or is out of range.

    Examples:
        >>> from inplace_ttt import InPlaceTTTConfig, KeyWhitening
        >>> InPlaceTTTConfig(whitening=KeyWhitening(rank=256)).state_shape(d=576, h=1536)
        (576, 256)
    """

    rank: int | float | None = None
    shrinkage: float = 0.1
    centered: bool = True

    def __post_init__(self) -> None:
        require(
            self.rank is None
            or (type(self.rank) is int and self.rank >= 1)
            or (type(self.rank) is float and 0 < self.rank <= 1),
            "whitening.rank must be an integer of at least 1, a fraction of the model's width from above 0 "
            "to 1.0, or left out for all "
            f"directions, got {self.rank!r}.",
        )
        require(
            is_number(self.shrinkage) and self.shrinkage > 0,
            f"whitening.shrinkage must be a number above 0, got {self.shrinkage!r}.",
        )
        require_size("whitening.shrinkage", self.shrinkage)
        require(
            isinstance(self.centered, bool),
            f"whitening.centered must be true or false, got {self.centered!r}.",
        )

    def directions(self, d: int, h: int) -> int:
        """Computes r for one down-projection.

        Args:
            d: output features of the down-projection, the model's width.
            h: input features of the down-projection.

        Returns:
            The number of directions, at most h.

        Examples:
            >>> KeyWhitening(rank=0.5).directions(d=576, h=1536)
            288
        """
        if self.rank is None:
            return h
        return min(h, self.rank if isinstance(self.rank, int) else max(1, round(self.rank * d)))


@dataclass(frozen=True)
class PromptWrite:
    """Sets one write at the end of a prompt, in place of the chunks' writes (extension, TTT-NTP's inference).

    The write is a ridge regression over the last pairs (z_t, V_t = x_{t+1} P) of the prompt: ΔW minimizes
    Σ ‖V_t - (W0 + ΔW) z_t‖² + λ‖ΔW‖². Later tokens read W0 + η' ΔW with η' = min(η, cap · ‖W0‖ / ‖ΔW‖).

    Args:
        window: the number of pairs, which may extend over several chunks.
        ridge: λ, absolute.
        eta: η of this write, independent of the layer's.
        cap: the largest ‖η' ΔW‖ as a fraction of ‖W0‖ (Frobenius), per layer and sequence; None for no
            bound.
        preserve_row_norms: scale each row of W0 + η' ΔW to the norm of W0's row.

    Raises:
        InPlaceTTTError: if a value is out of range.

    Examples:
        >>> from inplace_ttt import InPlaceTTTConfig, PromptWrite
        >>> config = InPlaceTTTConfig.preset("ttt_ntp", prompt_write=PromptWrite(window=4096, cap=0.05))
    """

    window: int = 8192
    ridge: float = 1.0
    eta: float = 0.1
    cap: float | None = 0.1
    preserve_row_norms: bool = True

    def __post_init__(self) -> None:
        require(
            type(self.window) is int and 1 <= self.window <= MOST_TOKENS,
            f"prompt_write.window must be an integer from 1 to {MOST_TOKENS}, got {self.window!r}.",
        )
        for name in ("ridge", "eta", "cap"):
            value = getattr(self, name)
            require(
                (name == "cap" and value is None) or (is_number(value) and value > 0),
                f"prompt_write.{name} must be a number above 0{', or left out' if name == 'cap' else ''}, "
                f"got {value!r}.",
            )
            require_size(f"prompt_write.{name}", value)
        require(
            isinstance(self.preserve_row_norms, bool),
            f"prompt_write.preserve_row_norms must be true or false, got {self.preserve_row_norms!r}.",
        )


def from_mapping(cls: type, values: Mapping[str, Any], where: str) -> Any:
    require(isinstance(values, Mapping), f"{where} must be a table of settings, got {values!r}.")
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(known))
    require(
        not unknown,
        f"{where} takes no setting {', '.join(map(repr, unknown))}; known settings: {', '.join(known)}.",
    )
    try:
        return cls(**values)
    except TypeError as error:
        raise InPlaceTTTError(f"{where} is incomplete: {error}.") from None
