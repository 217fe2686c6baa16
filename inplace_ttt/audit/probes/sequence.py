"""Probes of what a sequence is: documents, padding, rows, pieces of a stream, ranks (paper §3.4, Algorithm 1
lines 9-14)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from .bench import Bench, error
from .rule import follows
from .target import zero_tap


def document_reset(bench: Bench, expected: Any) -> Outcome:
    """Targets in the first of two packed documents: what the second one's tokens read of them."""
    chunk = bench.chunk
    lengths = [2 * chunk + 3, 2 * chunk]
    x, target = bench.same(sum(lengths)), bench.middle(sum(lengths), 0, chunk)
    effect = bench.response(x, target, documents=lengths)
    leaked = bench.size(effect[lengths[0] :])
    bench.yardstick(effect[: lengths[0]])
    found = (
        "a document starts from W0"
        if leaked < TOLERANCE
        else f"a document reads {leaked:.3g} of a write of the one before it"
    )
    numbers = {"read of another document": leaked}
    if bench.module.ridge is not None:
        numbers["changed by another document's keys"] = kept = _keys_kept(bench)
        if leaked < TOLERANCE <= kept:
            return judged(False, "the Gram of a document goes on into the next one", numbers, TOLERANCE)
    return judged(leaked < TOLERANCE, found, numbers, TOLERANCE)


def _keys_kept(bench: Bench) -> float:
    """What a document of whole chunks reads of its own write behind another one that writes nothing, against
    alone."""
    x, target = bench.same(2 * bench.chunk), bench.middle(2 * bench.chunk, 0)
    packed = bench.response(
        torch.cat([x, x]), torch.cat([bench.zeros(len(x)), target]), documents=[len(x), len(x)]
    )
    return bench.size(packed[len(x) :] - bench.response(x, target))


def document_grid(bench: Bench, expected: Any) -> Outcome:
    """The second of two packed documents against itself alone, behind one too short to write."""
    chunk = bench.chunk
    first, second = 5, 3 * chunk
    x, target = bench.same(second), bench.middle(second, 0, chunk)
    alone = bench.response(x, target)
    packed_x = torch.cat([bench.same(first), x])
    packed = bench.response(packed_x, torch.cat([bench.zeros(first), target]), documents=[first, second])[
        first:
    ]
    off = bench.size(packed - alone)
    found = (
        "a packed document computes what it computes alone"
        if off < TOLERANCE
        else (
            f"packed, a document differs from itself alone by {off:.3g} of a write: its chunks do not "
            "start with it"
        )
    )
    return judged(off < TOLERANCE, found, {"packed against alone": off}, TOLERANCE)


def padding(bench: Bench, expected: Any) -> Outcome:
    """A row padded at the left or right, with targets on the padding too, against the row alone."""
    chunk = bench.chunk
    tokens, pads = 3 * chunk - 2, chunk + 3
    x, target = bench.same(tokens), bench.middle(tokens, 0, chunk)
    alone = bench.run(x, target)
    junk_x, junk = bench.same(pads), bench.scale * bench.units(pads)
    mask = torch.arange(pads + tokens)[None]
    off = {}
    padded = bench.run(torch.cat([junk_x, x]), torch.cat([junk, target]), padding=mask < pads)[pads:]
    off["padded at the left"] = bench.size(padded - alone)
    padded = bench.run(torch.cat([x, junk_x]), torch.cat([target, junk]), padding=mask >= tokens)[:tokens]
    off["padded at the right"] = bench.size(padded - alone)
    worst = max(off, key=lambda name: off[name])
    found = (
        "padding is in no chunk and writes nothing"
        if off[worst] < TOLERANCE
        else f"a row {worst} differs by {off[worst]:.3g} of a write"
    )
    return judged(off[worst] < TOLERANCE, found, off, TOLERANCE)


def rows(bench: Bench, expected: Any) -> Outcome:
    """Two rows with different keys and targets, against each alone."""
    tokens = 2 * bench.chunk + 3
    # one with another Gram
    other = bench.tiled(tokens, start=5) if bench.module.ridge is None else bench.scattered(tokens)
    inputs = torch.stack([bench.tiled(tokens), other])
    targets = torch.stack([bench.middle(tokens, 0), bench.scale * bench.units(tokens)])
    try:
        together = bench.run_batch(inputs, targets)
    except NotChecked:
        raise
    except Exception as error:
        return judged(False, f"a batch of two rows raises {type(error).__name__}", {"rows": 2})
    off = [bench.size(together[row] - bench.run(inputs[row], targets[row])) for row in range(2)]
    holds = max(off) < TOLERANCE
    found = (
        "rows are independent"
        if holds
        else f"row {off.index(max(off))} of two differs from itself alone by {max(off):.3g} of a write"
    )
    return judged(holds, found, {"row 0 against alone": off[0], "row 1 against alone": off[1]}, TOLERANCE)


