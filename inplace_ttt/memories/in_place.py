"""In-Place TTT (arXiv 2604.06169) as one of the memories.

The layer is a gated MLP, and the sequence writes into its down-projection. Key and query are the same, Z =
silu(x W_gate) ∘ x W_up [T, h]. The value is V = Conv(x) P [T, d], which may look ahead inside its chunk. The
state is a matrix, and the loss is −⟨S z, v⟩. A chunk reads the state first, and is written when it is
complete.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import InPlaceTTTConfig
from ..config_checks import Conv
from ..errors import InPlaceTTTError
from ..layer.target import TargetGenerator
from ..layout import ChunkLayout
from ..ops import fast_weight
from ..ops.precision import state_dtype
from .protocol import Memory, Tokens, checked, gradient


class InPlaceState(NamedTuple):
    """The state of `InPlaceTTT`: S and the tokens of the open (unfinished) chunk."""

    s: Tensor
    """S without η, [B, 1, d, h]."""
    z: Tensor
    """The open chunk's keys [B, 1, n, h]."""
    x: Tensor
    """The open chunk's target sources [B, 1, n, d], because a value depends on neighboring tokens."""


class InPlaceTTT(Memory[InPlaceState]):
    """O = Z (W0 + η S)ᵀ, S ← S + VᵀZ once per chunk.

    It computes the same as a converted model whose target source is the layer's own input.

    Args:
        dim: Width d of the tokens.
        hidden: Width h of the MLP; None: 4 · dim.
        chunk: C, tokens per chunk.
        eta: η, the factor of S.
        kernel_size: Taps of the convolution.
        conv: The convolution's kind, as in `InPlaceTTTConfig`.
        std: Standard deviation of P's initial diagonal; the convolution starts at zero.
        seed: Seed of the diagonal.
    """

    reads_first = True

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        chunk: int = 1024,
        eta: float = 1.0,
        kernel_size: int = 5,
        conv: Conv = "lookahead",
        std: float = 0.02,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.chunk, self.eta = checked(chunk), eta
        # raises InPlaceTTTError for options that a conversion refuses
        InPlaceTTTConfig(chunk_size=chunk, eta=eta, kernel_size=kernel_size, conv=conv)
        hidden = 4 * dim if hidden is None else hidden
        if min(dim, hidden) < 1:
            raise InPlaceTTTError(f"dim and hidden must be at least 1, got {dim} and {hidden}.")
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.ttt = TargetGenerator(dim, kernel_size, conv)
        self.ttt.reset_parameters(std, seed)

    def initial_state(self, batch: int) -> InPlaceState:
        like, (d, h) = self.down.weight, self.down.weight.shape
        dtype = state_dtype(like.dtype)
        return InPlaceState(
            *(like.new_zeros(batch, 1, *shape, dtype=dtype) for shape in ((d, h), (0, h), (0, d)))
        )

    def tokens(self, x: Tensor) -> Tokens:
        z = (F.silu(self.gate(x)) * self.up(x)).unsqueeze(1)
        return Tokens(z, z, x.unsqueeze(1), z[..., :0])

    def output(self, y: Tensor) -> Tensor:
        return y.squeeze(1)

    def query(self, state: InPlaceState, q: Tensor) -> Tensor:
        return q @ (self.down.weight.to(q.dtype) + self.eta * state.s).mT

    def update(self, state: InPlaceState, token: Tokens) -> InPlaceState:
        z, x = torch.cat([state.z, token.k], dim=2), torch.cat([state.x, token.v], dim=2)
        if z.shape[2] < self.chunk:
            return InPlaceState(state.s, z, x)
        v = self.values(x)
        s = state.s - gradient(lambda s: -(z @ s.mT * v), state.s)
        return InPlaceState(s, z[:, :, :0], x[:, :, :0])

    def parallel(self, state: InPlaceState, tokens: Tokens) -> tuple[Tensor, InPlaceState]:
        """Runs the op of a converted model on the open chunk's rows and the new ones."""
        z, x = torch.cat([state.z, tokens.k], dim=2), torch.cat([state.x, tokens.v], dim=2)
        layout = ChunkLayout.from_lengths([[z.shape[2]]] * len(z), self.chunk)
        v = self.ttt(x.squeeze(1), layout).to(z.dtype)
        y, s = fast_weight(
            z.squeeze(1),
            v,
            self.down.weight.to(z.dtype),
            eta=self.eta,
            layout=layout,
            initial_state=state.s.squeeze(1),
            return_state=True,
        )
        read, opened = state.z.shape[2], z.shape[2] - z.shape[2] % self.chunk
        return y[:, read:].unsqueeze(1), InPlaceState(s.unsqueeze(1), z[:, :, opened:], x[:, :, opened:])

    def values(self, x: Tensor) -> Tensor:
        """Returns V of one chunk, [B, 1, C, d]."""
        layout = ChunkLayout.from_lengths([[x.shape[2]]] * len(x), x.shape[2])
        return self.ttt(x.squeeze(1), layout).to(x.dtype).unsqueeze(1)
