"""The inference of TTT-NTP. A layer keeps the end of the prompt, and writes it once by ridge regression."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..config_tables import PromptWrite
from ..errors import InPlaceTTTError
from ..layout import Span
from ..ops import keeping_row_norms, state_dtype
from ..ops.precision import without_autocast
from ..rules import SumRule
from .buffers import State
from .gradient_stream import GradientStream
from .stream import FastWeightStream
from .target import TargetGenerator


class PromptedLayer(Protocol):
    """The parts of a layer that the write of a prompt uses."""

    ttt: TargetGenerator

    def base_weight(self) -> Tensor:
        """Returns W0 [d, h]."""


def ridge_write(keys: Tensor, values: Tensor, w0: Tensor, settings: PromptWrite) -> Tensor:
    """Computes the ridge regression of a prompt's write, in float64.

    It solves with the smaller of the two Gram matrices, [h, h] or [m, m].

    Args:
        keys: Z [m, h].
        values: V [m, d].
        w0: W0 [d, h].
        settings: the settings of the write, see `PromptWrite`.

    Returns:
        η' ΔW [d, h], float64.
    """
    k, v, w = (x.to(torch.float64) for x in (keys, values, w0))
    residual = v - k @ w.T
    wide = len(k) > k.shape[1]
    gram = k.T @ k if wide else k @ k.T
    gram.diagonal().add_(settings.ridge)
    factor = torch.linalg.cholesky(gram)
    change = (
        torch.cholesky_solve(k.T @ residual, factor).T
        if wide
        else torch.cholesky_solve(residual, factor).T @ k
    )
    size, eta = float(torch.linalg.vector_norm(change)), settings.eta
    if settings.cap is not None and size > 0:
        eta = min(eta, settings.cap * float(torch.linalg.vector_norm(w)) / size)
    return eta * change


_KEPT = SumRule(preserve_row_norms=True)
"""A rule with which `State` calls `_Reads.readout`, with or without `preserve_row_norms`."""


class _Reads:
    """The reader of W0 + D for `State`. D is the state η' ΔW."""

    eta = 1.0

    def __init__(self, layer: PromptedLayer, preserve_row_norms: bool) -> None:
        self.layer, self.preserve_row_norms = layer, preserve_row_norms

    def readout(self, state: Tensor) -> Tensor:
        return (
            keeping_row_norms(state, self.layer.base_weight().to(state.dtype), 1.0)
            if self.preserve_row_norms
            else state
        )


class _End:
    """The last rows of Z [n, h] and X [n, d] of one sequence.

    It holds the last `room` rows, or all rows if there are fewer. It never holds 2 `room` rows.
    """

    def __init__(self, room: int) -> None:
        self.room, self.pieces = room, list[tuple[Tensor, Tensor]]()
        self.held = 0

    def put(self, z: Tensor, x: Tensor) -> None:
        """Appends rows [n, h] and [n, d]."""
        self.pieces.append((z[-self.room :].clone(), x[-self.room :].clone()))
        self.held += len(self.pieces[-1][0])
        if self.held >= 2 * self.room or len(self.pieces) > 64:
            self._keep(self.last(self.room))

    def last(self, n: int) -> tuple[Tensor, Tensor]:
        """Returns the last n rows, or all if there are fewer."""
        z, x = (torch.cat(tensors) for tensors in zip(*self.pieces, strict=True))
        return z[-n:], x[-n:]

    def drop(self, n: int) -> None:
        """Drops the last n rows."""
        z, x = self.last(self.held)
        self._keep((z[: self.held - n], x[: self.held - n]))

    def _keep(self, rows: tuple[Tensor, Tensor]) -> None:
        self.pieces, self.held = [(rows[0].clone(), rows[1].clone())], len(rows[0])

    def copy(self) -> _End:
        other = _End(self.room)
        other.pieces, other.held = list(self.pieces), self.held
        return other