def chunked_prefill(bench: Bench, expected: Any) -> Outcome:
    """Pieces that cross chunk edges: what the open chunk reads, against one call."""
    chunk = bench.chunk
    splits: dict[str, Sequence[int]] = {
        "a single piece": [3 * chunk - 1],
        "across one edge": [chunk - 3, chunk + 1, chunk + 1],
        "across two edges": [chunk - 2, 2 * chunk + 1],
    }
    return _split(bench, splits, "in pieces of several tokens")


def token_by_token(bench: Bench, expected: Any) -> Outcome:
    """One token a call, against one call."""
    if _writes_alone(bench) < TOLERANCE:
        raise NotChecked("tokens that are read alone do not write here, which `generated-tokens` reports")
    return _split(bench, {"one token a call": [1] * (3 * bench.chunk - 1)}, "token by token")


def _split(bench: Bench, splits: dict[str, Sequence[int]], how: str) -> Outcome:
    """The last, open chunk reads what the chunks before it wrote: equal however they were read."""
    bench.refuse_unlawful()
    chunk = bench.chunk
    tokens = 3 * chunk - 1
    x, target = bench.tiled(tokens), bench.scale * bench.units(tokens)
    x[2 * chunk :] = bench.bank[1:chunk].flip(0)  # the chunk's last key, which completes it, is read too
    with _own_token(bench):
        whole = bench.response(x, target)[2 * chunk :]
        off = {}
        for name, pieces in splits.items():
            off[name] = bench.size(bench.stream_response(x, target, list(pieces))[2 * chunk :] - whole)
    worst = max(off, key=lambda name: off[name])
    found = (
        f"{how}, as in one call"
        if off[worst] < TOLERANCE
        else f"{how} ({worst}), outputs differ by {off[worst]:.3g} of a write"
    )
    return judged(off[worst] < TOLERANCE, found, off, TOLERANCE)


