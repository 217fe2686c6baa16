"""Probes of sequences: documents, padding, rows, ranks.

The paper's place is §3.4, Algorithm 1 lines 9 to 14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..outcome import TOLERANCE, NotChecked, Outcome, judged, within
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
    errors = {"read of another document": leaked}
    if bench.module.ridge is not None:
        errors["changed by another document's keys"] = _keys_kept(bench)
    bad = {
        "read of another document": "a document reads a write of the one before it, with {off:.3g} times its "
        "effect",
        "changed by another document's keys": "the Gram of a document goes on into the next one",
    }
    return within(errors, "a document starts from W0", bad)


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
    return within(
        {"packed against alone": bench.size(packed - alone)},
        "a packed document computes the same as alone",
        "a packed document differs from the document alone by {off:.3g} times one write's effect: "
        "its chunks do not start with it",
    )


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
    bad = "a row {name} differs by {off:.3g} times one write's effect"
    return within(off, "padding is in no chunk and writes nothing", bad)


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
    off = {f"row {row}": bench.size(together[row] - bench.run(inputs[row], targets[row])) for row in range(2)}
    bad = "{name} of two differs from itself alone by {off:.3g} times one write's effect"
    return within(off, "rows are independent", bad)


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
        off[name] = error(moved, wanted)
    bad = "{name}, another W0 than the trained one is read"
    return within(off, "a new document reads the trained W0", bad)


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
    return within(
        {"three ranks against one": off},
        "three ranks compute the same as one (emulated in one process)",
        "three ranks differ from one by {off:.3g} of all that is read (emulated in one process)",
    )
