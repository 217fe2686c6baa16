"""Probes of the update rule's order, sign, sum and accumulation (paper §3.1, §3.2, §3.4, Algorithm 1)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ...layer.overrides import overriding
from ..outcome import TOLERANCE, NotChecked, Outcome, judged, within
from .bench import CHUNKS, Bench, error, measured_chunk

_LARGE_CHUNK = 20_000
"""Largest chunk size, in tokens, at which a chunk of the real size is built."""


def writes(bench: Bench, expected: Any) -> Outcome:
    """Measures the effect of a chunk's targets on the outputs of the next chunk."""
    x, target = bench.tiled(2 * bench.chunk), bench.middle(2 * bench.chunk, 0)
    outputs = torch.linalg.vector_norm(bench.run(x, bench.zeros(len(x)))[bench.chunk :])
    size = float(torch.linalg.vector_norm(bench.response(x, target)[bench.chunk :]) / outputs)
    found = "a chunk's write is read by the next chunk"
    found = found if size > 0 else "no write is ever read: TTT does nothing"
    return judged(size > 0, found, {"change of the next chunk's outputs, by strong targets": size})


def fast_tensor(bench: Bench, expected: Any) -> Outcome:
    """Changes W0 and compares the first chunk's outputs, its bias included, with the expected change.

    It also reads one write with other keys, which tests if reads are linear in the keys.
    """
    module, x = bench.module, bench.tiled(bench.chunk)
    errors = {"error of following W0": follows(bench)}
    if (bias := module.bias) is not None:
        w0, shift = (tensor.detach().double().cpu() for tensor in (module.fast_weight, bias))
        wanted = module.features(x).detach().double().cpu() @ w0.T + shift
        errors["error of W0 Z + bias"] = error(bench.run(x, bench.zeros(len(x))), wanted)
    other = bench.bank[torch.randperm(len(x), generator=bench.generator)]
    effect = bench.response(torch.cat([x, other]), bench.middle(2 * len(x), 0))[len(x) :]
    read = bench.keys_of(other) @ torch.linalg.lstsq(bench.keys_of(x), bench.unit).solution
    errors["error of reading as a matrix"] = error(effect, read)
    bad = {
        "error of following W0": "the outputs do not follow the down-projection's weight",
        "error of W0 Z + bias": "the down-projection's bias is left out",
        "error of reading as a matrix": "writes are not read as a matrix on Z",
    }
    return within(errors, "reads and writes use the down-projection's own weight", bad)


def follows(bench: Bench) -> float:
    """Returns the error of the first chunk's outputs after a change of W0, against that change times Z."""
    module, x, none = bench.module, bench.tiled(bench.chunk), bench.zeros(bench.chunk)
    w0 = module.fast_weight
    before = bench.run(x, none)
    change = bench.random(*w0.shape)
    wanted = module.features(x).detach().double().cpu() @ change.T
    with torch.no_grad(), module.guarded():
        w0.add_(change.to(w0))
        moved = module.forward(x[None], none[None])[0].double().cpu() - before
    return error(moved, wanted)


def causality(bench: Bench, expected: Any) -> Outcome:
    """Measures K above the diagonal, and the effect of another last token on earlier outputs.

    Under least squares only outputs of earlier chunks count. `own-chunk-exposure` detects that a chunk reads
    its own keys.
    """
    later = bench.reads.triu(1).abs().max().item()
    x, target = bench.tiled(3 * bench.chunk), bench.middle(3 * bench.chunk, 0, bench.chunk)
    other = x.clone()
    other[-1] = bench.bank[0] + bench.bank[-1]
    before = -1 if bench.module.ridge is None else 2 * bench.chunk
    moved = bench.size((bench.run(other, target) - bench.run(x, target))[:before])
    bad = {
        "read of a later write": "a chunk reads {off:.3g} of a later chunk's write",
        "moved by a later key": "a later token's key changes earlier outputs",
    }
    return within(dict(zip(bad, (later, moved), strict=True)), "no output depends on a later token", bad)


def apply_then_update(bench: Bench, expected: Any) -> Outcome:
    """Measures the diagonal of K while a sequence streams in chunk by chunk."""
    own = bench.stream_reads.diagonal().abs().max().item()
    if own >= TOLERANCE and abs(own - abs(own_write(bench))) < TOLERANCE:
        raise NotChecked(
            f"a chunk reads {own:.3g} of its own write in one call too, so streaming is not the cause"
        )
    return within(
        {"own write read while streaming": own},
        "a chunk is read before it is written",
        "streaming, a chunk reads {off:.3g} of its own write",
    )


