"""A TTT layer of somebody else's, as a sequential loop with faults to switch on, and its adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inplace_ttt.audit import AuditedModule, Report, audit_module
from inplace_ttt.audit.stream import Stream

D, H, CHUNK, ETA = 10, 40, 12, 0.7

FOREIGN: dict[str, str] = {
    "nothing is written": "writes",
    "a copy of W0 is the fast weight": "fast-tensor",
    "reading moves P": "slow-weights",
    "reading moves W0": "state-place",
    "inclusive sum": "exclusive-sum",
    "half of the own delta": "own-chunk-exposure",
    "next chunk's delta": "causality",
    "minus sign": "sign",
    "mean instead of sum": "loss-sum",
    "decay": "plain-sum",
    "momentum": "plain-sum",
    "error-correcting writes": "plain-sum",
    "dense convolution": "conv-depthwise",
    "convolution with a bias": "conv-bias",
    "edges repeated instead of zeros": "conv-isolation",
    "P before the convolution": "conv-before-projection",
    "no reset between documents": "document-reset",
    "the chunk grid ignores documents": "document-grid",
    "a reset goes back to the pretrained weight": "reset-keeps-training",
    "only row 0 is computed": "rows",
    "stop-gradient": "gradient",
}
"""The faults that can be switched on, and the item that owns each."""


class ToyLayer(nn.Module):
    """`forward(z, x)` over keys z [B, T, H] and a target source x [B, T, D], float64, autograd through a
    plain loop."""

    def __init__(self, fault: str = "", seed: int = 0) -> None:
        super().__init__()
        self.fault, self.chunk = fault, CHUNK
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 5)

        dense = fault == "dense convolution"
        self.down, self.conv, self.proj = draw(D, H), draw(D, D if dense else 1, 5), draw(D, D)
        self.copy = draw(D, H) if fault == "a copy of W0 is the fast weight" else None
        self.bias = draw(D) if fault == "convolution with a bias" else None
        self.register_buffer("pretrained", self.down.detach().clone())

    def targets(self, x: Tensor) -> Tensor:
        """V [n, D] of one chunk's source [n, D]."""
        if self.fault == "P before the convolution":
            x = x @ self.proj
        groups = 1 if self.fault == "dense convolution" else D
        mode = "replicate" if self.fault == "edges repeated instead of zeros" else "constant"
        v = F.conv1d(F.pad(x.T[None], (2, 2), mode=mode), self.conv, self.bias, groups=groups)[0].T
        return v if self.fault == "P before the convolution" else v @ self.proj

    def delta(self, z: Tensor, v: Tensor, state: Tensor) -> Tensor:
        if self.fault == "mean instead of sum":
            v = v / len(v)
        if self.fault == "error-correcting writes":
            v = v - ETA * z @ state.T
        if self.fault == "minus sign":
            v = -v
        return v.T @ z

    def walk(self, z: Tensor, x: Tensor, state: Tensor) -> Tensor:
        """One document: keys [n, H], source [n, D]; `state` [D, H] at its start."""
        w0 = self.down if self.copy is None else self.copy
        spans = [(i, min(i + self.chunk, len(z))) for i in range(0, len(z), self.chunk)]
        values = [self.targets(x[a:b]) for a, b in spans]
        outputs, speed = [], torch.zeros_like(state)
        for i, (a, b) in enumerate(spans):
            own = self.delta(z[a:b], values[i], state)
            read = state
            if self.fault == "inclusive sum":
                read = state + own
            if self.fault == "half of the own delta":
                read = state + 0.5 * own
            if self.fault == "next chunk's delta" and i + 1 < len(spans):
                read = state + 0.3 * self.delta(z[slice(*spans[i + 1])], values[i + 1], state)
            outputs.append(z[a:b] @ (w0 + ETA * read).T)
            if b - a < self.chunk:
                continue
            if self.fault == "decay":
                state = 0.9 * state
            speed = 0.5 * speed + own if self.fault == "momentum" else own
            state = state + (speed.detach() if self.fault == "stop-gradient" else speed)
            if self.fault == "nothing is written":
                state = torch.zeros_like(state)
        self.state = state
        return torch.cat(outputs)

    def forward(self, z: Tensor, x: Tensor, documents: Sequence[int] | None = None) -> Tensor:
        rows = []
        for keys, source in zip(z, x, strict=True):
            if rows and self.fault == "only row 0 is computed":
                rows.append(torch.zeros_like(rows[0]))
                continue
            lengths = list(documents or [len(keys)])
            if self.fault == "the chunk grid ignores documents" and documents and len(documents) == 2:
                rows.append(self._one_grid(keys, source, lengths))
                continue
            state, parts = torch.zeros_like(self.down), []
            for a, b in zip(keys.split(lengths), source.split(lengths), strict=True):
                parts.append(self.walk(a, b, state))
                state = self.state if self.fault == "no reset between documents" else torch.zeros_like(state)
            rows.append(torch.cat(parts))
        if self.fault == "reading moves W0" and not self.training:
            self.down.data.add_(1e-6 * ETA * self.state.detach())
        if self.fault == "reading moves P" and not self.training:
            self.proj.data.mul_(1.0001)
        return torch.stack(rows)

    def _one_grid(self, z: Tensor, x: Tensor, lengths: list[int]) -> Tensor:
        """Reset at the document, but with the row's chunks: the second document's first chunk is what is left
        of the row's."""
        first = self.walk(z[: lengths[0]], x[: lengths[0]], torch.zeros_like(self.down))
        gap = lengths[0] % self.chunk
        padded = [torch.cat([t.new_zeros(gap, t.shape[1]), t[lengths[0] :]]) for t in (z, x)]
        return torch.cat([first, self.walk(*padded, torch.zeros_like(self.down))[gap:]])


