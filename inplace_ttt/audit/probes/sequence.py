"""Probes of sequences: documents, padding, rows, ranks.

The paper's place is §3.4, Algorithm 1 lines 9 to 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from .bench import Bench, error
from .rule import follows


def document_reset(bench: Bench, expected: Any) -> Outcome:
    """Measures the reads of one packed document's writes in the next document."""
    chunk = bench.chunk
    lengths = [2 * chunk + 3, 2 * chunk]
    x, target = bench.same(sum(lengths)), bench.middle(sum(lengths), 0, chunk)
    effect = bench.response(x, target, documents=lengths)
    leaked = bench.size(effect[lengths[0] :])
    bench.yardstick(effect[: lengths[0]])
    found = (
        "a document starts from W0"
        if leaked < TOLERANCE
        else f"a document reads a write of the one before it, with {leaked:.3g} times its effect"
    )
    numbers = {"read of another document": leaked}
    if bench.module.ridge is not None:
        numbers["changed by another document's keys"] = kept = _keys_kept(bench)
        if leaked < TOLERANCE <= kept:
            return judged(False, "the Gram of a document goes on into the next one", numbers, TOLERANCE)
    return judged(leaked < TOLERANCE, found, numbers, TOLERANCE)


def _keys_kept(bench: Bench) -> float:
    """Returns the effect of a preceding document's keys on a document's reads of its own write.

    The preceding document has complete chunks and writes nothing.
    """
    x, target = bench.same(2 * bench.chunk), bench.middle(2 * bench.chunk, 0)
    packed = bench.response(
        torch.cat([x, x]), torch.cat([bench.zeros(len(x)), target]), documents=[len(x), len(x)]
    )
    return bench.size(packed[len(x) :] - bench.response(x, target))


def document_grid(bench: Bench, expected: Any) -> Outcome:
    """Compares a document alone with the same document packed after one that is too short to write."""
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
        "a packed document computes the same as alone"
        if off < TOLERANCE
        else (
            f"a packed document differs from the document alone by {off:.3g} times one write's effect: "
            "its chunks do not start with it"
        )
    )
    return judged(off < TOLERANCE, found, {"packed against alone": off}, TOLERANCE)


def padding(bench: Bench, expected: Any) -> Outcome:
    """Compares a row padded on the left or right with the row alone. The padding has targets too."""
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
        else f"a row {worst} differs by {off[worst]:.3g} times one write's effect"
    )
    return judged(off[worst] < TOLERANCE, found, off, TOLERANCE)


def rows(bench: Bench, expected: Any) -> Outcome:
    """Compares two rows that have different keys and targets with each row alone."""
    tokens = 2 * bench.chunk + 3
    # With ridge regression, the second row also has another matrix of key products than the first.
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
        else f"row {off.index(max(off))} differs from itself alone by {max(off):.3g} times one write's effect"
    )
    return judged(holds, found, {"row 0 against alone": off[0], "row 1 against alone": off[1]}, TOLERANCE)


def reset_keeps_training(bench: Bench, expected: Any) -> Outcome:
    """Changes W0, as training does, and reads a new document or resets a stream, with no write.

    The outputs must follow the new W0.
    """
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
    """Returns the outputs [C, d] of the second of two packed documents."""
    two = torch.cat([x, x])[None]
    return (
        bench.module.forward(two, torch.cat([none, none])[None], documents=[len(x), len(x)])[0, len(x) :]
        .double()
        .cpu()
    )


def _after_reset(bench: Bench, x: Tensor, none: Tensor) -> Tensor:
    """Returns the outputs [C, d] of a stream that read a sequence and was reset."""
    stream = bench.module.stream()
    stream(x[None], none[None])
    stream.reset()
    return stream(x[None], none[None])[0].double().cpu()


def context_parallel(bench: Bench, expected: Any) -> Outcome:
    """Runs Algorithm 1 over three ranks in one process, and compares it with one call.

    Its steps are each rank's sums, the sums of the ranks before it, and its reads.
    """
    bench.refuse_unlawful()
    x = bench.tiled(6 * bench.chunk)
    target = bench.middle(len(x), *range(0, len(x), bench.chunk))
    with torch.no_grad(), bench.module.guarded():
        ranks = bench.module.ranks(x[None], target[None], 3)[0].double().cpu()
        none = bench.module.ranks(x[None], 0 * target[None], 3)[0].double().cpu()
    off = error(ranks - none, bench.response(x, target))
    found = (
        "three ranks compute the same as one"
        if off < TOLERANCE
        else f"three ranks differ from one by {off:.3g} of all that is read"
    )
    return judged(
        off < TOLERANCE, found + " (emulated in one process)", {"three ranks against one": off}, TOLERANCE
    )
