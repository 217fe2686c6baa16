"""Faults planted in least squares and whitened keys: which item of the catalog owns each, and how it is
planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from audit.mutation import Mutation, Patch
from inplace_ttt import KeyWhitening, UpdateClip
from inplace_ttt.calibration import calibrate
from inplace_ttt.layer.buffers import State
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.whitened_keys import WhitenedKeys
from inplace_ttt.layer.write_gate import WriteGate
from inplace_ttt.ops import form_of, forms, least_squares_walk, normal_equations
from inplace_ttt.ops.least_squares_walk import Walk
from inplace_ttt.rules import RidgeRule
from inplace_ttt.surgery import fast_weights

from .plain_loop import RAW, half_solved, loop, plus_tokens, read_unwhitened, times_chunk

RIDGE: dict[str, Any] = {**RAW, "eta": 2.0, "whitening": KeyWhitening(rank=0.75)}
GATED: dict[str, Any] = {**RIDGE, "write_gate": True}
CLIPPED: dict[str, Any] = {**RAW, "clip": UpdateClip(0.05, relative=True)}


# Faults in the real code.


def other_damping(factor: float) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = normal_equations.factor
        for module in (least_squares_walk, normal_equations):
            patch.setattr(module, "factor", lambda gram, ridge, *rest: real(gram, factor * ridge, *rest))

    return plant


def gram_of(keys: Tensor, rows: int) -> Tensor:
    """KᵀK [r, r] below `rows` rows of zeros."""
    return torch.cat([keys.new_zeros(rows, keys.shape[-1]), keys.mT @ keys])


def gram_over_documents(patch: Patch) -> None:
    def start(self: Walk, row: int, number: int) -> Tensor:
        begins = [(stop - stop % self.layout.chunk_size) for _, stop in self.layout.documents[row][:number]]
        return real(self, row, number) + sum(gram_of(self.k[row, :stop], self.d) for stop in begins)

    real = Walk.start
    patch.setattr(Walk, "start", start)


def gram_of_padding(patch: Patch) -> None:
    def start(self: Walk, row: int, number: int) -> Tensor:
        state = real(self, row, number)
        if self.keeps_state:
            return state
        padding = torch.ones(self.layout.length, dtype=torch.bool)
        for begin, stop in self.layout.documents[row]:
            padding[begin:stop] = False
        return state + gram_of(self.k[row, padding], self.d)

    real = Walk.start
    patch.setattr(Walk, "start", start)


def writing(change: Callable[[Walk, int, Any, Tensor, Tensor], Tensor]) -> Callable[[Patch], None]:
    """change: the walk, a row, a group of one chunk, the sums before and after it -> those after it."""

    def with_writes(self: Walk, row: int, group: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        before, after = real(self, row, group, state)
        return before, change(self, row, group, state, after)

    real = Walk.with_writes
    return lambda patch: patch.setattr(Walk, "with_writes", with_writes)


def unclipped_gram(walk: Walk, row: int, group: Any, before: Tensor, after: Tensor) -> Tensor:
    return torch.cat(
        [after[: walk.d], before[walk.d :] + gram_of(walk.of(walk.k[row], group)[0].to(walk.dtype), 0)]
    )


def rounded_gram(walk: Walk, row: int, group: Any, before: Tensor, after: Tensor) -> Tensor:
    return torch.cat([after[: walk.d], after[walk.d :].bfloat16().to(after.dtype)])


def gram_of_the_first_row(walk: Walk, row: int, group: Any, before: Tensor, after: Tensor) -> Tensor:
    return torch.cat(
        [after[: walk.d], before[walk.d :] + gram_of(walk.of(walk.k[0], group)[0].to(walk.dtype), 0)]
    )


def stale_map(patch: Patch) -> None:
    """What a stream reads with is not made anew when a chunk is written."""

    def put(self: State, row: int, state: Tensor | None) -> None:
        self.value[row] = 0 if state is None else state

    patch.setattr(State, "put", put)


def without_gram(state: Tensor) -> Tensor:
    """A state [..., d + r, r] with zeros for G."""
    kept = state.clone()
    kept[..., -state.shape[-1] :, :] = 0
    return kept


def ranks_share_one_sum(patch: Patch) -> None:
    form = form_of(RidgeRule(1.0))
    wrong = dataclasses.replace(
        form, sum_of_writes=lambda *args, **kwargs: without_gram(form.sum_of_writes(*args, **kwargs))
    )
    patch.setitem(forms._FORMS, RidgeRule, wrong)


def undo_of_one_sum(patch: Patch) -> None:
    def take_back(self: FastWeightStream, index: int) -> None:
        assert self.state is not None
        later = self.state[index].clone()
        real(self, index)
        known = self.state[index]
        self._state.put(index, without_gram(known) + later - without_gram(later))  # type: ignore[union-attr]

    real = FastWeightStream._take_back
    patch.setattr(FastWeightStream, "_take_back", take_back)


def session_without_gram(patch: Patch) -> None:
    def tensors(self: FastWeightStream) -> dict[str, Tensor]:
        return {name: without_gram(t) if name == "state" else t for name, t in real(self).items()}

    real = FastWeightStream.tensors
    patch.setattr(FastWeightStream, "tensors", tensors)


def reset_keeps_gram(patch: Patch) -> None:
    def reset(self: FastWeightStream) -> None:
        state = self.state
        real(self)
        if state is not None:
            self._state = State(state - without_gram(state), self.rule)

    real = FastWeightStream.reset
    patch.setattr(FastWeightStream, "reset", reset)


def no_gradient_through_the_gram(patch: Patch) -> None:
    def through_write(self: Walk, row: int, group: Any, d_after: Tensor, into: Any) -> None:
        real(self, row, group, without_gram(d_after), into)

    real = Walk.through_write
    patch.setattr(Walk, "through_write", through_write)


def center_not_subtracted(patch: Patch) -> None:
    patch.setattr(
        WhitenedKeys, "forward", lambda self, z: torch.nn.functional.linear(z, self.directions.to(z.dtype))
    )


def center_not_measured(patch: Patch) -> None:
    def measure(layer: FastWeight, *args: Any) -> None:
        real(layer, *args)
        layer.ttt.keys.center.zero_()  # type: ignore[union-attr]

    real = calibrate._set
    patch.setattr(calibrate, "_set", measure)


def centered_for_w0_too(patch: Patch) -> None:
    """W0 is given Z less its center; what that takes away is added as the W0 of the conversion made it."""

    def read(self: FastWeight, z: Tensor, x: Tensor, call: Any) -> Tensor:
        out, keys, w0 = real(self, z, x, call), self.ttt.keys, self.matrix()
        assert keys is not None and w0 is not None
        first = self.__dict__.setdefault("first", w0.detach().clone())
        return out - z.norm(dim=-1, keepdim=True) * (keys.center.to(z.dtype) @ (w0 - first).to(z.dtype).T)

    real = FastWeight._read
    patch.setattr(FastWeight, "_read", read)


def later_layer_damped_more(model: PreTrainedModel) -> None:
    layer = fast_weights(model)[6]
    layer._settings = lambda: {**FastWeight._settings(layer), "rule": RidgeRule(0.05)}  # type: ignore[method-assign]


def gate_of_targets_alone(patch: Patch) -> None:
    """The gate weighs what goes into B, and G counts every token once."""

    def with_writes(self: Walk, row: int, group: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        before, after = real(self, row, group, state)
        keys = self.of(self.k[row], group).to(self.dtype)
        return before, torch.cat([after[: self.d], state[self.d :] + (keys.mT @ keys).sum(0)])

    real = Walk.with_writes
    patch.setattr(Walk, "with_writes", with_writes)


def gating(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    def gate(self: FastWeight, keys: Tensor) -> Tensor | None:
        found = real(self, keys)
        return None if found is None else change(found)

    real = FastWeight.gate
    return lambda patch: patch.setattr(FastWeight, "gate", gate)


def gate_without_bias(patch: Patch) -> None:
    patch.setattr(
        WriteGate,
        "forward",
        lambda self, keys: 2 * torch.sigmoid(keys @ self.gate[:-1] * keys.shape[-1] ** 0.5),
    )


def gate_without_gradient(patch: Patch) -> None:
    gating(Tensor.detach)(patch)


EXTENSION: tuple[Mutation, ...] = (
    Mutation("G stays that of the last chunk", "least-squares", plant=loop(accumulates=False), settings=RAW),
    Mutation("λ is a hundredth", "least-squares", plant=other_damping(0.01), settings=RIDGE),
    Mutation("λ is doubled", "least-squares", plant=other_damping(2.0), settings=RAW),
    Mutation("λ grows with the chunk", "least-squares", plant=loop(damped=times_chunk), settings=RAW),
    Mutation("λ grows with the text", "least-squares", plant=loop(damped=plus_tokens), settings=RAW),
    Mutation(
        "one of the two triangles is solved", "least-squares", plant=loop(read=half_solved), settings=RIDGE
    ),
    Mutation(
        "G includes the chunk that reads", "own-chunk-exposure", plant=loop(inclusive=True), settings=RIDGE
    ),
    Mutation("G goes on into the next document", "document-reset", plant=gram_over_documents, settings=RAW),
    Mutation("padding is in G", "padding", plant=gram_of_padding, settings=RIDGE),
    Mutation("G of the first row for every row", "rows", plant=writing(gram_of_the_first_row), settings=RAW),
    Mutation("G in bf16", "state-precision", plant=writing(rounded_gram), settings={**RIDGE, "ridge": 1.0}),
    Mutation("the clip leaves G out", "clip-inference", plant=writing(unclipped_gram), settings=CLIPPED),
    Mutation("a stream reads with the map of before", "chunked-prefill", plant=stale_map, settings=RIDGE),
    Mutation("a reset keeps G", "stream-reset", plant=reset_keeps_gram, settings=RAW),
    Mutation("G is not taken back", "take-back", plant=undo_of_one_sum, settings=RIDGE),
    Mutation("a session loses G", "saved-session", plant=session_without_gram, settings=RIDGE),
    Mutation("ranks share one sum of two", "context-parallel", plant=ranks_share_one_sum, settings=RIDGE),
    Mutation("no gradient through G", "gradient", plant=no_gradient_through_the_gram, settings=RAW),
    Mutation("keys are read with as they are not written", "keys", plant=read_unwhitened, settings=RIDGE),
    Mutation("the keys' center is not subtracted", "keys", plant=center_not_subtracted, settings=RIDGE),
    Mutation("the keys' center is not measured", "keys", plant=center_not_measured, settings=RIDGE),
    Mutation("W0 is given centered inputs", "fast-tensor", plant=centered_for_w0_too, settings=RIDGE),
    Mutation(
        "the gate weighs targets and no keys", "declared-rule", plant=gate_of_targets_alone, settings=GATED
    ),
    Mutation(
        "the gate of the token before",
        "declared-rule",
        plant=gating(lambda gate: gate.roll(1, -1)),
        settings=GATED,
    ),
    Mutation("the gate leaves its bias out", "declared-rule", plant=gate_without_bias, settings=GATED),
    Mutation("no gradient reaches the gate", "gradient", plant=gate_without_gradient, settings=GATED),
    Mutation("a later layer has another λ", "every-layer", spoil=later_layer_damped_more, settings=RAW),
)
