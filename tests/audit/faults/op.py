"""Faults of the rule itself: what is written, how large, what is read of it, and by whom."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout

from . import conditions as only
from .fault import Kind, owned
from .planting import Target, mixed, with_inputs, with_target
from .rule import Rule, Step, with_rule

SIZES = (1.0, 0.3, 0.1)
WRITES = (*only.ANYWHERE, *only.STREAMED)
"""Conditions for what a chunk writes, which shows however it is read."""
FIRST = (
    only.IN_TRAINING, only.IN_A_BATCH, only.UNEVEN, only.PADDED_LEFT, only.LATE_DOCUMENTS, only.ODD_LENGTH, only.LAST_LAYER,
    only.WITH_CACHE, only.SHORT_PIECES, only.CACHE_AND_BATCH, only.AFTER_RESET,
)  # fmt: skip
"""Conditions that can hold in a document's first chunk."""


def inclusive(size: float) -> Rule:
    return Rule(read=lambda at, state: state if at.own is None else state + size * at.own)


def momentum(size: float) -> Rule:
    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        at.memory["speed"] = speed = delta + size * at.memory.get("speed", torch.zeros_like(delta))
        return state + speed

    return Rule(write=write)


def mean(size: float) -> Rule:
    """Size 1 divides a write by its tokens, less by a power of their number."""
    return Rule(write=lambda at, state, delta: state + delta / len(at.keys) ** size)


def minus(size: float) -> Rule:
    return Rule(write=lambda at, state, delta: state + (1 - 2 * size) * delta)


def first_write_lost(size: float) -> Rule:
    return Rule(write=lambda at, state, delta: state + (1 - size * (at.place.chunk == 0)) * delta)


def ramp(size: float) -> Rule:
    def delta(at: Step) -> Tensor:
        assert at.values is not None
        weights = 1 + size * torch.linspace(-1, 1, len(at.keys), dtype=at.keys.dtype)
        return (at.values * weights[:, None]).T @ at.keys

    return Rule(delta=delta)


def left_out(which: int) -> Rule:
    """One token of each chunk is in no write."""

    def delta(at: Step) -> Tensor:
        assert at.values is not None
        kept = torch.arange(len(at.keys)) != which % len(at.keys)
        return at.values[kept].T @ at.keys[kept]

    return Rule(delta=delta)


def damped_direction(size: float) -> Rule:
    """Of a write's largest direction, all but a share is taken away."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(delta.detach(), full_matrices=False)
        return state + delta - size * s[0] * torch.outer(u[:, 0], vh[0])

    return Rule(write=write)


def corrected(size: float) -> Rule:
    """Targets less what the state answers already, by a normalized step, as error-correcting rules have
    it."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        return state + delta - size * (state @ at.keys.T) @ at.keys / at.keys.square().sum().clamp(min=1e-12)

    return Rule(write=write)


def rounded(state: Tensor, bits: float) -> Tensor:
    """To so many bits of mantissa, as a narrower format would."""
    mantissa, exponent = torch.frexp(state.detach())
    return state + (torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent) - state).detach()


def rounded_state(bits: float) -> Rule:
    return Rule(write=lambda at, state, delta: rounded(state + delta, bits))


def rounded_keys(bits: float) -> Rule:
    return Rule(delta=lambda at: at.values.T @ rounded(at.keys, bits))  # type: ignore[union-attr]


def wrong_eta(size: float) -> Rule:
    return Rule(read=lambda at, state: (1 - size) * state)


def rising_eta(size: float) -> Rule:
    return Rule(write=lambda at, state, delta: state + (1 + size * at.place.chunk) * delta)


def neighbor(size: float) -> Rule:
    return Rule(
        read=lambda at, state: state + size * (at.beside[0] - state) if at.beside else state,
        looks_beside=True,
    )


def shared_mean(size: float) -> Rule:
    def read(at: Step, state: Tensor) -> Tensor:
        return state + size * (torch.stack([state, *at.beside]).mean(0) - state)

    return Rule(read=read, looks_beside=True)


