"""Faults of streams and files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt import converted_class
from inplace_ttt.checkpoint import writing
from inplace_ttt.cli import convert as convert_verb
from inplace_ttt.layer import cache as cache_module
from inplace_ttt.layer.buffers import State
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.forward_context import ForwardContext
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout, Span

from .. import conditions as only
from .. import scenes
from ..conditions import When
from ..fault import Kind, owned
from ..files import layers_meant, session_saves
from ..planting import acts_in
from ..under_way import Patch, Place, now, place_in
from ..world import Spoil

Plant = Callable[[Patch], None]


def read_early(size: float, when: When) -> Plant:
    """What an open chunk holds when a call begins is read by that call."""

    def plant(patch: Patch) -> None:
        def advance(
            self: FastWeightStream, out: Tensor, z: Tensor, x: Tensor, spans: Any, layer: Any, **rest: Any
        ) -> Tensor:
            for index, row in enumerate(self.rows):
                if row.filled and self._open.held and acts_in(when, self, index):
                    keys, source = (buffer[index, : row.filled] for buffer in self._open.held)
                    layout = ChunkLayout.from_lengths([[row.filled]], self.chunk_size)
                    delta = layer.ttt(source[None], layout)[0].to(z.dtype).T @ keys
                    out[index] += size * layer.eta * z[index] @ delta.T
            return real(self, out, z, x, spans, layer, **rest)

        real = FastWeightStream.advance
        patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))

    return plant


def reset_keeps(size: float, when: When) -> Plant:
    """A reset leaves a share of the state."""

    def plant(patch: Patch) -> None:
        def reset(self: FastWeightStream) -> None:
            state, acts = self.state, when.holds(place_in(self))
            real(self)
            if acts and state is not None:
                self._state = State(size * state, self.rule)

        real = FastWeightStream.reset
        patch.setattr(FastWeightStream, "reset", reset)

    return plant


def write_stays(size: float, when: When) -> Plant:
    """A share of the write of a chunk that is reopened stays in the state."""

    def plant(patch: Patch) -> None:
        def take_back(self: FastWeightStream, index: int) -> None:
            acts = when.holds(place_in(self, index))
            assert self.state is not None and self._state is not None
            later = self.state[index].clone()
            real(self, index)
            if acts:
                self._state.put(index, self.state[index] + size * (later - self.state[index]))

        real = FastWeightStream._take_back
        patch.setattr(FastWeightStream, "_take_back", take_back)

    return plant


def pads_taken_in(tokens: float, when: When) -> Plant:
    """Some of the padding before a row's prompt is read into its stream."""

    def plant(patch: Patch) -> None:
        def spans(self: ForwardContext) -> list[Span]:
            right, call = real(self), now()
            if call is None:
                return right
            return [
                (max(0, start - int(tokens)), stop)
                if start > 0 and when.holds(Place(call, row))
                else (start, stop)
                for row, (start, stop) in enumerate(right)
            ]

        real = ForwardContext.spans
        patch.setattr(ForwardContext, "spans", spans)

    return plant


def tiled(size: float, when: When) -> Plant:
    """Repeated rows come one after the other in the fast weight, and beside each other in attention."""

    def plant(patch: Patch) -> None:
        def repeat(self: Any, repeats: int) -> None:
            acts = when.holds(place_in(self.fast_weight))
            rows = list(range(self.fast_weight.batch))
            super(cache_module.CarriesFastWeight, self).batch_repeat_interleave(repeats)
            self.fast_weight.select(rows * repeats if acts else [row for row in rows for _ in range(repeats)])

        patch.setattr(cache_module.CarriesFastWeight, "batch_repeat_interleave", repeat)

    return plant


def conv_starts_anew(size: float, when: When) -> Plant:
    """Loading gives conv other values, by a share: zeros, as a fresh conversion has them."""

    def plant(patch: Patch) -> None:
        def start(model: Any) -> None:
            real(model)
            with torch.no_grad():
                for layer in layers_meant(model, when):
                    if not layer.ttt.conv.is_meta:
                        layer.ttt.conv.mul_(1 - size)

        real = converted_class._start
        patch.setattr(converted_class, "_start", start)

    return plant


