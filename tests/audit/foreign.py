"""Small modules with two interfaces of others: the reference MLP's, and the Moshi port's gating. Written for
the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 12


class PublicMLP(nn.Module):
    """`mlp(x, t)`: one weight for every chunk, as a cumulative sum without the last delta. Rows padded to
    whole chunks."""

    def __init__(self, d: int = 16, h: int = 48, eta: float = 3.0, seed: int = 0) -> None:
        super().__init__()
        self.eta, self.act_fn = eta, F.silu
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.gate_proj, self.up_proj, self.down_proj = (
                nn.Linear(a, b, bias=False) for a, b in ((d, h), (d, h), (h, d))
            )
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
    """A gating with the port's choices: dense convolution of 2 to the right, an ordinary linear for P, a copy
    of the weight that is written, parallel with a clip in training, and in evaluation one weight a call with
    the state kept in it."""

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
            self.w_down.data += (
                self.ttt_lr * self._delta(keys[:, : self.chunk_size], values[:, : self.chunk_size])[0]
            )
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

    def reset_ttt_state(self) -> None:
        """Of a conversation: the weight goes back, what waits stays."""
        self.w_down.data.copy_(self.get_buffer("w_down_pretrained"))
