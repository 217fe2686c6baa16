"""The target generator V = Conv(X) · P (paper §3.2) with every new parameter of a TTT layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import Conv, ProjInit
from ..errors import InPlaceTTTError
from ..layout import ChunkLayout
from ..ops import chunk_conv, next_in_chunk
from .whitened_keys import WhitenedKeys
from .write_gate import WriteGate

_SHARED_SEED = 1234567
"""Of the diagonal that all layers share, as the public code of TTT-NTP draws it."""


class TargetGenerator(nn.Module):
    """V = Conv(X) · P: depthwise convolution inside each chunk, then P from the right, untransposed.

    conv [d, 1, k] and proj [d, d] are its parameters. The convolution is a correlation without bias; taps
    that fall outside the token's own chunk read zero. Tap j of a token t is t + j - k//2 ("lookahead") or t +
    j - k + 1 ("causal"). With "next" (extension) there is none: V_t = X_{t+1} P, and zero for a chunk's last
    token. With the extensions of the config, it also holds what was measured on a text: `mean` [d] and `gain`
    [], under which (X - mean) · gain stands in for X, and the whitened keys and the gate of writes; and P
    starts from a text where it is calibrated.
    """

    conv: nn.Parameter  # None with conv="next"
    mean: Tensor | None
    gain: Tensor | None
    _is_hf_initialized = False  # by this mark transformers knows what to leave as it is

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
        """The write gate's parameter [r + 1], if there is one."""
        return None if self.write_gate is None else self.write_gate.gate

    @torch.no_grad()
    def reset_parameters(self, std: float, seed: int) -> None:
        """Conv zero, P diagonal N(0, std²) (paper appendix C.3): the model starts as its base, yet conv has a
        gradient. The gate zero, so that all writes count alike.

        Of the extensions, the diagonal that all layers share takes no notice of `seed`, and the identity of
        neither. A calibrated P, and all else that is measured on a text, is zero until it is.
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
        """Targets [B, T, d] of the source x [B, T, d], in the parameters' dtype."""
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
        """(x - mean) · gain, or x as it is; in x's dtype, which mixed precision may make narrower than a
        buffer's."""
        return x if self.mean is None or self.gain is None else ((x - self.mean) * self.gain).to(x.dtype)

    @torch.compiler.assume_constant_result  # a graph cannot look at numbers; looked at while it is traced
    def check_measured(self) -> None:
        """Refuse, once, what a text should have been measured for and is zero still."""
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
    """What a layer of `target: gradient` adds: nothing that is trained, and the scale of its targets,
    measured on a text.

    A token's target is V_t = -gain ∂L/∂o_t, L the summed loss of the chunk's tokens, o_t the
    down-projection's output. gain [] is rms‖o_t‖ / (rms‖∂L/∂o_t‖ · mean‖k_t‖²) over the text, so that at η =
    1 a key reads back a write of about the output's size.
    """

    gain: Tensor
    conv = proj = mean = None  # of a generator of targets
    _is_hf_initialized = False

    def __init__(
        self, *, keys: WhitenedKeys | None = None, write_gate: WriteGate | None = None, **factory: Any
    ) -> None:
        super().__init__()
        self.register_buffer("gain", torch.zeros((), **factory))
        self.keys, self.write_gate = keys, write_gate

    @property
    def gate(self) -> nn.Parameter | None:
        """The write gate's parameter [r + 1], if there is one."""
        return None if self.write_gate is None else self.write_gate.gate

    @torch.no_grad()
    def reset_parameters(self, std: float, seed: int) -> None:
        """All zero, until it is measured."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.zero_()
        self._is_hf_initialized = True

    def targets(self, gradient: Tensor) -> Tensor:
        """Returns V [..., d] of the loss gradient at the down-projection's output [..., d]."""
        self.check_measured()
        return -self.gain.to(gradient.dtype) * gradient

    def check_measured(self) -> None:
        """Raises InPlaceTTTError before the gain is measured on a text."""
        if not self.gain.is_meta and not self.gain:
            raise InPlaceTTTError(
                "the extensions of this config are not measured yet; run inplace_ttt.calibrate(model, "
                "rows) on some text."
            )
