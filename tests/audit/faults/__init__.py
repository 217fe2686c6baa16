"""A generator of faults, for the audit's tests: kinds of deviation, each under conditions and in sizes, each
proved live.

under_way, conditions   when a fault acts
rule, planting          how it is put into the package
op, target, layouts, …  the kinds, by place
held_out/               a third of them, which nobody looks at who makes probes
fault, world, run       what a fault is, and the model or training run that it is planted in
scenes, liveness        the proof that it changes something, apart from the audit
caught, score           what the audit says of it: `python -m audit.faults.score`
"""

from __future__ import annotations

import functools
import itertools

from . import clips, data_rows, extensions, files, gradients, layouts, op, start, streams, target, ways
from .fault import Fault, Kind
from .held_out import data_rows as held_out_rows
from .held_out import rest as held_out_rest
from .held_out import rule as held_out_rule
from .held_out import streams as held_out_streams
from .held_out import target as held_out_target
from .held_out import ways as held_out_ways

_OPEN: tuple[tuple[Kind, ...], ...] = (
    op.KINDS, target.KINDS, layouts.KINDS, streams.KINDS, files.KINDS, start.KINDS, clips.KINDS, gradients.KINDS, extensions.KINDS,
    ways.KINDS,
)  # fmt: skip
_HELD_OUT = (
    held_out_rule.KINDS, held_out_target.KINDS, held_out_streams.KINDS, held_out_rest.KINDS, held_out_ways.KINDS,
)  # fmt: skip


@functools.cache
def open_faults() -> tuple[Fault, ...]:
    """Those that probes may be made for."""
    return (*_composed(_OPEN), *data_rows.faults())


@functools.cache
def held_out_faults() -> tuple[Fault, ...]:
    """Those that probes are judged by."""
    return (*_composed(_HELD_OUT), *held_out_rows.faults())


def _composed(kinds: tuple[tuple[Kind, ...], ...]) -> list[Fault]:
    return [fault for kind in itertools.chain.from_iterable(kinds) for fault in kind.faults()]
