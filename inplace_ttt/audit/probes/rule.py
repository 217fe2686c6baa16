"""Probes of the update rule's order, sign, sum and accumulation (paper §3.1, §3.2, §3.4, Algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch

from ..outcome import TOLERANCE, NotChecked, Outcome, judged
from .bench import CHUNKS, Bench, error, measured_chunk

_LARGE_CHUNK = 20_000
"""Largest chunk size, in tokens, at which a chunk of the real size is built."""


def writes(bench: Bench, expected: Any) -> Outcome:
    """Measures the effect of a chunk's targets on the outputs of the next chunk."""
    x, target = bench.tiled(2 * bench.chunk), bench.middle(2 * bench.chunk, 0)
    outputs = torch.linalg.vector_norm(bench.run(x, bench.zeros(len(x)))[bench.chunk :])
    size = float(torch.linalg.vector_norm(bench.response(x, target)[bench.chunk :]) / outputs)
    found = (
        "a chunk's write is read by the next chunk" if size > 0 else "no write is ever read: TTT does nothing"
    )
    return judged(size > 0, found, {"change of the next chunk's outputs, by strong targets": size})


def fast_tensor(bench: Bench, expected: Any) -> Outcome:
    """Changes W0 and compares the first chunk's outputs, its bias included, with the expected change.

    It also reads one write with other keys, which tests if reads are linear in the keys.
    """
    module, chunk = bench.module, bench.chunk
    off = follows(bench)
    if (bias := module.bias) is not None:
        x = bench.tiled(chunk)
        wanted = (
            module.features(x).detach().double().cpu() @ module.fast_weight.detach().double().cpu().T
            + bias.detach().double().cpu()
        )
        lost = error(bench.run(x, bench.zeros(chunk)), wanted)
        if lost >= TOLERANCE:
            return judged(
                False, "the down-projection's bias is left out", {"error of W0 Z + bias": lost}, TOLERANCE
            )
    other = bench.bank[torch.randperm(chunk, generator=bench.generator)]
    effect = bench.response(torch.cat([bench.tiled(chunk), other]), bench.middle(2 * chunk, 0))[chunk:]
    same, new = (module.keys(t).detach().double().cpu() for t in (bench.tiled(chunk), other))
    linear = error(effect, new @ torch.linalg.lstsq(same, bench.unit).solution)
    found = (
        "reads and writes use the down-projection's own weight"
        if max(off, linear) < TOLERANCE
        else (
            "the outputs do not follow the down-projection's weight"
            if off >= TOLERANCE
            else "writes are not read as a matrix on Z"
        )
    )
    return judged(
        max(off, linear) < TOLERANCE,
        found,
        {"error of following W0": off, "error of reading as a matrix": linear},
        TOLERANCE,
    )


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
    found = (
        "no output depends on a later token"
        if max(later, moved) < TOLERANCE
        else (
            f"a chunk reads {later:.3g} of a later chunk's write"
            if later >= TOLERANCE
            else "a later token's key changes earlier outputs"
        )
    )
    return judged(
        max(later, moved) < TOLERANCE,
        found,
        {"read of a later write": later, "moved by a later key": moved},
        TOLERANCE,
    )


