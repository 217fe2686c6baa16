"""Probes of streams in pieces and single tokens, of the open (incomplete) chunk, and of resets (§3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..outcome import TOLERANCE, NotChecked, Outcome, judged, within
from .bench import Bench
from .target import zero_tap


def chunked_prefill(bench: Bench, expected: Any) -> Outcome:
    """Compares reads in an incomplete chunk after pieces that cross chunk edges with those in one call."""
    chunk = bench.chunk
    splits: dict[str, Sequence[int]] = {
        "a single piece": [3 * chunk - 1],
        "across one edge": [chunk - 3, chunk + 1, chunk + 1],
        "across two edges": [chunk - 2, 2 * chunk + 1],
    }
    return _split(bench, splits, "in pieces of several tokens")


def token_by_token(bench: Bench, expected: Any) -> Outcome:
    """Compares one token per call with one call."""
    if _writes_alone(bench) < TOLERANCE:
        raise NotChecked("tokens that are read alone do not write here, which `generated-tokens` reports")
    return _split(bench, {"one token per call": [1] * (3 * bench.chunk - 1)}, "token by token")


def _split(bench: Bench, splits: dict[str, Sequence[int]], how: str) -> Outcome:
    """Compares the reads of the last, incomplete chunk in pieces with those in one call.

    These reads depend on the writes of the earlier chunks alone, so they must be equal.
    """
    bench.refuse_unlawful()
    chunk = bench.chunk
    tokens = 3 * chunk - 1
    x, target = bench.tiled(tokens), bench.scale * bench.units(tokens)
    x[2 * chunk :] = bench.bank[1:chunk].flip(0)  # includes the last key, whose token completes a chunk
    with _own_token(bench):
        whole = bench.response(x, target)[2 * chunk :]
        off = {}
        for name, pieces in splits.items():
            off[name] = bench.size(bench.stream_response(x, target, list(pieces))[2 * chunk :] - whole)
    bad = f"{how} ({{name}}), outputs differ by {{off:.3g}} times one write's effect"
    return within(off, f"{how}, as in one call", bad)


def streaming_target(bench: Bench, expected: Any) -> Outcome:
    """Reads an impulse token by token, and compares the targets that it reaches with those in one call."""
    if _writes_alone(bench) < TOLERANCE:
        raise NotChecked("tokens that are read alone do not write here, which `generated-tokens` reports")
    chunk = bench.chunk
    target = bench.zeros(2 * chunk)
    target[chunk // 2] = bench.scale
    x = bench.tiled(2 * chunk)
    taps = 0.5 + torch.rand(
        bench.module.d, bench.kernel, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with bench.generator_of(taps, bench.identity()):
        whole = bench.decode(bench.tiled(chunk), bench.response(x, target)[chunk:])
        stream = bench.decode(bench.tiled(chunk), bench.stream_response(x, target, [1] * len(x))[chunk:])
    sizes = [torch.linalg.vector_norm(v, dim=-1) for v in (whole, stream)]
    # each response is divided by its size at the token itself, so only the shape counts
    whole_shape, stream_shape = (s / s[chunk // 2].clamp(min=1e-30) for s in sizes)
    off = float((whole_shape - stream_shape).abs().max())
    seen = [chunk // 2 - t for t, size in enumerate(stream_shape.tolist()) if size > 1e-3]
    ahead = max(seen, default=0)
    short = f"streaming, targets take in tokens up to t{ahead:+d} only"
    return within(
        {"difference of the targets": off},
        "targets take in the same tokens as in one call",
        short if ahead <= 0 else "streaming changes the target",
        more={"taps while streaming": sorted(seen)},
    )


def stream_reset(bench: Bench, expected: Any) -> Outcome:
    """Compares a stream that read another sequence and was reset with a new one."""
    chunk = bench.chunk
    stream = bench.module.stream()
    x, target = bench.tiled(3 * chunk - 2), bench.middle(3 * chunk - 2, 0, chunk)
    pieces = [chunk] * 2 + [chunk - 2]
    before = 2 * chunk + 5
    with bench.module.guarded():
        bench.stream(bench.tiled(before), bench.scale * bench.units(before), [chunk, chunk, 5], stream)
        stream.reset()
        after = bench.stream(x, target, pieces, stream)
    off = bench.size(after - bench.stream(x, target, pieces))
    return within(
        {"after a reset against fresh": off},
        "a reset leaves nothing of the sequence before",
        "after a reset, outputs differ by {off:.3g} times one write's effect",
    )


def generated_tokens(bench: Bench, expected: Any) -> Outcome:
    """Measures the write of tokens that are read one at a time, as in generation."""
    share = _writes_alone(bench)
    writes = share > TOLERANCE
    if not writes:
        refuse_blind_streams(bench)
    choice = bench.module.writes_generated
    numbers = {"write of tokens read alone": share}
    if choice is not None and choice != writes:
        meant = "write" if choice else "write nothing"
        found = f"tokens read alone are meant to {meant}, and do {'not ' * (not writes)}write"
        return judged(False, found, numbers, TOLERANCE)
    return Outcome("unspecified", f"generated tokens {'' if writes else 'do not '}write", numbers, TOLERANCE)


def refuse_blind_streams(bench: Bench) -> None:
    """Raises NotChecked if streams do not read their own writes. Nothing can be measured on them then."""
    if bench.stream_reads.tril(-1).abs().max() < TOLERANCE:
        raise NotChecked("streams do not read their own writes, which `chunked-prefill` reports")


def open_chunk(bench: Bench, expected: Any) -> Outcome:
    """Measures the reads of an incomplete chunk's first tokens by its later tokens."""
    chunk = bench.chunk
    tokens = 2 * chunk - 1
    x, target = bench.tiled(tokens), bench.zeros(tokens)
    target[chunk : chunk + 3] = bench.scale * bench.units(3)
    pieces = [chunk, *[1] * (chunk - 1)]
    early = bench.size(bench.stream_response(x, target, pieces)[chunk + 3 :])
    found = (
        "an incomplete chunk is not written"
        if early < TOLERANCE
        else f"a write of an incomplete chunk is read, with {early:.3g} times one write's effect"
    )
    return Outcome("unspecified", found, {"read before the chunk is complete": early}, TOLERANCE)


def _writes_alone(bench: Bench) -> float:
    """Returns the read by a later chunk of tokens that were read one at a time.

    The stream holds some tokens before them.
    """
    chunk = bench.chunk
    x, target = bench.tiled(2 * chunk), bench.middle(2 * chunk, 0)
    start = max(1, bench.margin)
    with _own_token(bench):
        return bench.size(bench.stream_response(x, target, [start, *[1] * (chunk - start), chunk])[chunk:])


def _own_token(bench: Bench) -> AbstractContextManager[None]:
    """Makes each target inside the context from its own token alone, without edges and look-ahead.

    The tap of the own token can be found only with keys that separate tokens. Without such keys the neutral
    generator is kept.
    """
    if not bench.tells_tokens_apart:
        return nullcontext()
    taps = torch.zeros(bench.module.d, bench.kernel)
    taps[:, zero_tap(bench)] = 1
    return bench.generator_of(taps, bench.identity())
