"""Titans' memory as context (MAC), from arXiv 2501.00663 §4.1 and its proof of concept on number series.

The output for a segment of C tokens depends on the memory's reads, on persistent tokens and on the segment
itself. This output is then written into the memory. Only the memory can pass on information from more than C
tokens before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InPlaceTTTError
from .titans import Titans, TitansState


class MACLayer(nn.Module):
    """h = M(q(x)); y = FC(silu(Attn([h ‖ p ‖ x]))); M learns y; output y ⊙ σ(M(q(y))).

    p are the persistent tokens, which are learned. Attn are transformer encoder layers without positions or
    mask, so a model may predict only tokens after the segment, never tokens in it. FC is one linear map from
    all 2C + N_p tokens to C tokens. It comes from the proof of concept, and not from the paper. FC alone
    depends on the tokens' positions. M reads every token of y after that token's own update. There is no
    output projection.

    Args:
        dim: Width of the tokens.
        segment: C, tokens per segment.
        heads: Attention heads.
        persistent: N_p, the number of persistent tokens.
        encoder_layers: Layers of Attn.
        feedforward: Hidden width of Attn's MLPs.
        **memory: Options of the memory M, a `Titans`.
    """

    def __init__(
        self,
        dim: int,
        segment: int,
        heads: int,
        persistent: int,
        encoder_layers: int,
        feedforward: int,
        **memory: Any,
    ) -> None:
        super().__init__()
        self.memory = Titans(dim, chunk=segment, **memory)
        self.memory.to_out = nn.Identity()  # type: ignore[assignment]
        self.persistent = nn.Parameter(torch.randn(persistent, dim))
        self.attention = encoder(dim, heads, encoder_layers, feedforward)
        self.mix = nn.Linear((2 * segment + persistent) * dim, segment * dim)

    def forward(self, x: Tensor, state: TitansState | None = None) -> tuple[Tensor, TitansState]:
        """Maps a segment [B, C, dim] to its output [B, C, dim] and the memory's state after it."""
        state = self.memory.initial_state(len(x)) if state is None else state
        context = [self.memory.recall(x, state), self.persistent.expand(len(x), -1, -1), x]
        y = self.mix(F.silu(self.attention(torch.cat(context, dim=1))).flatten(1)).view_as(x)
        z, state = self.memory(y, state)
        return y * z.sigmoid(), state


class MACModel(nn.Module):
    """Predicts the next element of a series. All segments are written, and the last output is the prediction.

    Args:
        width: Numbers per element.
        dim: Width of the tokens.
        segment: C, elements per segment; also the chunk of the memory's gradients.
        layers: Number of `MACLayer`s.
        heads: Attention heads.
        persistent: Persistent tokens per layer.
        encoder_layers: Encoder layers per layer.
        feedforward: Hidden width of the encoder's MLPs.
        memory_layers: Layers of the memory's M.
        **memory: Further options of the memory M, a `Titans`.
    """

    def __init__(
        self,
        width: int = 1,
        dim: int = 16,
        segment: int = 16,
        layers: int = 2,
        heads: int = 2,
        persistent: int = 4,
        encoder_layers: int = 2,
        feedforward: int = 64,
        memory_layers: int = 2,
        **memory: Any,
    ) -> None:
        super().__init__()
        self.segment = segment
        self.embed = nn.Linear(width, dim)
        self.layers = nn.ModuleList(
            MACLayer(
                dim, segment, heads, persistent, encoder_layers, feedforward, layers=memory_layers, **memory
            )
            for _ in range(layers)
        )
        self.answer = nn.Linear(segment * dim, width)

    def step(self, x: Tensor, states: list[TitansState | None]) -> tuple[Tensor, list[TitansState | None]]:
        """Maps a segment [B, C, width] to the element that follows it, [B, width], and all states.

        states: one per layer, or None before the first segment.
        """
        x, after = F.silu(self.embed(x)), list(states)
        for i, layer in enumerate(self.layers):
            y, after[i] = layer(x, states[i])
            x = x + F.silu(y)
        return self.answer(x.flatten(1)), after

    def forward(self, x: Tensor) -> Tensor:
        """Returns the element [B, width] that follows x [B, T, width].

        Segments are counted from the end of x. The first T mod C elements are not read. Raises
        InPlaceTTTError if T < C.
        """
        segments = x.shape[1] // self.segment
        if not segments:
            raise InPlaceTTTError(
                f"a series of {x.shape[1]} is shorter than a segment of {self.segment}; give a longer series."
            )
        states: list[TitansState | None] = [None] * len(self.layers)
        for segment in x[:, -segments * self.segment :].split(self.segment, dim=1):
            answer, states = self.step(segment, states)
        return answer

    def every_next(self, x: Tensor, phases: Tensor | None = None) -> Tensor:
        """Computes `forward` of x[:, :t] for each t from C to T − 1 in one pass.

        Prefixes whose lengths differ by a multiple of C share segments. So C streams, as rows of one batch,
        compute all prefixes.

        Args:
            x: A series [B, T, width], T > C.
            phases: Numbers below C, in order. Only lengths t with (t mod C) among them are computed. None:
                every t.

        Returns:
            [B, T − C, width]; with `phases` [B, ⌈(T − C) / C⌉, n, width], whose entries for t ≥ T must be
            ignored.

        Raises:
            InPlaceTTTError: If T ≤ C.
        """
        batch, length, width = x.shape
        if length <= self.segment:
            raise InPlaceTTTError(
                f"a series of {length} must be longer than a segment of {self.segment}; give a longer series."
            )
        padded = F.pad(x[:, :-1], (0, 0, 0, -length % self.segment))
        # [B, segments, phases, C, width]
        windows = padded.unfold(1, self.segment, 1).mT.unflatten(1, (-1, self.segment))
        windows = windows if phases is None else windows[:, :, phases]
        answers: list[Tensor] = []
        states: list[TitansState | None] = [None] * len(self.layers)
        for shifted in windows.unbind(1):
            answer, states = self.step(shifted.flatten(0, 1), states)
            answers.append(answer.view(batch, -1, width))
        every = torch.stack(answers, dim=1)
        return every if phases is not None else every.flatten(1, 2)[:, : length - self.segment]


def encoder(dim: int, heads: int, layers: int, feedforward: int) -> nn.Sequential:
    """Builds transformer encoder layers without dropout, with SiLU."""
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                dim, heads, feedforward, dropout=0.0, activation=F.silu, batch_first=True
            )
            for _ in range(layers)
        )
    )