def streaming_target(bench: Bench, expected: Any) -> Outcome:
    """An impulse read token by token: which tokens' targets take it in, against one call."""
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
    # Each by its own size at the token itself, so that only the shape counts.
    whole_shape, stream_shape = (s / s[chunk // 2].clamp(min=1e-30) for s in sizes)
    off = float((whole_shape - stream_shape).abs().max())
    seen = [chunk // 2 - t for t, size in enumerate(stream_shape.tolist()) if size > 1e-3]
    ahead = max(seen, default=0)
    found = (
        "targets take in the same tokens as in one call"
        if off < TOLERANCE
        else (
            f"streaming, targets take in tokens up to t{ahead:+d} only"
            if ahead <= 0
            else "streaming changes the target"
        )
    )
    return judged(
        off < TOLERANCE,
        found,
        {"difference of the targets": off, "taps while streaming": sorted(seen)},
        TOLERANCE,
    )


def stream_reset(bench: Bench, expected: Any) -> Outcome:
    """A stream that read another sequence and was reset, against a fresh one."""
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
    found = (
        "a reset leaves nothing of the sequence before"
        if off < TOLERANCE
        else f"after a reset, outputs differ by {off:.3g} of a write"
    )
    return judged(off < TOLERANCE, found, {"after a reset against fresh": off}, TOLERANCE)


def generated_tokens(bench: Bench, expected: Any) -> Outcome:
    """Whether tokens that are read one at a time, as in generation, are written."""
    share = _writes_alone(bench)
    writes = share > TOLERANCE
    if not writes:
        refuse_blind_streams(bench)
    choice = bench.module.writes_generated
    numbers = {"write of tokens read alone": share}
    if choice is not None and choice != writes:
        meant = "write" if choice else "write nothing"
        return judged(
            False,
            f"tokens read alone are meant to {meant}, and do {'not ' * (not writes)}write",
            numbers,
            TOLERANCE,
        )
    return Outcome(
        "unspecified",
        "generated tokens write" if writes else "generated tokens do not write",
        numbers,
        TOLERANCE,
    )


def refuse_blind_streams(bench: Bench) -> None:
    """A stream must read what was written to it, for other things to be held against it."""
    if bench.stream_reads.tril(-1).abs().max() < TOLERANCE:
        raise NotChecked("no stream reads what was written to it, which `chunked-prefill` reports")


def open_chunk(bench: Bench, expected: Any) -> Outcome:
    """Whether later tokens of a chunk that is not complete read its earlier ones."""
    chunk = bench.chunk
    tokens = 2 * chunk - 1
    x, target = bench.tiled(tokens), bench.zeros(tokens)
    target[chunk : chunk + 3] = bench.scale * bench.units(3)
    pieces = [chunk, *[1] * (chunk - 1)]
    early = bench.size(bench.stream_response(x, target, pieces)[chunk + 3 :])
    found = (
        "an incomplete chunk is not written"
        if early < TOLERANCE
        else f"an incomplete chunk is read early ({early:.3g} of a write)"
    )
    return Outcome("unspecified", found, {"read before the chunk is complete": early}, TOLERANCE)


def reset_keeps_training(bench: Bench, expected: Any) -> Outcome:
    """Another W0, as training leaves it, then a new document or a reset, nothing written: the new W0 must be
    the one in use."""
    module, chunk = bench.module, bench.chunk
    x, none = bench.tiled(chunk), bench.zeros(chunk)
    change = bench.random(*module.fast_weight.shape)
    wanted = module.features(x).detach().double().cpu() @ change.T
    ways = {"at a document boundary": _after_boundary, "after a reset of a stream": _after_reset}
    before, off, reasons = {}, {}, []
    for name, read in ways.items():
        try:
            with torch.no_grad(), module.guarded():
                before[name] = read(bench, x, none)
        except NotChecked as reason:
            reasons.append(str(reason))
    if not before:
        raise NotChecked("; ".join(reasons))
    if follows(bench) >= TOLERANCE:
        raise NotChecked("the outputs do not follow W0 at all, which `fast-tensor` reports")
    for name in before:
        with torch.no_grad(), module.guarded():
            module.fast_weight.add_(change.to(module.fast_weight))
            moved = ways[name](bench, x, none) - before[name]
        off[name] = float(torch.linalg.vector_norm(moved - wanted) / torch.linalg.vector_norm(wanted))
    worst = max(off, key=lambda name: off[name])
    found = (
        "a new document reads the trained W0"
        if off[worst] < TOLERANCE
        else f"{worst}, another W0 than the trained one is read"
    )
    return judged(
        off[worst] < TOLERANCE, found, {f"error {name}": error for name, error in off.items()}, TOLERANCE
    )


def _after_boundary(bench: Bench, x: Tensor, none: Tensor) -> Tensor:
    """Outputs [C, d] of the second of two packed documents."""
    two = torch.cat([x, x])[None]
    return (
        bench.module.forward(two, torch.cat([none, none])[None], documents=[len(x), len(x)])[0, len(x) :]
        .double()
        .cpu()
    )


def _after_reset(bench: Bench, x: Tensor, none: Tensor) -> Tensor:
    """Outputs [C, d] of a stream that read a sequence and was reset."""
    stream = bench.module.stream()
    stream(x[None], none[None])
    stream.reset()
    return stream(x[None], none[None])[0].double().cpu()


def context_parallel(bench: Bench, expected: Any) -> Outcome:
    """Algorithm 1 over three ranks in one process: own sums, sums of those before, reads; against one
    call."""
    bench.refuse_unlawful()
    x = bench.tiled(6 * bench.chunk)
    target = bench.middle(len(x), *range(0, len(x), bench.chunk))
    with torch.no_grad(), bench.module.guarded():
        ranks = bench.module.ranks(x[None], target[None], 3)[0].double().cpu()
        none = bench.module.ranks(x[None], 0 * target[None], 3)[0].double().cpu()
    off = error(ranks - none, bench.response(x, target))
    found = (
        "three ranks compute what one does"
        if off < TOLERANCE
        else f"three ranks differ from one by {off:.3g} of all that is read"
    )
    return judged(
        off < TOLERANCE, found + " (emulated in one process)", {"three ranks against one": off}, TOLERANCE
    )


def _writes_alone(bench: Bench) -> float:
    """What a later chunk reads of tokens that were read one at a time into a stream that holds some
    already."""
    chunk = bench.chunk
    x, target = bench.tiled(2 * chunk), bench.middle(2 * chunk, 0)
    start = max(1, bench.margin)
    with _own_token(bench):
        return bench.size(bench.stream_response(x, target, [start, *[1] * (chunk - start), chunk])[chunk:])


def _own_token(bench: Bench) -> AbstractContextManager[None]:
    """Within it a target is made from its own token alone, so that neither edges nor look-ahead play a part.

    Which tap that is takes keys that tell tokens apart; without them the neutral generator stays.
    """
    if not bench.tells_tokens_apart:
        return nullcontext()
    taps = torch.zeros(bench.module.d, bench.kernel)
    taps[:, zero_tap(bench)] = 1
    return bench.generator_of(taps, bench.identity())