class ToyAdapter(AuditedModule):
    """The whole protocol over a `ToyLayer`; `faults` in the stream are the layer's own."""

    def __init__(self, layer: ToyLayer) -> None:
        self.layer, self.name = layer.eval(), "toy"
        self.input_size = self.h = H
        self.d, self.chunk_size, self.eta = D, layer.chunk, ETA

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        if padding is None:
            return self.layer(x, target, documents)
        keep = ~padding[0]
        out = torch.zeros(1, x.shape[1], D, dtype=x.dtype)
        out[:, keep] = self.layer(x[:, keep], target[:, keep])
        return out

    def keys(self, x: Tensor) -> Tensor:
        return x

    def inputs(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.linalg.qr(torch.randn(H, n, generator=generator, dtype=torch.float64))[0].T.contiguous()

    @property
    def fast_weight(self) -> Tensor:
        return self.layer.down

    @property
    def conv(self) -> Tensor:
        return self.layer.conv

    @property
    def proj(self) -> Tensor:
        return self.layer.proj

    @property
    def own_chunk(self) -> int:
        """What the layer would be used with; the probes take a short one."""
        return 512

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.layer.named_parameters()), **dict(self.layer.named_buffers())}

    def is_fast(self, name: str) -> bool:
        return name in ("down", "copy", "pretrained")

    def train(self, mode: bool) -> None:
        self.layer.train(mode)

    def stream(self) -> Stream:
        return ToyStream(self.layer)

    @contextmanager
    def resized(self, chunk_size: int) -> Iterator[AuditedModule]:
        before, self.layer.chunk = self.layer.chunk, chunk_size
        try:
            yield ToyAdapter(self.layer)
        finally:
            self.layer.chunk = before


class ToyStream:
    """Reads everything again at each piece: slow, and right by construction."""

    def __init__(self, layer: ToyLayer) -> None:
        self.layer, self.read = layer, []  # type: ignore[var-annotated]

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        self.read.append((x, target))
        whole: Any = [torch.cat(parts, 1) for parts in zip(*self.read, strict=True)]
        return self.layer(*whole)[:, -x.shape[1] :]

    def reset(self) -> None:
        self.read = []
        if self.layer.fault == "a reset goes back to the pretrained weight":
            self.layer.down.data.copy_(self.layer.get_buffer("pretrained"))


def foreign(fault: str, seed: int = 0) -> Report:
    return audit_module(ToyAdapter(ToyLayer(fault, seed)), seed=seed)
