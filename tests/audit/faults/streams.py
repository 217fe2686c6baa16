"""Faults of a stream: what is kept between calls, taken back, chosen, and branched off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt.layer import cache as cache_module
from inplace_ttt.layer.buffers import OpenChunks
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.session.session import Session

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .planting import acts_in
from .under_way import Patch, now, place_in

Plant = Callable[[Patch], None]


def open_chunk_lost(size: float, when: When) -> Plant:
    """A call finds the open chunk as zeros, or its oldest tokens, a share of them."""

    def plant(patch: Patch) -> None:
        def advance(self: FastWeightStream, *args: Any, **kwargs: Any) -> Tensor:
            for index, row in enumerate(self.rows):
                if row.filled and acts_in(when, self, index):
                    for buffer in self._open.held:
                        buffer[index, : max(1, round(size * row.filled))] = 0
            return real(self, *args, **kwargs)

        real = FastWeightStream.advance
        patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))

    return plant


def written_twice(size: float, when: When) -> Plant:
    """What an open chunk held before the call that completes it counts again, by a share."""

    def plant(patch: Patch) -> None:
        def followed_by(self: OpenChunks, row: int, filled: int, *new: Tensor) -> tuple[Tensor, ...]:
            z, x = real(self, row, filled, *new)
            call = now()
            if filled and call is not None and call.stream is not None and acts_in(when, call.stream, row):
                z = torch.cat([z[:filled] * (1 + size), z[filled:]])
            return z, x

        real = OpenChunks.followed_by
        patch.setattr(OpenChunks, "followed_by", followed_by)

    return plant


def decoded_not_written(size: float, when: When) -> Plant:
    """Tokens that come alone are taken in as zeros."""

    def plant(patch: Patch) -> None:
        def take(self: FastWeightStream, index: int, z: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
            call = now()
            lost = call is not None and call.tokens == 1 and acts_in(when, self, index)
            real(self, index, (1 - size) * z if lost else z, x, *args, **kwargs)

        def take_each(
            self: FastWeightStream, places: Any, z: Tensor, x: Tensor, rows: Any, *args: Any
        ) -> None:
            z = z.clone()
            for place, row in zip(places, rows, strict=True):
                # `take` gets the token that completes a chunk
                if self.rows[row].filled + 1 < self.chunk_size and acts_in(when, self, row):
                    z[place] *= 1 - size
            each(self, places, z, x, rows, *args)

        real, each = FastWeightStream._take, FastWeightStream._take_each
        patch.setattr(FastWeightStream, "_take", take)
        patch.setattr(FastWeightStream, "_take_each", take_each)

    return plant


def not_reordered(size: float, when: When) -> Plant:
    """A beam keeps its state and its open chunk, whichever beam it goes on from."""
    return lambda patch: patch.setattr(
        cache_module.CarriesFastWeight,
        "reorder_cache",
        lambda self, beams: _reorder_attention(self, beams, when),
    )


def _reorder_attention(layer: Any, beams: Tensor, when: When) -> None:
    super(cache_module.CarriesFastWeight, layer).reorder_cache(beams)
    stream = layer.fast_weight
    if not when.holds(place_in(stream)):
        stream.select(beams.tolist())


def open_chunk_not_reordered(size: float, when: When) -> Plant:
    def plant(patch: Patch) -> None:
        def select(self: FastWeightStream, rows: list[int]) -> None:
            kept = self._open if len(rows) == self.batch and when.holds(place_in(self)) else None
            real(self, rows)
            self._open = self._open if kept is None else kept

        real = FastWeightStream.select
        patch.setattr(FastWeightStream, "select", select)

    return plant


def crop_keeps_tokens(size: float, when: When) -> Plant:
    """Of tokens that are taken back out of the open chunk, some stay, and push out those that come."""

    def plant(patch: Patch) -> None:
        def crop(self: FastWeightStream, tokens: int) -> None:
            held = self._open.held
            real(self, tokens)
            for index, row in enumerate(self.rows):
                if held and row.filled and when.holds(place_in(self, index)):
                    for buffer in self._open.held:
                        buffer[index, row.filled - 1] = buffer[
                            index, min(row.filled + tokens, buffer.shape[1]) - 1
                        ]

        real = FastWeightStream.crop
        patch.setattr(FastWeightStream, "crop", crop)

    return plant


def starts_anew(size: float, when: When) -> Plant:
    """Each call starts from W0, or from what is left of the state."""

    def plant(patch: Patch) -> None:
        def advance(self: FastWeightStream, *args: Any, **kwargs: Any) -> Tensor:
            for index in range(self.batch):
                if self.state is not None and acts_in(when, self, index):
                    self._state.put(index, (1 - size) * self.state[index].clone())  # type: ignore[union-attr]
            return real(self, *args, **kwargs)

        real = FastWeightStream.advance
        patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))

    return plant


def long_pieces_thinned(size: float, when: When) -> Plant:
    """Of a piece with several whole chunks, these are not all written."""

    def plant(patch: Patch) -> None:
        def take_whole(
            self: FastWeightStream, out: Tensor, z: Tensor, x: Tensor, spans: Any, layer: Any, *row: Any
        ) -> None:
            acts = [acts_in(when, self, index) for index in range(self.batch)]
            keep = torch.tensor([[not a] for a in acts])[..., None]
            real(self, out, torch.where(keep, z, (1 - size) * z), x, spans, layer, *row)

        real = FastWeightStream._take_whole
        patch.setattr(FastWeightStream, "_take_whole", take_whole)

    return plant


def short_memory(tokens: float, when: When) -> Plant:
    """Of the open chunk's target source only the newest tokens are kept."""

    def plant(patch: Patch) -> None:
        def followed_by(self: OpenChunks, row: int, filled: int, *new: Tensor) -> tuple[Tensor, ...]:
            z, x = real(self, row, filled, *new)
            call = now()
            if call is not None and call.stream is not None and acts_in(when, call.stream, row):
                x = torch.cat(
                    [torch.zeros_like(x[: max(0, filled - int(tokens))]), x[max(0, filled - int(tokens)) :]]
                )
            return z, x

        real = OpenChunks.followed_by
        patch.setattr(OpenChunks, "followed_by", followed_by)

    return plant


