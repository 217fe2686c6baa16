"""Small modules with two interfaces of others: the reference MLP's, and the Moshi port's gating with its adapter. Written for the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inplace_ttt.audit import AuditedModule, NotChecked
from inplace_ttt.audit.adapters import CopiedModule, Stream

CHUNK = 12


class PublicMLP(nn.Module):
    """`mlp(x, t)`: one weight for every chunk, as a cumulative sum without the last delta. Rows padded to whole chunks."""

    def __init__(self, d: int = 16, h: int = 48, eta: float = 3.0, seed: int = 0) -> None:
        super().__init__()
        self.eta, self.act_fn = eta, F.silu
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(a, b, bias=False) for a, b in ((d, h), (d, h), (h, d)))
            self.ttt_conv = nn.Conv1d(d, d, 5, padding=2, groups=d, bias=False)
            self.ttt_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        z = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        chunks = -(-tokens // CHUNK)
        z, t = (F.pad(y, (0, 0, 0, chunks * CHUNK - tokens)).view(batch, chunks, CHUNK, -1) for y in (z, t))
        v = self.ttt_conv(t.flatten(0, 1).mT).mT.view(batch, chunks, CHUNK, width) @ self.ttt_proj.weight
        deltas = torch.einsum("bkcd,bkch->bkdh", v, z)[:, :-1]
        start = self.down_proj.weight.expand(batch, 1, -1, -1)
        weights = torch.cat([start, self.eta * deltas], 1).cumsum(1)
        return torch.einsum("bkch,bkdh->bkcd", z, weights).flatten(1, 2)[:, :tokens]


class _Conv(nn.Module):
    def __init__(self, d: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d, d, kernel, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (0, self.conv.kernel_size[0] - 1))).mT


class _Targets(nn.Module):
    def __init__(self, d: int, kernel: int) -> None:
        super().__init__()
        self.conv1d, self.W_target = _Conv(d, kernel), nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.W_target(self.conv1d(x))


class PortGating(nn.Module):
    """A gating with the port's choices: dense convolution of 2 to the right, an ordinary linear for P, a copy of the weight
    that is written, parallel with a clip in training, and in evaluation one weight a call with the state kept in it."""

    def __init__(self, d: int = 16, h: int = 48, tau: float | None = 1e-5, seed: int = 0) -> None:
        super().__init__()
        self.chunk_size, self.ttt_lr, self.delta_clip_fro_norm, self.activation = CHUNK, 0.5, tau, F.silu
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.linear_in, self.linear_out = nn.Linear(d, 2 * h, bias=False), nn.Linear(h, d, bias=False)
            self.target_generator = _Targets(d, 2)
        self.w_down = nn.Parameter(self.linear_out.weight.detach().clone())
        self.register_buffer("w_down_pretrained", self.w_down.detach().clone())
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, token_embeddings: Tensor) -> Tensor:
        both = self.linear_in(x).unflatten(-1, (2, -1))
        z = self.activation(both[..., 0, :]) * both[..., 1, :]
        parts = token_embeddings.split(self.chunk_size, 1)
        v = torch.cat([self.target_generator(part) for part in parts], 1)
        if self.training:
            return self._parallel(z, v)
        out = z @ self.w_down.T
        self.waiting.append((z.detach(), v.detach()))
        keys, values = (torch.cat(held, 1) for held in zip(*self.waiting, strict=True))
        while keys.shape[1] >= self.chunk_size:
            self.w_down.data += self.ttt_lr * self._delta(keys[:, : self.chunk_size], values[:, : self.chunk_size])[0]
            keys, values = keys[:, self.chunk_size :], values[:, self.chunk_size :]
        self.waiting = [(keys, values)]
        return out

    def _delta(self, z: Tensor, v: Tensor) -> Tensor:
        delta = v.mT @ z
        if self.delta_clip_fro_norm is not None:
            norm = torch.linalg.matrix_norm(delta, keepdim=True)
            delta = delta * (self.delta_clip_fro_norm / norm.clamp(min=1e-300)).clamp(max=1)
        return delta

    def _parallel(self, z: Tensor, v: Tensor) -> Tensor:
        state, parts = torch.zeros_like(self.w_down), []
        for keys, values in zip(z.split(self.chunk_size, 1), v.split(self.chunk_size, 1), strict=True):
            parts.append(keys @ (self.w_down + self.ttt_lr * state).mT)
            state = state + self._delta(keys, values)
        return torch.cat(parts, 1)


def restart(gating: nn.Module) -> None:
    """The port's reset of a conversation: the weight goes back, what waits stays."""
    assert isinstance(gating, PortGating)
    gating.w_down.data.copy_(gating.get_buffer("w_down_pretrained"))


