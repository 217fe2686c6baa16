"""Titans' memory as context (MAC), after arXiv 2501.00663 §4.1 and its public proof of concept on series of
numbers.

A segment of C tokens is answered from what the memory recalls for it, from persistent tokens and from itself;
what comes out is written. What lies further back than C tokens can reach the answer through the memory alone.
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

    p: the persistent tokens, learnt. Attn: transformer encoder layers without positions or mask, so that only
        what follows
    the segment may be predicted from it. FC: one linear map from all 2C + N_p tokens to C; it is the proof of
    concept's, not the paper's, and all that tells the tokens' places. M reads every token of y after that
    token's own update; its queries and answers are not mapped again (no output projection). memory: options
    of `Titans`.
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
        """A segment [B, C, dim] → its output and the memory's state after it."""
        state = self.memory.initial_state(len(x)) if state is None else state
        context = [self.memory.recall(x, state), self.persistent.expand(len(x), -1, -1), x]
        y = self.mix(F.silu(self.attention(torch.cat(context, dim=1))).flatten(1)).view_as(x)
        z, state = self.memory(y, state)
        return y * z.sigmoid(), state


class MACModel(nn.Module):
    """Predicts what follows a series: all of its segments but the last only write, the last one answers.

    width: numbers in an element. segment: C, elements in a segment, also the chunk of the memory's gradients.
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
        """One segment [B, C, width] → the element that follows it [B, width], and every layer's state."""
        x, after = F.silu(self.embed(x)), list(states)
        for i, layer in enumerate(self.layers):
            y, after[i] = layer(x, states[i])
            x = x + F.silu(y)
        return self.answer(x.flatten(1)), after

    def forward(self, x: Tensor) -> Tensor:
        """The element that follows x [B, T, width]: [B, width]. Segments end with x; what is left over at the
        front is not read."""
        segments = x.shape[1] // self.segment
        if not segments:
            raise InPlaceTTTError(
                f"a series of {x.shape[1]} is shorter than a segment of {self.segment}; give a longer one."
            )
        states: list[TitansState | None] = [None] * len(self.layers)
        for segment in x[:, -segments * self.segment :].split(self.segment, dim=1):
            answer, states = self.step(segment, states)
        return answer

    def every_next(self, x: Tensor, phases: Tensor | None = None) -> Tensor:
        """`forward` of x[:, :t] for each t from C to T − 1 at once: [B, T − C, width].

        Prefixes whose lengths differ by C share their segments, so C streams, side by side in the batch, make
        them all.
        phases: only the t with (t mod C) among these numbers below C, in order; the answers are [B, ⌈(T − C)
            / C⌉, n, width],
        where those of t ≥ T are to be ignored.
        """
        batch, length, width = x.shape
        if length <= self.segment:
            raise InPlaceTTTError(
                f"a series of {length} has nothing behind a segment of {self.segment}; give a longer one."
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
    """Transformer encoder layers without dropout, SiLU inside."""
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                dim, heads, feedforward, dropout=0.0, activation=F.silu, batch_first=True
            )
            for _ in range(layers)
        )
    )