def shared_fork(size: float, when: When) -> Plant:
    """A branch and its stem have one state."""

    def plant(patch: Patch) -> None:
        def fork(self: Session) -> Session:
            other = real(self)
            for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
                if hasattr(mine, "fast_weight") and when.holds(place_in(mine.fast_weight)):
                    theirs.fast_weight = mine.fast_weight  # type: ignore[attr-defined]
            return other

        real = Session.fork
        patch.setattr(Session, "fork", fork)

    return plant


def reopened_without_keys(size: float, when: When) -> Plant:
    """A chunk that is reopened, since tokens are taken back, has lost its keys, or a share of their size."""

    def plant(patch: Patch) -> None:
        def take_back(self: FastWeightStream, index: int) -> None:
            row = self.rows[index]
            if row.undo is not None and when.holds(place_in(self, index)):
                row.undo = dataclasses.replace(row.undo, z=(1 - size) * row.undo.z)
            real(self, index)

        real = FastWeightStream._take_back
        patch.setattr(FastWeightStream, "_take_back", take_back)

    return plant


BETWEEN = (only.ALWAYS, only.LATER_LAYER, only.LAST_LAYER)
"""Conditions that can be decided between two calls."""
IN_CALLS = (only.SHORT_PIECES, only.DECODING, only.CACHE_AND_BATCH, only.AFTER_RESET, only.AFTER_CROP, only.AFTER_SELECT,
            only.AFTER_RESTORE, only.MANY_CHUNKS_STREAMED, only.LATER_LAYER_STREAMED)  # fmt: skip
PIECES = "chunked-prefill token-by-token in-pieces"
KINDS: tuple[Kind, ...] = (
    Kind("the open chunk is lost", "stream", owned(PIECES), open_chunk_lost, (1.0, 0.3), IN_CALLS, 4),
    Kind("the open chunk is written twice", "stream", owned(PIECES), written_twice, (1.0, 0.3, 0.1), (only.ALWAYS, *IN_CALLS), 4),
    Kind("tokens that come alone are not written", "stream", owned("generated-tokens token-by-token in-pieces"), decoded_not_written,
         (1.0, 0.3), tuple(when for when in IN_CALLS if when is not only.SHORT_PIECES), 4),
    Kind("beams are not reordered", "stream", owned("take-back in-batches"), not_reordered, whens=BETWEEN, count=3,
         scenes=("beams", "chosen rows")),
    Kind("open chunks are not reordered", "stream", owned("take-back in-batches"), open_chunk_not_reordered, whens=BETWEEN, count=3,
         scenes=("chosen rows",)),
    Kind("tokens taken back stay in the open chunk", "stream", owned("take-back"), crop_keeps_tokens, whens=BETWEEN, count=3,
         scenes=("taken back",)),
    Kind("what is reopened has lost its keys", "stream", owned("take-back"), reopened_without_keys, (1.0, 0.3), BETWEEN, 3,
         scenes=("taken back",)),
    Kind("a call starts from less of the state", "stream", owned(PIECES), starts_anew, (1.0, 0.3, 0.1), IN_CALLS, 5),
    Kind("long pieces are thinned", "stream", owned(PIECES), long_pieces_thinned, (1.0, 0.3, 0.1),
         (only.ALWAYS, only.LATER_LAYER_STREAMED, only.CACHE_AND_BATCH), 3, ("stream", "padded stream", "long stream")),
    Kind("the open chunk's source is cut off", "stream", owned(f"{PIECES} streaming-target"), short_memory, (2, 3, 4),
         (only.ALWAYS, *IN_CALLS), 4),
    Kind("a branch shares its stem's state", "stream", owned("take-back saved-session"), shared_fork, whens=BETWEEN, count=3,
         scenes=("fork",)),
)  # fmt: skip