class PromptStream(FastWeightStream):
    """The stream of a layer with `prompt_write`.

    Until the prompt is written, the stream keeps the end of each sequence's prompt, and every token reads W0.
    After the write it keeps the state η' ΔW [B, d, h].

    Args:
        batch: B, number of sequences.
        settings: the settings of the write.
    """

    def __init__(self, batch: int, settings: PromptWrite) -> None:
        super().__init__(batch, 1, update_on_decode=False)
        self.settings = settings
        self.ends = [_End(settings.window + 1) for _ in range(batch)]  # a pair needs two tokens
        self.seen, self.since = [0] * batch, [0] * batch
        self.is_written = self._has_gap = False

    @classmethod
    def of(cls, config: InPlaceTTTConfig, batch: int) -> PromptStream:
        assert config.prompt_write is not None
        return cls(batch, config.prompt_write)

    @property
    def written(self) -> list[int]:
        """Number of writes per row: 1 after the prompt is written, else 0."""
        return [int(self.is_written)] * self.batch

    @property
    def tokens(self) -> list[int]:
        """Number of tokens read, per row."""
        return self.seen

    def read_matrix(self, row: int, layer: Any) -> Tensor:
        assert self._state is not None
        return _Reads(layer, self.settings.preserve_row_norms).readout(self._state.value[row])

    @torch.no_grad()
    def advance(
        self, out: Tensor, z: Tensor, x: Tensor, spans: list[Span], layer: Any, *, generated: bool = False
    ) -> Tensor:
        """Adds the reads to `out` in place. Before the write, it also keeps the end of the new tokens.

        Args:
            out: outputs without fast weights [B, T, d].
            z: keys [B, T, h].
            x: target source [B, T, d].
            spans: for each row, the span of its tokens without padding.
            layer: the layer that reads.
            generated: unused.

        Returns:
            `out`.

        Raises:
            InPlaceTTTError: if the batch has another number of rows than the cache, or the cache was filled
                with gradients on.
        """
        if len(spans) != self.batch:
            raise InPlaceTTTError(
                f"the cache holds {self.batch} sequences, but the batch has {len(spans)}; start a new cache."
            )
        self.check_holds_state()
        if self._state is not None:
            self._state.add_read(out, z, _Reads(layer, self.settings.preserve_row_norms))
        for row, (start, stop) in enumerate(spans):
            self.seen[row] += stop - start
            self.since[row] += stop - start
            if start < stop and not self.is_written:
                self.ends[row].put(z[row, start:stop], x[row, start:stop])
        return out

    @torch.no_grad()
    def write(self, layer: PromptedLayer) -> None:
        """Writes the last pairs of each sequence. A sequence of less than three tokens writes nothing.

        Args:
            layer: the layer that writes.

        Raises:
            InPlaceTTTError: if the prompt is already written, or part of it was read with TTT off.
        """
        self.check_holds_state()
        if self.is_written:
            raise InPlaceTTTError(
                "this session's prompt is written already; fork a session before its prompt ends, or start a "
                "new session."
            )
        if self._has_gap:
            raise InPlaceTTTError(
                "part of the prompt was read with TTT off, so some of its pairs are missing; read it again "
                "with TTT on."
            )
        w0 = layer.base_weight()
        accurate = state_dtype(w0.dtype)
        total = torch.zeros(self.batch, *w0.shape, dtype=accurate, device=w0.device)
        for row, end in enumerate(self.ends):
            if self.seen[row] > 2:
                z, x = end.last(self.settings.window + 1)
                source, proj = layer.ttt.normalize_source(x[1:].to(accurate)), layer.ttt.proj.to(accurate)
                with without_autocast(w0.device):
                    total[row] = ridge_write(z[:-1], source @ proj, w0, self.settings)
            end.__init__(end.room)  # type: ignore[misc]
            self.since[row] = 1  # the caller crops the last token and reads it again
        self._state = State(total, _KEPT)
        self.is_written = True

    def skip(self) -> None:
        """Records tokens in the cache that this stream did not receive.

        The tokens before and after them do not form a pair.
        """
        self._has_gap = self._has_gap or any(self.seen)

    def crop(self, tokens: int) -> None:
        """Removes the last `tokens` tokens of every row, as if they had never been read."""
        if tokens == 0 or self._abandoned:
            return
        self.check_crop(tokens)
        if all(tokens >= seen for seen in self.seen):
            self.reset()
            return
        for row, n in enumerate(min(tokens, seen) for seen in self.seen):
            if not self.is_written and n:
                self.ends[row].drop(n)
            self.seen[row] -= n
            self.since[row] -= n

    def check_crop(self, tokens: int) -> None:
        """Raises InPlaceTTTError if `crop` cannot remove so many tokens."""
        if tokens == 0 or self._abandoned or all(tokens >= seen for seen in self.seen):
            return
        for end, seen, since in zip(self.ends, self.seen, self.since, strict=True):
            n = min(tokens, seen)
            if self.is_written and n > since:
                raise InPlaceTTTError(
                    f"the last {n} tokens reach into the prompt, whose write cannot be undone; fork the "
                    "session before its prompt ends."
                )
            if not self.is_written and end.held - n < min(end.room, seen - n):
                raise InPlaceTTTError(
                    f"the last {n} tokens cannot be taken back: the session has dropped the end of the "
                    "prompt before them; "
                    "fork the session before reading tokens that you may take back."
                )

    def reset(self) -> None:
        self.__init__(self.batch, self.settings)  # type: ignore[misc]

    def select(self, rows: list[int]) -> None:
        if rows == list(range(self.batch)):
            return
        self.rows = [self.rows[row] for row in rows]
        self.ends = [self.ends[row].copy() for row in rows]
        self.seen, self.since = [self.seen[row] for row in rows], [self.since[row] for row in rows]
        self._state = self._state and self._state.select(rows)

    def tensors(self) -> dict[str, Tensor]:
        self.check_holds_state()
        if self.state is None:
            raise InPlaceTTTError(
                "this session's prompt is not written yet, and a file cannot hold an unwritten prompt; write "
                "it first (session.write_prompt)."
            )
        return {
            "counts": torch.tensor([[0] * self.batch, [0] * self.batch, self.seen]),
            "state": self.state.contiguous(),
        }

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: InPlaceTTTConfig, dtype: torch.dtype
    ) -> PromptStream:
        stream = cls.of(config, tensors["counts"].shape[1])
        stream.seen, stream.is_written = tensors["counts"].tolist()[2], True
        stream._state = State(tensors["state"].to(state_dtype(dtype)), _KEPT)
        return stream


def stream_class(config: InPlaceTTTConfig) -> type[FastWeightStream]:
    """Returns the class of streams for a config.

    There is one class each for a write per chunk, for a write per chunk with gradient targets, and for one
    write at a prompt's end.
    """
    if config.target == "gradient":
        return GradientStream
    return FastWeightStream if config.prompt_write is None else PromptStream
