"""Faults of what is written to disk and read back: checkpoints, adapters, the reference format, sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from inplace_ttt.checkpoint import adapter, opened, reference_format
from inplace_ttt.config import InPlaceTTTConfig
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.surgery import fast_weights

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .op import rounded
from .under_way import Patch, place_in
from .world import Spoil

Plant = Callable[[Patch], None]
FILE, SESSION = "through-a-file", "through-a-file saved-session"


def saved_otherwise(name: str, change: Callable[[Tensor, float], Tensor]) -> Callable[[float, When], Spoil]:
    """A layer's tensor goes into the state dict otherwise than it is; in all TTT layers, or the one that the
    condition is about."""

    def of(size: float, when: When) -> Spoil:
        def spoil(model: Any) -> None:
            for layer in layers_meant(model, when):
                layer.ttt.register_state_dict_post_hook(hook)

        def hook(module: TargetGenerator, values: dict[str, Any], prefix: str, metadata: Any) -> None:
            values[prefix + name] = change(values[prefix + name], size).contiguous()

        return spoil

    return of


def layers_meant(model: Any, when: When) -> list[FastWeight]:
    layers = list(fast_weights(model).values())
    return layers if when is only.ALWAYS else layers[1:2] if when is only.LATER_LAYER else layers[-1:]


def config_forgets(name: str, value: Any) -> Callable[[float, When], Plant]:
    """A setting is not among those that are saved."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            real = InPlaceTTTConfig.to_dict
            patch.setattr(InPlaceTTTConfig, "to_dict", lambda self: {**real(self), name: value})

        return plant

    return of


def layers_exchanged(size: float, when: When) -> Plant:
    """An adapter's tensors come back in another order of layers."""

    def plant(patch: Patch) -> None:
        def read(path: Any) -> Any:
            config, base, tensors = real(path)
            return config, base, dict(zip(tensors, [*tensors.values()][::-1], strict=True))

        real = adapter.read_adapter
        patch.setattr(opened, "read_adapter", read)

    return plant


def reference_format_otherwise(
    kind: str, change: Callable[[Tensor], Tensor]
) -> Callable[[float, When], Plant]:
    """A tensor comes into the reference format, or out of it, otherwise than it is."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            def tensors_of(*args: Any) -> dict[str, Tensor]:
                return {
                    name: change(t).contiguous() if name == kind else t for name, t in real(*args).items()
                }

            real = reference_format._tensors_of
            patch.setattr(reference_format, "_tensors_of", tensors_of)

        return plant

    return of


def reference_format_rate(factor: float, when: When) -> Plant:
    """The rate is written in another unit."""

    def plant(patch: Patch) -> None:
        real = reference_format.reference_format_keys
        patch.setattr(
            reference_format,
            "reference_format_keys",
            lambda config: {**real(config), "ttt_lr": factor * config.eta},
        )

    return plant


def session_saves(
    change: Callable[[FastWeightStream, dict[str, Tensor], float], dict[str, Tensor]],
) -> Callable[[float, When], Plant]:
    """What a stream gives to be saved is changed where the condition holds."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            def tensors(self: FastWeightStream) -> dict[str, Tensor]:
                held = real(self)
                return (
                    {n: t.contiguous() for n, t in change(self, held, size).items()}
                    if when.holds(place_in(self))
                    else held
                )

            real = FastWeightStream.tensors
            patch.setattr(FastWeightStream, "tensors", tensors)

        return plant

    return of


