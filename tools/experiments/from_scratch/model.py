"""A causal model of window attention and a memory.

Text beyond the window can reach a token through the memory alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.memories import InPlaceTTT, Memory, make, state_bytes

from .settings import NONE, Model


class WindowAttention(nn.Module):
    """Causal attention with rotary positions; a token sees itself and the window − 1 before it."""

    frequencies: Tensor

    def __init__(self, dim: int, heads: int, window: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.register_buffer(
            "frequencies", base ** -torch.linspace(0, 1, dim // heads // 2 + 1)[:-1], persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        length, w = x.shape[1], self.window
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, d]
        q, k = self.rotated(q), self.rotated(k)
        # A block of w queries needs its own keys and those of the block before. So the cost grows with T w
        # in place of T².
        behind = -length % w
        q = F.pad(q, (0, 0, 0, behind)).unflatten(2, (-1, w))  # [B, H, n, w, d]
        k, v = (F.pad(y, (0, 0, w, behind)).unfold(2, 2 * w, w).mT for y in (k, v))  # [B, H, n, 2w, d]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q.shape[2], x.device))
        return self.to_out(y.flatten(2, 3)[:, :, :length].transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], device=x.device), self.frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def mask(self, blocks: int, device: torch.device) -> Tensor:
        """Returns the mask [n, w, 2w]. The first block has nothing before it."""
        ago = (
            torch.arange(self.window, device=device)[:, None]
            + self.window
            - torch.arange(2 * self.window, device=device)
        )
        mask = ((ago >= 0) & (ago < self.window)).repeat(blocks, 1, 1)
        mask[0, :, : self.window] = False
        return mask


class ShortConvolution(nn.Module):
    """Weights each channel's last `taps` tokens: y_t = Σ_j w_j ∘ x_{t-j}.

    Most published layers have such a convolution before q, k and v.
    """

    def __init__(self, dim: int, taps: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, taps, groups=dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (self.conv.kernel_size[0] - 1, 0))).mT


class GatedMLP(nn.Module):
    """W_down (silu(W_gate x) ∘ W_up x), the MLP of the converted models."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Normed(nn.Module):
    """Normalizes the output of a memory, since a sum over all tokens grows with them.

    Most published layers have such a norm.
    """

    def __init__(self, memory: Memory[Any], dim: int) -> None:
        super().__init__()
        self.memory, self.norm = memory, nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.memory(x)[0])


class Block(nn.Module):
    """A block: x + Attn(n) + norm M(n) with n = conv(norm x), then + MLP(norm x).

    In-Place TTT takes the place of the MLP, and not a place beside attention.
    """

    def __init__(self, settings: Model, width: int, system: str, options: dict[str, Any]) -> None:
        super().__init__()
        dim = settings.dim
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.convolution = ShortConvolution(dim, settings.taps) if settings.taps > 1 else nn.Identity()
        self.attention = WindowAttention(dim, settings.heads, settings.window)
        memory = None if system == NONE else memory_of(system, dim, width, options)
        in_place = isinstance(memory, InPlaceTTT)
        self.memory = None if in_place or memory is None else Normed(memory, dim)
        self.mlp: nn.Module = memory if in_place else GatedMLP(dim, width)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, dim] to [B, T, dim]. Every memory starts anew."""
        n = self.convolution(self.norm(x))
        x = x + self.attention(n) + (0 if self.memory is None else self.memory(n))
        y = self.mlp(self.mlp_norm(x))
        return x + (y[0] if isinstance(y, tuple) else y)


class CausalModel(nn.Module):
    """Maps token ids [B, T] to logits [B, T, vocabulary] of the next token. The head is the embedding.

    Args:
        width: hidden width of the MLPs, in place of settings.width.
        system: a name of `inplace_ttt.memories`, or "none".
    """

    def __init__(
        self, settings: Model, vocabulary: int, width: int, system: str, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, settings.dim)
        nn.init.normal_(self.embedding.weight, std=settings.dim**-0.5)
        self.blocks = nn.Sequential(
            *(Block(settings, width, system, options) for _ in range(settings.blocks))
        )
        self.norm = nn.RMSNorm(settings.dim)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.embedding(ids))), self.embedding.weight)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def memory_bytes(self, length: int) -> int:
        """Returns the bytes of all states of one sequence after `length` tokens, without attention's
        cache."""
        found = 0
        for memory in (module for module in self.modules() if isinstance(module, Memory)):
            like = next(memory.parameters())
            dim = self.embedding.embedding_dim
            found += state_bytes(memory(like.new_zeros(1, length, dim))[1])
        return found


def memory_of(system: str, dim: int, width: int, options: dict[str, Any]) -> Memory[Any]:
    return make(system, dim, **(options | {"hidden": width} if system == "in-place" else options))


def matching_width(settings: Model, vocabulary: int, system: str, options: dict[str, Any]) -> int:
    """Returns the MLP width at which `system` has as many parameters as attention alone at settings.width.

    The widths of the blocks are exact to half a hidden unit.
    """

    def parameters(system: str, width: int) -> int:
        return CausalModel(
            settings, vocabulary, width, system, options if system != NONE else {}
        ).parameter_count()

    least = parameters(system, 1)
    width = 1 + round((parameters(NONE, settings.width) - least) / (parameters(system, 2) - least))
    if width < 1:
        raise InPlaceTTTError(
            f"{system} alone has more parameters than an MLP of width {settings.width}; raise model.width "
            f"by {1 - width} or more."
        )
    return width
