"""Conditions under which a fault acts. Each is decided for one chunk of one document of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inplace_ttt.layout import ChunkLayout

from .under_way import Call, Patch, Piece, Place, note, pieces, places_of_call


@dataclass(frozen=True, eq=False)
class When:
    """holds: whether the fault acts at a place. owners: items that may name a fault for showing only then.

    scenes: those in which it holds somewhere. world: what differs from the usual model there (see `World`).
    """

    name: str
    holds: Callable[[Place], bool]
    owners: frozenset[str] = frozenset()
    scenes: tuple[str, ...] = ("whole",)
    world: dict[str, Any] = field(default_factory=dict)

    def anywhere(self, layout: ChunkLayout) -> bool:
        return any(self.holds(piece.place) for piece in pieces(layout))

    def tokens(self, layout: ChunkLayout) -> Tensor:
        """The tokens of a layout at which it holds, bool [B, T]."""
        return self._marked(pieces(layout), layout.batch, layout.length)

    def tokens_of(self, call: Call) -> Tensor:
        """The same of a call, bool [B, T], also one that reads into a cache."""
        return self._marked(places_of_call(call), call.batch, call.tokens)

    def _marked(self, found: Iterable[Piece], rows: int, length: int) -> Tensor:
        marked = torch.zeros(rows, length, dtype=torch.bool)
        for piece in found:
            if self.holds(piece.place):
                marked[piece.index, piece.start : piece.stop] = True
        return marked


def planted(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The same with an account of what is under way, which conditions need."""

    def with_account(patch: Patch) -> None:
        note(patch)
        plant(patch)

    return with_account


def _of_call(holds: Callable[[Call], bool]) -> Callable[[Place], bool]:
    return lambda at: at.call is not None and holds(at.call)


def _when(name: str, holds: Callable[[Call], bool], owners: str, *scenes: str, **world: Any) -> When:
    return When(name, _of_call(holds), frozenset(owners.split()), scenes or ("whole",), world)


def _lengths(call: Call) -> list[int]:
    return [sum(stop - start for start, stop in row) for row in call.spans]


def _padded_left(at: Place) -> bool:
    return at.call is not None and bool(at.call.spans[at.row]) and at.call.spans[at.row][0][0] > 0


def _later_row(at: Place) -> bool:
    return at.call is not None and at.row > 0


ALWAYS = When("", lambda at: True, scenes=("whole", "stream"))

IN_TRAINING = _when("in training", lambda c: c.training, "in-training", "training")
WITH_GRADIENT = _when("with gradients", lambda c: c.with_gradient, "in-training gradient", "training")
IN_EVALUATION = _when("in evaluation", lambda c: not c.training, "")

IN_A_BATCH = _when("in a batch", lambda c: c.batch > 1, "in-batches rows", "batch")
LATER_ROWS = When("in rows after the first", _later_row, frozenset({"in-batches", "rows"}), ("batch",))
UNEVEN = _when(
    "where lengths differ", lambda c: len(set(_lengths(c))) > 1, "in-batches rows padding", "batch"
)
PADDED_LEFT = When(
    "in rows padded at the left",
    _padded_left,
    frozenset({"in-batches", "padding"}),
    ("batch", "padded stream"),
)
PACKED_IN_A_BATCH = _when(
    "where a batch is packed",
    lambda c: c.batch > 1 and any(len(row) > 1 for row in c.spans),
    "in-batches rows document-grid",
    "packed",
)

WITH_CACHE = _when("with a cache", lambda c: c.cached, "in-pieces chunked-prefill token-by-token", "stream")
SHORT_PIECES = _when(
    "in pieces shorter than a chunk",
    lambda c: c.cached and c.tokens < c.chunk_size,
    "in-pieces chunked-prefill token-by-token",
    "stream",
)
DECODING = _when(
    "while decoding",
    lambda c: c.cached and c.tokens == 1,
    "in-pieces token-by-token generated-tokens",
    "decode",
)
LATER_CALLS = _when(
    "after the first call of a stream",
    lambda c: "read" in c.past,
    "in-pieces chunked-prefill token-by-token",
    "stream",
)
CACHE_AND_BATCH = _when(
    "with a cache in a batch",
    lambda c: c.cached and c.batch > 1,
    "in-pieces in-batches rows chunked-prefill",
    "padded stream",
)

AFTER_RESET = _when("after a reset", lambda c: "reset" in c.past, "stream-reset in-pieces", "reset")
AFTER_CROP = _when("after tokens are taken back", lambda c: "crop" in c.past, "take-back", "taken back")
AFTER_SELECT = _when(
    "after rows are chosen", lambda c: "select" in c.past, "take-back in-batches", "chosen rows"
)
AFTER_RESTORE = _when(
    "after a session is loaded", lambda c: "restore" in c.past, "through-a-file saved-session", "session"
)
AFTER_LOADING = _when(
    "in a model that was loaded",
    lambda c: getattr(c.layer.ttt.proj, "_is_hf_initialized", False),
    "through-a-file",
    "checkpoint",
)

