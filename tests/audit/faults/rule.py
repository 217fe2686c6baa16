"""The update rule as a plain loop under autograd, with parts of it replaced where a condition holds; and its
reads in a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from inplace_ttt.layer import fast_linear
from inplace_ttt.layer.buffers import State
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight as right_op
from inplace_ttt.ops import state_dtype
from inplace_ttt.ops.reference import clip_factor
from inplace_ttt.rules import PAPER_RULE, RidgeRule
from inplace_ttt.rules import Rule as UpdateRule

from .conditions import When
from .under_way import Patch, Place, now, pieces, with_row


@dataclass(eq=False)
class Step:
    """A chunk about to be read or written. memory: what a rule keeps of the document, of the stream's row in
    a stream.

    own, next: the deltas of this chunk and the one after it where one call has them, else None. beside: other
        rows' states here.
    """

    place: Place
    keys: Tensor
    values: Tensor | None
    eta: float
    memory: dict[str, Any]
    own: Tensor | None = None
    next: Tensor | None = None
    beside: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Rule:
    """Apply, then update, in parts that a fault may replace.

    read: step and state [d, h] -> what keys are read with. key: step -> keys that read. base: step -> factor
        of W0's product.
    delta: step -> what a chunk adds [d, h]; its keys and values are those of the step. write: step, state,
        delta -> the next state.
    start: the place of a document's first chunk and the state of the one before it -> its state. factor:
        delta and τ -> what clips it.
    looks_beside: whether it reads other rows' states.
    """

    read: Callable[[Step, Tensor], Tensor] = lambda at, state: state
    key: Callable[[Step], Tensor] = lambda at: at.keys
    base: Callable[[Step], float] = lambda at: 1.0
    delta: Callable[[Step], Tensor] = lambda at: at.values.T @ at.keys  # type: ignore[union-attr]
    write: Callable[[Step, Tensor, Tensor], Tensor] = lambda at, state, delta: state + delta
    start: Callable[[Place, Tensor], Tensor] = lambda at, before: torch.zeros_like(before)
    factor: Callable[[Tensor, Any], Tensor] = clip_factor
    looks_beside: bool = False


RIGHT = Rule()


def with_rule(make: Callable[[float], Rule]) -> Callable[[float, When], Callable[[Patch], None]]:
    """Plants the rule of a size where a condition holds, in calls of whole rows and in streams."""

    def of(size: float, when: When) -> Callable[[Patch], None]:
        return lambda patch: plant_rule(patch, make(size), when)

    return of


def plant_rule(patch: Patch, fault: Rule, when: When) -> None:
    def op(
        z: Tensor,
        v: Tensor,
        weight: Tensor | None,
        *,
        layout: ChunkLayout,
        rule: UpdateRule = PAPER_RULE,
        **rest: Any,
    ) -> Any:
        if isinstance(rule, RidgeRule) or not when.anywhere(layout):
            return right_op(z, v, weight, layout=layout, rule=rule, **rest)
        out, state = walk(fault, when, z, v, weight, layout=layout, **rest)
        return (out, state) if rest.get("return_state") else out

    def add_read(
        self: State, out: Tensor, z: Tensor, layer: Any, row: int | None = None, **how: bool
    ) -> None:
        call = now()
        if call is None or call.stream is None or isinstance(self.rule, RidgeRule):
            return real_read(self, out, z, layer, row, **how)
        for index, number in enumerate(range(len(z)) if row is None else [row]):
            here, keys = out[index : index + 1], z[index : index + 1]
            place = Place(call, number, 0, call.stream.rows[number].written)
            if not when.holds(place):
                with_row(number, lambda o=here, k=keys, r=number: real_read(self, o, k, layer, r, **how))
                continue
            beside = [s for i, s in enumerate(self.value) if i != number]
            step = Step(place, keys[0].to(self.value.dtype), None, layer.eta, _memory(place), beside=beside)
            product = fault.key(step) @ fault.read(step, self.value[number]).T
            here.mul_(fault.base(step)).add_((layer.eta * product)[None].to(out.dtype))
        return None

    real_read = State.add_read
    patch.setattr(fast_linear, "fast_weight", op)
    patch.setattr(State, "add_read", add_read)
    hand_in_states(patch, when)


def hand_in_states(patch: Patch, when: When) -> None:
    """A stream's write is given the state, for faults that change what is there already; by itself it adds to
    it afterwards."""

    def write(
        self: FastWeight, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> Any:
        if not when.anywhere(layout):
            return real(self, z, x, layout, state, reads=reads)
        v = self.ttt(x, layout).to(z.dtype)
        return fast_linear.fast_weight(
            z, v, None, layout=layout, initial_state=state, return_state=True, **self._settings()
        )

    real = FastWeight.write
    patch.setattr(FastWeight, "write", write)


def walk(
    rule: Rule, when: When, z: Tensor, v: Tensor, weight: Tensor | None, *, eta: float, layout: ChunkLayout,
    initial_state: Tensor | None = None, clip: Any = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [B, T, d] and the state [B, d, h] after each row's last document."""
    keys, values = (x.to(state_dtype(z.dtype)) for x in (z, v))
    rows: list[list[Any]] = [[] for _ in layout.documents]
    for piece in pieces(layout):
        rows[piece.index].append(piece)
    seen: list[dict[Any, Tensor]] = []
    if rule.looks_beside:
        seen = [
            _walk_row(RIGHT, when, keys[i], values[i], eta, clip, row, initial_state, i, [])[2]
            for i, row in enumerate(rows)
        ]
    outs, states, factors = [], [], []
    for i, row in enumerate(rows):
        others = [states_of for j, states_of in enumerate(seen) if j != i]
        out, factor, found = _walk_row(
            rule, when, keys[i], values[i], eta, clip, row, initial_state, i, others
        )
        outs.append(out)
        factors.append(factor)
        states.append(found["end"])
    out, factor = torch.stack(outs).to(z.dtype), torch.stack(factors).to(z.dtype)
    if weight is not None:
        out = out + linear(z, weight) * factor
    elif bool((factor != 1).any()) and (call := now()) is not None:
        # the product with W0 is made beside the op
        out = out + linear(z, call.layer.base_weight()) * (factor - 1)
    return out, torch.stack(states)