class MoshiGating(CopiedModule):
    """A gating module of the Moshi port: `gating(x, token_embeddings)`, parallel in training mode, streaming in evaluation.

    gating: has `linear_in` (gate and value stacked), `activation`, `linear_out` (the model's own down-projection), `w_down`
    (its copy that is written), `target_generator.conv1d.conv` and `target_generator.W_target`, `chunk_size`, `ttt_lr`,
    `delta_clip_fro_norm`. reset: forgets a conversation; without one nothing is known that does.
    """

    def __init__(
        self,
        gating: nn.Module,
        *,
        name: str | None = None,
        reset: Callable[[nn.Module], None] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(gating, name, dtype)
        self._reset, m = reset, self._part
        self.chunk_size, self.eta = m("chunk_size"), m("ttt_lr")
        self.input_size, (self.d, self.h) = m("linear_in").in_features, m("linear_out").weight.shape

    def _part(self, name: str) -> Any:
        return getattr(self.module, name)

    def forward(self, x: Tensor, target: Tensor, *, documents: Sequence[int] | None = None, padding: Tensor | None = None) -> Tensor:
        if documents is not None or padding is not None:
            raise NotChecked("the module takes neither document boundaries nor a padding mask")
        was_training = self.module.training
        self.module.train()  # whole sequences are read in parallel in training mode alone
        try:
            return self.module(x.to(self._dtype), target.to(self._dtype))
        finally:
            self.module.train(was_training)

    def keys(self, x: Tensor) -> Tensor:
        both = self._part("linear_in")(x.to(self._dtype)).unflatten(-1, (2, -1))
        return self._part("activation")(both[..., 0, :]) * both[..., 1, :]

    @property
    def fast_weight(self) -> Tensor:
        return self._part("linear_out").weight

    @property
    def conv(self) -> Tensor:
        return self._part("target_generator").conv1d.conv.weight

    @property
    def proj(self) -> Tensor:
        return self._part("target_generator").W_target.weight

    def is_fast(self, name: str) -> bool:
        return name in ("linear_out.weight", "w_down") or name in dict(self.module.named_buffers())

    def stream(self) -> Stream:
        return _MoshiStream(copy.deepcopy(self.module).eval(), self._reset, self._dtype)

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        yield MoshiGating(self._given, name=self.name, reset=self._reset, dtype=torch.float32)

    @property
    def tau(self) -> float | None:
        return self._part("delta_clip_fro_norm")

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        clip = self._part("delta_clip_fro_norm")
        self.module.delta_clip_fro_norm = None  # type: ignore[assignment]
        try:
            yield
        finally:
            self.module.delta_clip_fro_norm = clip


class _MoshiStream:
    """A copy of the module as one conversation: it keeps its state itself."""

    def __init__(self, module: nn.Module, reset: Callable[[nn.Module], None] | None, dtype: torch.dtype) -> None:
        self._module, self._reset, self._dtype = module, reset, dtype

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        return self._module(x.to(self._dtype), target.to(self._dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Those of the copy, in which the conversation is kept."""
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def reset(self) -> None:
        if self._reset is None:
            raise NotChecked("no function was given that forgets a conversation")
        self._reset(self._module)