def exclusive_sum(bench: Bench, expected: Any) -> Outcome:
    """Measures the diagonal of K in one call. A value of 1 shows an inclusive sum."""
    own = own_write(bench)
    inclusive = abs(own - 1) < 0.05
    found = f"a chunk reads {own:.3g} of its own write" + (": the sum is inclusive" if inclusive else "")
    return judged(not inclusive, found, {"own write read": own}, TOLERANCE, _heat(bench))


def own_chunk_exposure(bench: Bench, expected: Any) -> Outcome:
    """Measures the diagonal of K in one call, which must be 0.

    The value 1 belongs to `exclusive-sum`.
    """
    own = own_write(bench)
    if abs(own - 1) < 0.05:
        raise NotChecked("the whole of the own write is read, which `exclusive-sum` reports")
    errors = {"own write read": abs(own)}
    if bench.module.ridge is not None:
        errors["moved by a later key of the own chunk"] = own_keys(bench)
    found = f"a chunk reads {own:.3g} of its own write"
    early = "a chunk's reads depend on its own keys: they are in the Gram too early"
    return within(errors, found, dict(zip(errors, (found, early), strict=False)))


def own_keys(bench: Bench) -> float:
    """Returns the effect of a chunk's last key on earlier outputs of the same chunk.

    An exclusive Gram has none.
    """
    chunk = bench.chunk
    x, target = bench.tiled(3 * chunk), bench.zeros(3 * chunk)
    target[:chunk] = bench.scale * bench.units(chunk)
    other = x.clone()
    other[2 * chunk - 1] = bench.bank[0]
    return bench.size((bench.run(other, target) - bench.run(x, target))[chunk : 2 * chunk - 1])


def sign(bench: Bench, expected: Any) -> Outcome:
    """Compares the direction of a later read with the target, where one key and one target repeat."""
    row = bench.scale * bench.units(1)[0]
    target = torch.cat([row.expand(bench.chunk, -1), bench.zeros(bench.chunk)])
    value = float((bench.response(bench.same(len(target)), target)[bench.chunk :] @ row).mean() / (row @ row))
    found = "outputs move towards the target"
    found = found if value > 0 else "outputs move away from the target: the sign is wrong"
    return judged(value > 0, found, {"⟨write, target⟩ / ‖target‖²": value})


def loss_sum(bench: Bench, expected: Any) -> Outcome:
    """Compares the size of one token's write with η, and with its size in chunks twice as long."""
    if bench.module.ridge is not None:
        return _instead(
            bench, "the loss is Σ ‖V - ZMᵀ‖² + λ‖M‖² over all tokens, solved and not stepped down"
        )
    size, eta = abs(bench.kappa()), bench.module.eta
    numbers: dict[str, Any] = {"write per token": size}
    ratios = []
    if eta:
        ratios.append(size / eta)
        numbers["over η"] = size / eta
    with suppress(NotChecked), bench.module.resized(bench.chunk * 2) as longer:
        if len(bench.bank) >= longer.chunk_size:
            other = Bench(longer, 0)
            other.bank, other.scale = bench.bank, bench.scale
            ratios.append(abs(other.kappa()) / size)
            numbers["in chunks twice as long, over this"] = ratios[-1]
    if not ratios:
        raise NotChecked("neither η nor another chunk size is known, so a mean looks the same as a sum")
    if all(abs(ratio - 1) < TOLERANCE for ratio in ratios):
        return judged(True, "each token writes η VᵀZ, whatever the chunk's length", numbers, TOLERANCE)
    found = f"each token writes {ratios[0]:.4g} of η" if eta else "a token writes less in a longer chunk"
    if eta and abs(size / eta * bench.chunk - 1) < 0.05:
        found += f": a mean over the chunk of {bench.chunk}"
    return judged(False, found, numbers, TOLERANCE)