def write_baked_in(size: float, when: When) -> Spoil:
    """What is saved as W0 holds the last chunk that was read."""

    def spoil(model: Any) -> None:
        for layer in layers_meant(model, when):
            layer.ttt.register_forward_hook(
                lambda module, args, out, layer=layer: layer.__dict__.__setitem__("targets", out.detach())
            )
            layer.register_forward_pre_hook(
                lambda module, args: module.__dict__.__setitem__("inputs", args[0].detach())
            )
            layer.register_state_dict_post_hook(hook)

    def hook(layer: FastWeight, values: dict[str, Any], prefix: str, metadata: Any) -> None:
        z, v = layer.__dict__.get("inputs"), layer.__dict__.get("targets")
        if z is not None and v is not None and z.shape[:2] == v.shape[:2]:
            last = slice(-layer.chunk_size, None)
            values[prefix + "weight"] = values[prefix + "weight"] + size * layer.eta * (
                v[0, last].T @ z[0, last]
            ).to(layer.weight)  # type: ignore[arg-type]

    return spoil


def folder_starts(change: Callable[[TargetGenerator, float], None]) -> Callable[[float, When], Plant]:
    """The new tensors that go into a folder start otherwise than those of a conversion in memory."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            def reset(self: TargetGenerator, std: float, seed: int) -> None:
                real(self, std, seed)
                if under_way:
                    change(self, std)

            def initial(*args: Any) -> Any:
                under_way.append(True)
                try:
                    return real_initial(*args)
                finally:
                    under_way.pop()

            under_way: list[bool] = []
            real, real_initial = TargetGenerator.reset_parameters, writing.initial_tensors
            patch.setattr(TargetGenerator, "reset_parameters", torch.no_grad()(reset))
            for module in (writing, convert_verb, scenes):
                patch.setattr(module, "initial_tensors", initial)

        return plant

    return of


def dense(target: TargetGenerator, std: float) -> None:
    target.proj.normal_(0, std, generator=torch.Generator().manual_seed(0))


def nothing(target: TargetGenerator, std: float) -> None:
    target.proj.zero_()


def all_alike(target: TargetGenerator, std: float) -> None:
    target.proj.diagonal().copy_(
        torch.randn(len(target.proj), generator=torch.Generator().manual_seed(99)) * std
    )


IN_CALLS = (only.SHORT_PIECES, only.DECODING, only.CACHE_AND_BATCH, only.AFTER_RESET, only.AFTER_CROP, only.AFTER_RESTORE,
            only.LATER_LAYER_STREAMED, only.MANY_CHUNKS_STREAMED)  # fmt: skip
BETWEEN = (only.ALWAYS, only.LATER_LAYER, only.LAST_LAYER)
PADDED = (only.ALWAYS, only.LATER_LAYER, only.CACHE_AND_BATCH, only.LATER_ROWS)
FILE = "through-a-file"
KINDS: tuple[Kind, ...] = (
    Kind("an open chunk is read early", "stream", owned("open-chunk chunked-prefill token-by-token in-pieces"), read_early, (1.0, 0.3, 0.1),
         IN_CALLS, 4),
    Kind("a reset keeps some of the state", "stream", owned("stream-reset"), reset_keeps, (1.0, 0.3, 0.1), BETWEEN, 3, ("reset",)),
    Kind("a write that is taken back stays", "stream", owned("take-back take-back"), write_stays, (1.0, 0.3, 0.1), BETWEEN, 3,
         ("taken back",)),
    Kind("padding is read into the stream", "stream", owned("padding in-batches in-pieces"), pads_taken_in, (99, 2), PADDED, 3,
         ("padded stream",)),
    Kind("repeated rows are in another order", "stream", owned("take-back in-batches"), tiled, whens=BETWEEN, count=3,
         scenes=("chosen rows",)),
    Kind("conv comes back smaller", "save/load", owned(FILE), conv_starts_anew, (1.0, 0.3), BETWEEN, 3, ("checkpoint",)),
    Kind("a session loses a later layer's state", "save/load", owned(f"{FILE} saved-session"),
         session_saves(lambda stream, held, size: {n: (1 - size) * t if n == "state" else t for n, t in held.items()}), (1.0, 0.3, 0.1),
         (only.LATER_LAYER, only.LAST_LAYER), 3, ("session",)),
    Kind("a write is saved with W0", "save/load", owned(f"{FILE} state-place"), None, (1.0, 0.3), BETWEEN, 3, ("checkpoint",),
         spoil=write_baked_in),
    Kind("P of a folder starts dense", "save/load", owned(f"{FILE} start-projection"), folder_starts(dense), scenes=("converted folder",)),
    Kind("P of a folder starts at zero", "save/load", owned(f"{FILE} start-projection"), folder_starts(nothing),
         scenes=("converted folder",)),
    Kind("P of a folder starts alike", "save/load", owned(f"{FILE} start-projection"), folder_starts(all_alike),
         scenes=("converted folder",)),
)  # fmt: skip
