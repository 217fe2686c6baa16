"""The declared rule of a TTT layer, which computes the reads that the layer's settings and tensors define.

It is the reference for readings by a whole model. It reads one document at a time, chunk by chunk, in
float64. Its input is the model's config and the layer's tensors. Keys and targets are rounded as in the
layer's dtype.

It uses none of the package's layout, target generator, op or stream, so it does not share their faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..config import InPlaceTTTConfig
from ..layer.fast_linear import FastWeight
from ..ops import state_dtype


@dataclass(frozen=True)
class DeclaredRule:
    """A layer's rule in training or in evaluation.

    Attributes:
        config: the settings of the model.
        eta: η of this layer.
        tau: the declared bound on the norm of a chunk's delta in this mode, or None.
        dtype: the layer's own dtype.
        tensors: the tensors that define the rule, by name, in float64. Gradients flow into them.
    """

    config: InPlaceTTTConfig
    eta: float
    tau: float | None
    dtype: torch.dtype
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, layer: FastWeight, config: InPlaceTTTConfig, eta: float, training: bool) -> DeclaredRule:
        """Returns the rule of a layer.

        Args:
            layer: a TTT layer.
            config: the settings of the model.
            eta: η of this layer.
            training: True for the rule in training mode, where a clip may be off.
        """
        w0, whitened, target = layer.matrix(), layer.ttt.keys, layer.ttt
        found: dict[str, Tensor | None] = {
            "conv": target.conv,
            "proj": target.proj,
            "gate": target.gate,
            "w0": w0,
        }
        found |= {"mean": target.mean, "gain": target.gain}
        if whitened is not None:
            found |= {"directions": whitened.directions, "center": whitened.center}
        tensors = {
            name: tensor.detach().double().cpu() for name, tensor in found.items() if tensor is not None
        }
        tau = None
        if config.clip is not None and (not training or config.clip.mode == "always"):
            tau = config.clip.max_norm * (
                float(torch.linalg.vector_norm(tensors["w0"])) if config.clip.relative else 1.0
            )
        return cls(config, eta, tau, (target.gain if target.proj is None else target.proj).dtype, tensors)

    def targets(self, x: Tensor) -> Tensor:
        """Returns V [n, d] of one chunk of target source [n, d]."""
        x = self.normalize_targets(x)
        if self.config.conv == "next":
            return self._rounded(torch.cat([x[1:], torch.zeros_like(x[:1])]) @ self.tensors["proj"])
        taps = self.tensors["conv"][:, 0]
        width = taps.shape[1]
        before = width // 2 if self.config.conv == "lookahead" else width - 1
        padded = torch.nn.functional.pad(x, (0, 0, before, width))
        mixed = torch.stack([taps[:, j] * padded[j : j + len(x)] for j in range(width)]).sum(0)
        return self._rounded(mixed @ self.tensors["proj"])

    def normalize_targets(self, x: Tensor) -> Tensor:
        """Returns the target source [n, d] after the normalization that the layer declares, if any."""
        return (x - self.tensors["mean"]) * self.tensors["gain"] if "mean" in self.tensors else x

    def keys(self, z: Tensor) -> Tensor:
        """Returns K [n, r] of the down-projection's input [n, h]."""
        if "directions" not in self.tensors:
            return z
        centered = self._rounded(z - self._rounded(z.norm(dim=-1, keepdim=True)) * self.tensors["center"])
        return self._rounded(centered @ self.tensors["directions"].T)

    def counted(self, k: Tensor) -> Tensor:
        """Returns the keys [n, r], each multiplied by its gate of writes (0 to 2)."""
        if "gate" not in self.tensors:
            return k
        gate = self.tensors["gate"]
        return k * 2 * torch.sigmoid(k.shape[1] ** 0.5 * (k @ gate[:-1]) + gate[-1])[:, None]

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    def reads(self, z: Tensor, x: Tensor, writes: Tensor) -> Tensor:
        """Returns the reads [T, d] of one document in addition to W0's product, in float64.

        Args:
            z: down-projection input [T, h], float64.
            x: target source [T, d], float64.
            writes: bool [T], True for the tokens that fill chunks. The other tokens only read.
        """
        keys, size = self.keys(z), self.config.chunk_size
        number = torch.cumsum(writes, 0) - writes.long()  # number of written tokens before each token
        chunk = torch.div(number, size, rounding_mode="floor")
        written = writes.nonzero().flatten()
        total = gram = None
        d = len(self.tensors["proj"])
        parts: list[Tensor] = []
        for i in range(int(chunk[-1]) + 1 if len(chunk) else 0):
            if i > 0:
                own = written[(i - 1) * size : i * size]
                total, gram = self.after(total, gram, keys[own], self.targets(x[own]))
            here = keys[chunk == i]
            parts.append(here.new_zeros(len(here), d) if total is None else self.read(here, total, gram))
        return self.eta * torch.cat(parts)

    def state(self, z: Tensor, x: Tensor) -> Tensor:
        """Returns the state after the complete chunks of a document.

        It is the sum [d, r]. Under least squares KᵀK is stacked below it, which makes [d + r, r].
        """
        total = gram = None
        for k, source in zip(
            self.keys(z).split(self.config.chunk_size), x.split(self.config.chunk_size), strict=True
        ):
            total, gram = self.after(total, gram, k, self.targets(source))
        assert total is not None
        return total if gram is None else torch.cat([total, gram])

    def after(self, total: Any, gram: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """Returns the sum [d, r] after one more chunk, and KᵀK [r, r], or None if least squares is off."""
        written = self.counted(k)
        delta = v.T @ written
        factor = self._factor(delta)
        if self.config.ridge is not None:
            own = factor * (k.T @ written)
            gram = own if gram is None else gram + own
        delta = factor * delta
        return delta if total is None else total + delta, gram

    def _factor(self, delta: Tensor) -> float | Tensor:
        """Returns the factor on a chunk's delta [d, r], from the clip or the write norm."""
        if self.config.write_norm is not None:
            return 1 / _spectral_norm(delta)
        if self.tau is None:
            return 1.0
        norm = torch.linalg.vector_norm(delta)
        return 1.0 if float(norm.detach()) <= self.tau else self.tau / norm

    def read(self, k: Tensor, total: Tensor, gram: Any) -> Tensor:
        """Returns the reads [n, d] of keys [n, r], without η."""
        if self.config.ridge is not None:
            rounding = 8 * torch.finfo(state_dtype(self.dtype)).eps * float(gram.detach().trace())
            ridge = max(self.config.ridge, rounding)
            return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), k.T).T @ total.T
        if self.config.preserve_row_norms and self.eta:
            w0 = self.tensors["w0"]
            moved = w0 + self.eta * total
            total = (moved * (w0.norm(dim=1) / moved.norm(dim=1))[:, None] - w0) / self.eta
        return k @ total.T


def _spectral_norm(delta: Tensor) -> Tensor:
    """Returns the norm as TTT-NTP's code estimates it, by five power steps from the mean row."""
    right = normalize(delta.mean(0), dim=0)
    for _ in range(5):
        left = normalize(delta @ right, dim=0)
        right = normalize(delta.T @ left, dim=0)
    return left @ delta @ right