def no_normalization(bench: Bench, expected: Any) -> Outcome:
    """Measures the growth of a write with its targets and keys.

    The degree must be 1 in the targets, in the written keys, and in the keys that read.
    """
    if bench.module.ridge is not None:
        return _instead(bench, "the sum of VᵀZ is read through the inverse of that of ZᵀZ")
    target = bench.middle(2 * bench.chunk, 0)
    x = bench.tiled(len(target))
    targets = _degree(bench.response(x, target / 2)[bench.chunk :], bench.unit)
    row = bench.scale * bench.units(1)[0]
    first = bench.constant(row, bench.chunk)
    with overriding([bench], bank=1.5 * bench.bank):
        second = bench.constant(row, bench.chunk)
    keys = float((first * second).sum() / (first * first).sum())
    bad = {
        "power of the targets, less 1": f"a write grows with power {targets:.3g} of its targets",
        "write at 1.5 Z over VᵀZ, less 1": f"with keys 1.5 times as large, a write is {keys:.3g} of VᵀZ",
    }
    errors = dict(zip(bad, (abs(targets - 1), abs(keys - 1)), strict=True))
    return within(errors, "writes are bilinear in keys and targets", bad)


def plain_sum(bench: Bench, expected: Any) -> Outcome:
    """Tests that K is constant below the diagonal.

    A write must not fade, grow, or be corrected by later chunks.
    """
    if bench.module.ridge is not None:
        return _instead(bench, "deltas add up in two sums, and reads use the least-squares map of both")
    reads = bench.reads
    below = torch.tensor([reads[i, j].item() for i in range(CHUNKS) for j in range(i)])
    spread = (below - 1).abs().max().item()
    tokens = CHUNKS * bench.chunk
    with bench.generator_of(torch.zeros(bench.module.d, bench.kernel), 0 * bench.identity()):
        still = bench.run(bench.tiled(tokens), bench.zeros(tokens))
    drift = bench.size(still[-bench.chunk :] - still[: bench.chunk])
    series = [reads[i, 0].item() for i in range(1, CHUNKS)]
    weights = ", ".join(f"{r:.3g}" for r in series)
    bad = {
        "spread": f"the first chunk's write is read with weights {weights} by the chunks after it",
        "drift of W0": "the weight changes although nothing is written",
    }
    errors = dict(zip(bad, (spread, drift), strict=True))
    return within(errors, "writes add up and stay", bad, more={"weights of the first write": series})


def eta(bench: Bench, expected: Any) -> Outcome:
    """Measures the size of one token's write. It is a choice, since the paper states no η."""
    value = abs(bench.kappa())
    found, numbers = f"η = {value:.4g}", {"η": value}
    if bench.module.ridge is not None:
        return Outcome("extension", f"{found} multiplies the output of a least-squares map", numbers)
    if expected is not None:
        return judged(any(abs(value / e - 1) < TOLERANCE for e in expected), found, numbers, TOLERANCE)
    return Outcome("unspecified", found, numbers)


def chunk_size(bench: Bench, expected: Any) -> Outcome:
    """Finds the step of the outputs at the module's own chunk size, with equal keys and equal targets."""
    own, found = bench.module.own_chunk, bench.chunk
    if own > _LARGE_CHUNK:
        raise NotChecked(f"chunks of {own} tokens are too long to build here")
    if own != bench.module.chunk_size:
        with bench.module.resized(own) as module:
            measured = measured_chunk(module, own, bench.bank[0])
        if measured is None:
            raise NotChecked("no write is ever read")
        found = measured
    low, high = min(expected), max(expected)
    holds = low <= found <= high if len(expected) == 2 else found in expected
    return judged(holds, f"{found} tokens", {"tokens per chunk": found, "expected": list(expected)}, 0)


def _instead(bench: Bench, what: str) -> Outcome:
    """Returns "extension" for a rule other than the paper's. The item `least-squares` checks that rule."""
    found = f"{what} (λ = {bench.module.ridge:g}); `least-squares` measures it"
    return Outcome("extension", found, {"λ": bench.module.ridge})


def own_write(bench: Bench) -> float:
    """Returns the largest part of its own write that a chunk reads in one call."""
    own = bench.reads.diagonal()
    return own[own.abs().argmax()].item()


def _heat(bench: Bench) -> dict[str, Any]:
    return {
        "kind": "heat",
        "title": "Share of chunk j's write that chunk i reads",
        "x": "written by chunk",
        "y": "read by chunk",
        "values": bench.reads.tolist(),
    }


def _degree(half: torch.Tensor, whole: torch.Tensor) -> float:
    ratio = torch.linalg.vector_norm(whole) / torch.linalg.vector_norm(half).clamp(min=1e-300)
    return float(torch.log2(ratio))