def _walk_row(
    rule: Rule, when: When, z: Tensor, v: Tensor, eta: float, clip: Any, row: list[Any], initial: Tensor | None, index: int,
    others: list[dict[Any, Tensor]],
) -> tuple[Tensor, Tensor, dict[Any, Tensor]]:  # fmt: skip
    """What one row reads [T, d], the factor of W0's product [T, 1], and its states by document and chunk."""
    zero = z.new_zeros(v.shape[-1], z.shape[-1])
    state, found, parts, done = zero if initial is None else initial[index], {}, [], 0
    factors = torch.ones(len(z), 1, dtype=z.dtype)
    memory: dict[str, Any] = {}
    for number, piece in enumerate(row):
        place = piece.place
        if number and place.document != row[number - 1].place.document:
            state, memory = (rule if when.holds(place) else RIGHT).start(place, state), {}
        if number == 0 and place.call is not None and place.call.stream is not None:
            memory = _memory(place)
        active = rule if when.holds(place) else RIGHT
        here = slice(piece.start, piece.stop)
        following = (
            row[number + 1]
            if number + 1 < len(row) and row[number + 1].place.document == place.document
            else None
        )
        step = Step(
            place, z[here], v[here], eta, memory, beside=[o[key] for o in others if (key := place[2:]) in o]
        )
        delta = active.factor(v[here].T @ z[here], clip) * active.delta(step) if piece.whole else None
        step.own = delta
        if following is not None and following.whole:
            later = slice(following.start, following.stop)
            step.next = v[later].T @ z[later]
        found[place[2:]] = state
        parts += [
            v.new_zeros(piece.start - done, v.shape[-1]),
            eta * active.key(step) @ active.read(step, state).T,
        ]
        factors[here] = active.base(step)
        done = piece.stop
        if delta is not None:
            state = active.write(step, state, delta)
    found["end"] = state
    return torch.cat([*parts, v.new_zeros(len(z) - done, v.shape[-1])]), factors, found


def _memory(place: Place) -> dict[str, Any]:
    """What a rule keeps for a row of a stream."""
    stream = None if place.call is None else place.call.stream
    if stream is None:
        return {}
    memory: dict[str, Any] = stream.__dict__.setdefault("memory", {}).setdefault(place.row, {})
    return memory