def apply_then_update(bench: Bench, expected: Any) -> Outcome:
    """Measures the diagonal of K while a sequence streams in chunk by chunk."""
    own = bench.stream_reads.diagonal().abs().max().item()
    if own >= TOLERANCE and abs(own - abs(own_write(bench))) < TOLERANCE:
        raise NotChecked(
            f"a chunk reads {own:.3g} of its own write in one call too, so streaming is not the cause"
        )
    found = (
        "a chunk is read before it is written"
        if own < TOLERANCE
        else f"streaming, a chunk reads {own:.3g} of its own write"
    )
    return judged(own < TOLERANCE, found, {"own write read while streaming": own}, TOLERANCE)


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
    numbers = {"own write read": own}
    if bench.module.ridge is not None:
        numbers["moved by a later key of the own chunk"] = moved = own_keys(bench)
        if abs(own) < TOLERANCE <= moved:
            return judged(
                False,
                "a chunk's reads depend on its own keys: they are in the Gram too early",
                numbers,
                TOLERANCE,
            )
    return judged(abs(own) < TOLERANCE, f"a chunk reads {own:.3g} of its own write", numbers, TOLERANCE)


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
    found = (
        "outputs move towards the target"
        if value > 0
        else "outputs move away from the target: the sign is wrong"
    )
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
    try:
        with bench.module.resized(bench.chunk * 2) as longer:
            bank = bench.bank
            if len(bank) >= longer.chunk_size:
                other = Bench(longer, 0)
                other.bank, other.scale = bank, bench.scale
                ratios.append(abs(other.kappa()) / size)
                numbers["in chunks twice as long, over this"] = ratios[-1]
    except NotChecked:
        pass
    if not ratios:
        raise NotChecked("neither η nor another chunk size is known, so a mean looks the same as a sum")
    holds = all(abs(ratio - 1) < TOLERANCE for ratio in ratios)
    found = (
        "each token writes η VᵀZ, whatever the chunk's length"
        if holds
        else (
            f"each token writes {numbers.get('over η', float('nan')):.4g} of η"
            if eta
            else "a token writes less in a longer chunk"
        )
    )
    if not holds and eta and abs(size / eta * bench.chunk - 1) < 0.05:
        found += f": a mean over the chunk of {bench.chunk}"
    return judged(holds, found, numbers, TOLERANCE)


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
    bank = bench.bank
    try:
        bench.bank = 1.5 * bank
        second = bench.constant(row, bench.chunk)
    finally:
        bench.bank = bank
    keys = float((first * second).sum() / (first * first).sum())
    holds = abs(targets - 1) < TOLERANCE and abs(keys - 1) < TOLERANCE
    found = (
        "writes are bilinear in keys and targets"
        if holds
        else (
            f"a write grows with power {targets:.3g} of its targets"
            if abs(targets - 1) >= TOLERANCE
            else f"with keys 1.5 times as large, a key's write is {keys:.3g} of VᵀZ"
        )
    )
    return judged(
        holds, found, {"power of the targets": targets, "write at 1.5 Z, over VᵀZ": keys}, TOLERANCE
    )


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
    found = (
        "writes add up and stay"
        if max(spread, drift) < TOLERANCE
        else (
            f"the first chunk's write is read with weights {', '.join(f'{r:.3g}' for r in series)} by the "
            "chunks after it"
            if spread >= TOLERANCE
            else "the weight changes although nothing is written"
        )
    )
    return judged(
        max(spread, drift) < TOLERANCE,
        found,
        {"weights of the first write": series, "spread": spread, "drift of W0": drift},
        TOLERANCE,
    )


def eta(bench: Bench, expected: Any) -> Outcome:
    """Measures the size of one token's write. It is a choice, since the paper states no η."""
    value = abs(bench.kappa())
    if bench.module.ridge is not None:
        return Outcome(
            "extension",
            f"η = {value:.4g} multiplies the output of a least-squares map",
            {"η": value},
            TOLERANCE,
        )
    if expected is not None:
        holds = any(abs(value / e - 1) < TOLERANCE for e in expected)
        return judged(holds, f"η = {value:.4g}", {"η": value}, TOLERANCE)
    return Outcome("unspecified", f"η = {value:.4g}", {"η": value}, TOLERANCE)


def chunk_size(bench: Bench, expected: Any) -> Outcome:
    """Finds the step of the outputs at the module's own chunk size, with equal keys and equal targets."""
    own = bench.module.own_chunk
    if own > _LARGE_CHUNK:
        raise NotChecked(f"chunks of {own} tokens are too long to build here")
    if own == bench.module.chunk_size:
        found = bench.chunk
    else:
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
    return Outcome(
        "extension",
        f"{what} (λ = {bench.module.ridge:g}); `least-squares` measures it",
        {"λ": bench.module.ridge},
    )


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