def without_open_chunk(stream: FastWeightStream, held: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    return {name: t * (1 - size) if name == "z" else t for name, t in held.items()}


def rounded_state(stream: FastWeightStream, held: dict[str, Tensor], bits: float) -> dict[str, Tensor]:
    return {name: rounded(t, bits) if name == "state" else t for name, t in held.items()}


def rows_exchanged(stream: FastWeightStream, held: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    return {name: t.flip(0) if name == "state" else t for name, t in held.items()}


def open_rows_exchanged(stream: FastWeightStream, held: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    return {name: t.flip(0) if name in ("z", "x") else t for name, t in held.items()}


def restored_late(size: float, when: When) -> Plant:
    """A loaded session stands some tokens further back in its open chunk."""

    def plant(patch: Patch) -> None:
        def restore(cls: type[FastWeightStream], *args: Any, **kwargs: Any) -> FastWeightStream:
            stream = real(cls, *args, **kwargs)
            stream.rows = [
                dataclasses.replace(row, filled=max(0, row.filled - int(size))) for row in stream.rows
            ]
            return stream

        real = FastWeightStream.restore.__func__  # type: ignore[attr-defined]
        patch.setattr(FastWeightStream, "restore", classmethod(restore))

    return plant


BETWEEN = (only.ALWAYS, only.LATER_LAYER, only.LAST_LAYER)
CHECKPOINT, SAVED = ("checkpoint",), ("session",)
ETA = {"settings": {"eta": 2.0}}
KINDS: tuple[Kind, ...] = (
    Kind("P is saved smaller", "save/load", owned(FILE), spoil=saved_otherwise("proj", lambda t, size: (1 - size) * t),
         sizes=(1.0, 0.3, 0.1), whens=BETWEEN, count=3, scenes=CHECKPOINT),
    Kind("P is saved transposed", "save/load", owned(f"{FILE} projection-untransposed"), spoil=saved_otherwise("proj", lambda t, _: t.mT),
         whens=BETWEEN, count=2, scenes=CHECKPOINT),
    Kind("P is saved with few bits", "save/load", owned(FILE), spoil=saved_otherwise("proj", rounded), sizes=(2, 4, 7), whens=BETWEEN,
         count=3, scenes=CHECKPOINT),
    Kind("conv is saved with few bits", "save/load", owned(FILE), spoil=saved_otherwise("conv", rounded), sizes=(2, 4, 7), whens=BETWEEN,
         count=3, scenes=CHECKPOINT),
    Kind("η is not saved", "save/load", owned(f"{FILE} eta"), config_forgets("eta", 1.0), scenes=CHECKPOINT, world=ETA),
    Kind("the chunk size is not saved", "save/load", owned(f"{FILE} chunk-size"), config_forgets("chunk_size", 512), scenes=CHECKPOINT),
    Kind("the convolution's side is not saved", "save/load", owned(f"{FILE} conv-lookahead"), config_forgets("conv", "causal"),
         scenes=CHECKPOINT),
    Kind("the target's source is not saved", "save/load", owned(f"{FILE} target-source"), config_forgets("target", "hidden_states"),
         scenes=CHECKPOINT),
    Kind("an adapter's layers are exchanged", "save/load", owned(FILE), layers_exchanged, scenes=("adapter",)),
    Kind("the reference format has taps reversed", "save/load", owned(FILE), reference_format_otherwise("conv", lambda t: t.flip(-1)),
         scenes=("reference format",)),
    Kind("the reference format has P transposed", "save/load", owned(FILE), reference_format_otherwise("proj", lambda t: t.mT), scenes=("reference format",)),
    Kind("the reference format has another rate", "save/load", owned(FILE), reference_format_rate, (2.0, 0.1), count=2, scenes=("reference format",)),
    Kind("a session loses its open chunk", "save/load", owned(SESSION), session_saves(without_open_chunk), (1.0, 0.3), BETWEEN, 3,
         scenes=SAVED),
    Kind("a session's state has few bits", "save/load", owned(SESSION), session_saves(rounded_state), (2, 3), BETWEEN, 3, scenes=SAVED),
    Kind("a session's rows are exchanged", "save/load", owned(f"{SESSION} in-batches"), session_saves(rows_exchanged), whens=BETWEEN,
         count=3, scenes=SAVED),
    Kind("a session's open chunks are exchanged", "save/load", owned(f"{SESSION} in-batches"), session_saves(open_rows_exchanged),
         whens=BETWEEN, count=2, scenes=SAVED),
    Kind("a session comes back behind its place", "save/load", owned(SESSION), restored_late, (1, 3), count=2, scenes=SAVED),
)  # fmt: skip