MANY_CHUNKS = When(
    "after eight chunks",
    lambda at: at.call is not None and at.chunk >= 8,
    frozenset({"over-many-chunks"}),
    ("long",),
)
SIX_CHUNKS = When(
    "after six chunks",
    lambda at: at.call is not None and at.chunk >= 6,
    frozenset({"over-many-chunks"}),
    ("long",),
)
MANY_CHUNKS_STREAMED = When(
    "after eight chunks of a stream", lambda at: at.call is not None and at.call.cached and at.chunk >= 8,
    frozenset({"over-many-chunks", "in-pieces", "token-by-token", "chunked-prefill"}), ("long stream",),
)  # fmt: skip
LATE_DOCUMENTS = When(
    "from the third document on", lambda at: at.call is not None and at.document >= 2,
    frozenset({"over-many-chunks", "document-grid"}), ("packed",),
)  # fmt: skip
ODD_LENGTH = _when("where a chunk stays open", lambda c: c.tokens % c.chunk_size > 0, "open-chunk in-pieces")
LARGE_CHUNKS = _when(
    "with chunks above 12", lambda c: c.chunk_size > 12, "over-many-chunks chunk-size", "chunks of 16"
)

LATER_LAYER = _when("in the second TTT layer", lambda c: c.position == 1, "every-layer")
LAST_LAYER = _when(
    "in the last of three TTT layers", lambda c: c.position == c.layers - 1, "every-layer", ttt_layers=3
)
LATER_LAYER_TRAINING = _when(
    "in the second TTT layer in training",
    lambda c: c.position == 1 and c.training,
    "every-layer in-training",
    "training",
)
LATER_LAYER_STREAMED = _when(
    "in the second TTT layer with a cache",
    lambda c: c.position == 1 and c.cached,
    "every-layer in-pieces",
    "stream",
)

WIDE = _when("where keys have more than 64 numbers", lambda c: c.width > 64, "", inner=96)

IN_BFLOAT16 = _when("in bfloat16", lambda c: c.dtype == torch.bfloat16, "precisions", dtype=torch.bfloat16)
IN_FLOAT32 = _when("in float32", lambda c: c.dtype == torch.float32, "precisions")
BFLOAT16_TRAINING = _when(
    "in bfloat16 in training", lambda c: c.dtype == torch.bfloat16 and c.training, "precisions in-training", "training",
    dtype=torch.bfloat16,
)  # fmt: skip

LATE_ROWS = When(
    "in rows after the fifth",
    lambda at: at.call is not None and at.row >= 5,
    frozenset({"drawn-sizes"}),
    ("many rows",),
)
FORTY_CHUNKS = When(
    "after forty chunks", lambda at: at.call is not None and at.chunk >= 40, frozenset({"drawn-sizes"}), ("fifty chunks",)
)  # fmt: skip
LARGER_CHUNKS = _when("with chunks above 100", lambda c: c.chunk_size > 100, "drawn-sizes", "chunks of 120")
TENTH_DOCUMENT = When(
    "from the tenth document on", lambda at: at.call is not None and at.document >= 9, frozenset({"drawn-sizes"}), ("twelve documents",)
)  # fmt: skip
SIZES = (LATE_ROWS, FORTY_CHUNKS, LARGER_CHUNKS, TENTH_DOCUMENT)
"""Sizes beyond those of fixed readings."""

IN_INFERENCE_MODE = _when(
    "in inference mode", lambda c: torch.is_inference_mode_enabled(), "ways-of-calling", "inference mode"
)
UNDER_AUTOCAST = _when(
    "under autocast", lambda c: torch.is_autocast_enabled("cpu"), "ways-of-calling", "autocast"
)
GRADIENT_IN_EVALUATION = _when(
    "with gradients in evaluation",
    lambda c: c.with_gradient and not c.training,
    "ways-of-calling",
    "gradients in evaluation",
)

ANYWHERE = (
    IN_TRAINING, WITH_GRADIENT, IN_EVALUATION, IN_A_BATCH, LATER_ROWS, UNEVEN, PADDED_LEFT, PACKED_IN_A_BATCH, MANY_CHUNKS, SIX_CHUNKS,
    LATE_DOCUMENTS, ODD_LENGTH, LARGE_CHUNKS, LATER_LAYER, LAST_LAYER, LATER_LAYER_TRAINING, IN_FLOAT32, WIDE, AFTER_LOADING,
)  # fmt: skip
"""Under which anything that shows in a call of whole rows can act."""

STREAMED = (
    WITH_CACHE, SHORT_PIECES, DECODING, LATER_CALLS, CACHE_AND_BATCH, AFTER_RESET, AFTER_CROP, AFTER_SELECT, AFTER_RESTORE,
    MANY_CHUNKS_STREAMED, LATER_LAYER_STREAMED,
)  # fmt: skip
"""Under which anything that shows in a stream can act."""

COARSE = (IN_BFLOAT16, BFLOAT16_TRAINING)
"""Under which only faults far above rounding are seen."""
