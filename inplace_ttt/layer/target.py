"""The target generator V = Conv(X) · P (paper §3.2), which holds all new parameters of a TTT layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import InPlaceTTTConfig
from ..config_checks import Conv, ProjInit
from ..errors import InPlaceTTTError
from ..layout import ChunkLayout
from ..ops import chunk_conv, next_in_chunk
from .whitened_keys import WhitenedKeys
from .write_gate import WriteGate

_SHARED_SEED = 1234567
"""Seed of the diagonal that all layers share. It is the seed in the public code of TTT-NTP."""


class TargetGenerator(nn.Module):
    """The target generator V = Conv(X) · P (paper §3.2).

    Conv is a depthwise correlation without bias inside each chunk. With "lookahead", tap j of token t reads
    token t + j - k//2; with "causal", token t + j - k + 1. Taps outside the token's chunk read zero. P
    multiplies from the right and is not transposed. "next" (extension) omits the convolution. Then V_t is
    X_{t+1} P, and zero for a chunk's last token.

    Args:
        dim: d.
        kernel_size: k, number of taps.
        conv: "lookahead", "causal" or "next".
        normalize_targets: True replaces X by (X - mean) · gain (extension).
        proj_init: the initial P. All but "random_diagonal" are extensions. "calibrated" is measured on a
            text.
        keys: whitened keys (extension), measured on a text.
        write_gate: gate of writes (extension).
        factory: `device` and `dtype` of the parameters and buffers.

    Attributes:
        conv: the kernel [d, 1, k]; None with "next".
        proj: P [d, d].
        mean: [d], measured on a text; None without `normalize_targets`.
        gain: [], measured on a text; None without `normalize_targets`.
    """

    conv: nn.Parameter  # None with conv="next"
    mean: Tensor | None
    gain: Tensor | None
    _is_hf_initialized = False  # transformers does not initialize modules that set this to True

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        conv: Conv,
        *,
        normalize_targets: bool = False,
        proj_init: ProjInit = "random_diagonal",
        keys: WhitenedKeys | None = None,
        write_gate: WriteGate | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.first_tap = -(kernel_size // 2) if conv == "lookahead" else 1 - kernel_size
        self.register_parameter(
            "conv", None if conv == "next" else nn.Parameter(torch.zeros(dim, 1, kernel_size, **factory))
        )
        self.proj = nn.Parameter(torch.zeros(dim, dim, **factory))
        self.register_buffer("mean", torch.zeros(dim, **factory) if normalize_targets else None)
        self.register_buffer("gain", torch.zeros((), **factory) if normalize_targets else None)
        self.keys = keys
        self.write_gate = write_gate
        self.proj_init = proj_init
        self._is_measured = False

    @property
    def gate(self) -> nn.Parameter | None:
        """The write gate's parameter [r + 1], or None."""
        return None if self.write_gate is None else self.write_gate.gate

    @torch.no_grad()
    def reset_parameters(self, std: float, seed: int) -> None:
        """Sets conv to zero and P to a diagonal drawn from N(0, std²) (paper appendix C.3).

        With a convolution, the model then computes the same as its base, but conv has a gradient. The gate's
        parameter is zero, so all writes have weight 1. A calibrated P, and all other measured tensors, are
        zero until they are measured.

        Args:
            std: standard deviation of the diagonal. It is unused for "identity" and "calibrated".
            seed: seed of the diagonal. It is used for "random_diagonal" alone.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.zero_()
        if self.proj_init != "calibrated":
            generator = torch.Generator().manual_seed(
                _SHARED_SEED if self.proj_init == "shared_diagonal" else seed
            )
            random = torch.randn(self.proj.shape[0], generator=generator) * std
            self.proj.diagonal().copy_(torch.ones_like(random) if self.proj_init == "identity" else random)
        self._is_hf_initialized = True

    def forward(self, x: Tensor, layout: ChunkLayout) -> Tensor:
        """Computes the targets.

        Args:
            x: target source [B, T, d].
            layout: the documents and their chunks.

        Returns:
            V [B, T, d], in the parameters' dtype.

        Raises:
            InPlaceTTTError: if a tensor that the config needs was not measured yet.
        """
        x = x.to(self.proj.device, self.proj.dtype)
        self.check_measured()
        x = self.normalize_source(x)
        mixed = (
            next_in_chunk(x, layout)
            if self.conv is None
            else chunk_conv(x, self.conv, layout, self.first_tap)
        )
        return mixed @ self.proj

    def normalize_source(self, x: Tensor) -> Tensor:
        """Returns (x - mean) · gain, or x without `normalize_targets`.

        The result has x's dtype, which may be narrower than that of the buffers (mixed precision).

        Args:
            x: target source [..., d].
        """
        return x if self.mean is None or self.gain is None else ((x - self.mean) * self.gain).to(x.dtype)

    @torch.compiler.assume_constant_result  # a graph cannot check values, so the check runs during tracing
    def check_measured(self) -> None:
        """Raises InPlaceTTTError if a tensor measured on a text is still zero.

        Once the check has passed, later calls skip it.
        """
        if not self._is_measured:
            measured = [
                self.mean,
                self.gain,
                None if self.keys is None else self.keys.directions,
                self.proj if self.proj_init == "calibrated" else None,
            ]
            if any(
                tensor is not None and not tensor.is_meta and not bool(tensor.any()) for tensor in measured
            ):
                raise InPlaceTTTError(
                    "the extensions of this config are not measured yet; run inplace_ttt.calibrate(model, "
                    "rows) on some text."
                )
            self._is_measured = True


class GradientTarget(nn.Module):
    """The module `ttt` of a layer with `target: gradient`: the scale of the targets, measured on a text.

    A token's target is V_t = -gain ∂L/∂o_t. L is the summed loss of the chunk's tokens, and o_t is the
    down-projection's output. At η = 1, a key that was written reads back a vector of about the output's size.
    The gate of writes, if there is one, is the only trained parameter.

    Args:
        keys: whitened keys (extension), measured on a text.
        write_gate: gate of writes (extension).
        factory: `device` and `dtype` of the buffer.

    Attributes:
        gain: [], rms‖o_t‖ / (rms‖∂L/∂o_t‖ · mean‖k_t‖²) over the text.
    """

    gain: Tensor
    conv = proj = mean = None  # attributes of a target generator
    _is_hf_initialized = False

    def __init__(
        self, *, keys: WhitenedKeys | None = None, write_gate: WriteGate | None = None, **factory: Any
    ) -> None:
        super().__init__()
        self.register_buffer("gain", torch.zeros((), **factory))
        self.keys, self.write_gate = keys, write_gate

    @property
    def gate(self) -> nn.Parameter | None:
        """The write gate's parameter [r + 1], or None."""
        return None if self.write_gate is None else self.write_gate.gate

    @torch.no_grad()
    def reset_parameters(self, std: float, seed: int) -> None:
        """Sets all tensors to zero, until they are measured."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.zero_()
        self._is_hf_initialized = True

    def targets(self, gradient: Tensor) -> Tensor:
        """Returns the targets V [..., d].

        Args:
            gradient: the loss gradient at the down-projection's output [..., d].

        Raises:
            InPlaceTTTError: if the gain was not measured yet.
        """
        self.check_measured()
        return -self.gain.to(gradient.dtype) * gradient

    def check_measured(self) -> None:
        """Raises InPlaceTTTError if the gain is not yet measured on a text."""
        if not self.gain.is_meta and not self.gain:
            raise InPlaceTTTError(
                "the extensions of this config are not measured yet; run inplace_ttt.calibrate(model, "
                "rows) on some text."
            )


def target_generator(
    config: InPlaceTTTConfig, width: int, dim: int, **factory: Any
) -> TargetGenerator | GradientTarget:
    """Returns the new parameters of one layer, all zero.

    Args:
        config: the layer's config.
        width: h, the down-projection's input width.
        dim: d, its output width.
        factory: `device` and `dtype` of the parameters.
    """
    rank = None if config.whitening is None else config.whitening.directions(dim, width)
    keys = None if rank is None else WhitenedKeys(width, rank, **factory)
    gate = None if rank is None or not config.write_gate else WriteGate(rank, **factory)
    if config.target == "gradient":
        return GradientTarget(keys=keys, write_gate=gate, **factory)
    chosen: dict[str, Any] = {"normalize_targets": config.normalize_targets, "proj_init": config.proj_init}
    return TargetGenerator(
        dim, config.kernel_size, config.conv, **chosen, keys=keys, write_gate=gate, **factory
    )