def newest_only(count: float) -> Rule:
    """A write is forgotten once so many others came after it."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        kept = at.memory.setdefault("deltas", [])
        kept.append(delta)
        return state + delta - (kept.pop(0) if len(kept) > count else 0)

    return Rule(write=write)


def normalized_reader(size: float) -> Rule:
    """Keys of norm n read as if it were n to the power of 1 - size."""

    def key(at: Step) -> Tensor:
        return at.keys / at.keys.norm(dim=-1, keepdim=True).clamp(min=1e-6) ** size

    return Rule(key=key)


def alternate(size: float) -> Rule:
    return Rule(write=lambda at, state, delta: state + (1 - size * (at.place.chunk % 2)) * delta)


def apart(size: float) -> Target:
    """Keys stand a token behind the targets they are written with."""

    def targets(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        ids = layout.chunk_ids()
        inside = torch.nn.functional.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
        return torch.where(inside[..., None], right.roll(1, 1), 0)

    return mixed(targets)(size)


def dropped(share: float) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]:
    def change(z: Tensor, v: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        kept = torch.rand(v.shape, generator=torch.Generator().manual_seed(0)) >= share
        return z, v * kept.to(v) / (1 - share), weight

    return change


ROWS = (only.IN_A_BATCH, only.UNEVEN, only.PADDED_LEFT, only.LATER_ROWS)
OWN = tuple(when for when in only.ANYWHERE if when.name not in ("in evaluation", "in float32"))
SUM, NORM = "plain-sum", "no-normalization"

KINDS: tuple[Kind, ...] = (
    Kind("inclusive sum", "op", owned("exclusive-sum own-chunk-exposure"), with_rule(inclusive), SIZES, OWN, 6),
    Kind("inclusive sum", "op", owned("exclusive-sum own-chunk-exposure"), with_rule(inclusive), whens=only.COARSE, count=2),
    Kind("momentum", "op", owned(SUM), with_rule(momentum), (0.9, 0.3, 0.1), WRITES, 4),
    Kind("a mean in place of the sum", "op", owned("loss-sum eta"), with_rule(mean), (1.0, 0.5), WRITES, 4),
    Kind("minus sign", "op", owned("sign"), with_rule(minus), (1.0,), WRITES, 4),
    Kind("a document's first write is lost", "op", owned(f"{SUM} writes"), with_rule(first_write_lost), SIZES, FIRST, 3),
    Kind("tokens count more towards a chunk's end", "op", owned(f"loss-sum {NORM}"), with_rule(ramp), SIZES, (only.ALWAYS, *WRITES), 4),
    Kind("a chunk's last token is not in its write", "op", owned("loss-sum"), with_rule(lambda s: left_out(-1)), whens=WRITES, count=3),
    Kind("a chunk's first token is not in its write", "op", owned("loss-sum"), with_rule(lambda s: left_out(0)), whens=WRITES, count=3),
    Kind(
        "a write's largest direction is damped", "op", owned(f"{NORM} loss-sum"), with_rule(damped_direction), SIZES,
        (only.ALWAYS, *WRITES), 3,
    ),
    Kind("writes correct what is read already", "op", owned(SUM), with_rule(corrected), (1.0, 0.5, 0.3), WRITES, 4),
    Kind(
        "the state keeps few bits", "op", owned(f"state-precision {SUM}"), with_rule(rounded_state), (1, 2, 3),
        (only.ALWAYS, *WRITES), 5,
    ),
    Kind(
        "the state keeps few bits", "op", owned(f"state-precision {SUM}"), with_rule(rounded_state), (4, 7), (only.IN_BFLOAT16,), 2,
        ("half precision",),
    ),
    Kind("keys of few bits are written", "op", owned(f"keys state-precision {NORM}"), with_rule(rounded_keys), (1, 2, 3), WRITES, 3),
    Kind("η is too small", "op", owned("eta loss-sum"), with_rule(wrong_eta), (0.5, 0.3, 0.1), WRITES, 6),
    Kind("η is too small", "op", owned("eta loss-sum"), with_rule(wrong_eta), (1.0, 0.8), only.COARSE, 3),
    Kind("a row reads its neighbor's state", "op", owned("rows in-batches"), with_rule(neighbor), SIZES, ROWS, 3, ("batch",)),
    Kind(
        "rows read the mean of their states", "op", owned("rows in-batches"), with_rule(shared_mean), SIZES,
        (only.IN_A_BATCH, only.UNEVEN, only.LATER_LAYER), 3, ("batch",),
    ),
    Kind(
        "the state is absent", "op", owned("writes"), with_rule(wrong_eta), SIZES,
        (only.LATER_ROWS, only.PADDED_LEFT, only.UNEVEN, only.PACKED_IN_A_BATCH, only.LATER_CALLS), 3,
    ),
    Kind(
        "the oldest writes are forgotten", "op", owned(f"{SUM} over-many-chunks"), with_rule(newest_only), (5, 6, 8, 10),
        (only.ALWAYS, only.IN_TRAINING, only.WITH_CACHE, only.LATER_LAYER), 4, ("long", "long stream", "long training"),
    ),
    Kind("writes grow with the text", "op", owned(f"{SUM} loss-sum"), with_rule(rising_eta), (0.3, 0.1, 0.05), WRITES, 3),
    Kind(
        "targets are dropped at random", "op", owned("loss-sum gradient"), with_inputs(dropped), (0.5, 0.3, 0.1),
        (only.IN_TRAINING, only.WITH_GRADIENT, only.LATER_LAYER_TRAINING), 3, ("training",),
    ),
    Kind("keys that read are normalized", "op", owned(f"keys {NORM} fast-tensor"), with_rule(normalized_reader), (1.0, 0.3), WRITES, 3),
    Kind(
        "every other chunk is not written", "op", owned(f"{SUM} writes"), with_rule(alternate), SIZES,
        (only.IN_TRAINING, only.WITH_GRADIENT, only.MANY_CHUNKS, only.LAST_LAYER, only.WITH_CACHE, only.IN_FLOAT32, only.SIX_CHUNKS), 3,
    ),
    Kind(
        "keys and targets stand a token apart", "op", owned("conv-lookahead conv-size streaming-target"), with_target(apart), SIZES,
        WRITES, 3,
    ),
)  # fmt: skip
