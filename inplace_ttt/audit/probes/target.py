"""Probes of the target generator V = Conv(X) · P (paper §3.2, §3.4, Algorithm 1 line 6).

An impulse in X at one token shows the tokens whose targets it enters. A constant X excludes effects of the
padding. It isolates P and the order of the two maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..outcome import TOLERANCE, NotChecked, Outcome, judged, within
from .bench import Bench

_VISIBLE = 0.02
"""Smallest response to an impulse that counts, as a fraction of the largest response."""


def conv_depthwise(bench: Bench, expected: Any) -> Outcome:
    """Measures the response in other channels to an impulse in one channel.

    All entries of the kernel's own full shape are set.
    """
    conv = bench.module.conv
    with torch.no_grad():
        bench.generate(_taps(bench), bench.identity())
        conv.add_(torch.rand(conv.shape, generator=bench.generator).to(conv) / conv.shape[1])
        try:
            target, channel = bench.zeros(bench.chunk), bench.module.d // 2
            target[bench.chunk // 2, channel] = bench.scale
            response = bench.written(target)
        finally:
            bench.neutral()
    inside = torch.linalg.vector_norm(response[:, channel])
    total = torch.linalg.vector_norm(response)
    if total == 0:
        raise NotChecked("an impulse in the target source changes nothing")
    across = float(((total**2 - inside**2).clamp(min=0)).sqrt() / total)
    return within(
        {"response in other channels": across},
        "each channel has its own kernel",
        "{off:.0%} of a channel's response is in other channels",
        more={"kernel": list(conv.shape)},
    )


def conv_size(bench: Bench, expected: Any) -> Outcome:
    """Counts the tokens that an impulse in the middle of a chunk reaches."""
    response = _offsets(bench)
    taps = sorted(response)
    found = f"{len(taps)} taps"
    chart = {
        "kind": "bars",
        "title": "Contribution of neighboring tokens to a token's target",
        "x": "token, relative to the target's own",
        "y": "size of the response",
        "labels": [f"{o:+d}" if o else "0" for o in taps],
        "values": [response[o] for o in taps],
    }
    return judged(len(taps) == expected, found, {"taps": len(taps), "expected": expected}, 0, chart)


def conv_bias(bench: Bench, expected: Any) -> Outcome:
    """Measures the write of a target source of zeros."""
    tokens = 2 * bench.chunk
    x = bench.tiled(tokens)
    with bench.generator_of(_taps(bench), bench.identity()):
        written = bench.run(x, bench.zeros(tokens))
    with bench.generator_of(0 * _taps(bench), 0 * bench.identity()):
        none = bench.run(x, bench.zeros(tokens))
    # A bias does not grow with the targets, so it is compared with a write of targets of norm 1.
    size = bench.size((written - none)[bench.chunk :]) * bench.scale
    return within(
        {"write of a zero source": size},
        "nothing is written where the target source is zero",
        "a zero source writes, with {off:.3g} times one write's effect",
    )


def conv_lookahead(bench: Bench, expected: Any) -> Outcome:
    """Finds the tokens that enter the target of a token."""
    taps = sorted(_offsets(bench))
    ahead = [o for o in taps if o > 0]
    found = f"taps from t{taps[0]:+d} to t{taps[-1]:+d}" + (
        "" if ahead else ": no future token is in the target"
    )
    return judged(bool(ahead), found, {"taps": taps}, 0)


def conv_isolation(bench: Bench, expected: Any) -> Outcome:
    """Sets impulses on both sides of a chunk's edge. Tokens at the edge must read zero beyond it."""
    chunk = bench.chunk
    sides = {}
    # All chunks have equal keys, so a read shows the place in a chunk at which a write was made. An impulse
    # on one side of the edge that writes across it appears at the other end of a chunk.
    start, end = slice(0, chunk // 2), slice(chunk // 2, None)
    x = bench.tiled(3 * chunk)
    with bench.generator_of(_taps(bench), bench.identity()):
        for name, at, reader, there in (
            ("into the next chunk", chunk - 1, 2, start),
            ("into the chunk before", chunk, 1, end),
        ):
            target = bench.zeros(len(x))
            target[at] = bench.scale
            effect = bench.response(x, target).split(chunk)
            sides[name] = _norm(bench.decode(x[:chunk], effect[reader], reader)[there]) / _norm(
                bench.decode(x[:chunk], effect[2], 2)
            )
    # With all taps 1 and a constant source, a target is proportional to its number of taps in the chunk.
    row = bench.scale * bench.units(1)[0]
    with bench.generator_of(torch.ones_like(_taps(bench)), bench.identity()):
        counts = bench.written(row.expand(chunk, -1)) @ row
    counts = counts / counts[bench.margin : chunk - bench.margin].mean() * bench.kernel
    taps = _offsets(bench)
    inside = torch.tensor([float(sum(0 <= t + o < chunk for o in taps)) for t in range(chunk)])
    sides["padding that is not zero"] = float((counts - inside).abs().max()) / bench.kernel
    bad = dict.fromkeys(sides, "the convolution reaches {name}") | {
        "padding that is not zero": "tokens at the edge take in something from beyond it"
    }
    return within(sides, "the convolution ends at the chunk's edges, with zeros beyond", bad)


def conv_before_projection(bench: Bench, expected: Any) -> Outcome:
    """Sets kernels that differ by channel and a symmetric P.

    The result then depends on the order of the two maps, and not on a transposition.
    """
    d = bench.module.d
    p, mixed = bench.random(d, d), bench.random(d)
    p = p + p.T
    found, row = _of_constant(bench, mixed, p)
    first, last = _cosine(found, (mixed * row) @ p), _cosine(found, mixed * (row @ p))
    text = "convolution first, then P" if first >= last else "P first, then the convolution"
    return judged(first >= last, text, {"cosine, conv then P": first, "cosine, P then conv": last}, TOLERANCE)


def projection_untransposed(bench: Bench, expected: Any) -> Outcome:
    """Sends a constant source through an asymmetric P, and compares with X P and X Pᵀ."""
    if bench.module.proj is None:
        return judged(False, "P is missing: the target is the convolution's output", {}, TOLERANCE)
    p = bench.random(bench.module.d, bench.module.d)
    found, row = _of_constant(bench, torch.ones(bench.module.d), p)
    straight, transposed = _cosine(found, row @ p), _cosine(found, row @ p.T)
    if max(straight, transposed) < 0.9:
        raise NotChecked(f"the target is neither X P nor X Pᵀ (cosines {straight:.3g}, {transposed:.3g})")
    text = "P is applied transposed, as an ordinary linear layer would"
    if straight >= transposed:
        text = "P from the right, as stored"
    numbers = {"cosine with X P": straight, "cosine with X Pᵀ": transposed}
    return judged(straight >= transposed, text, numbers, TOLERANCE)


def _of_constant(bench: Bench, middle: Tensor, proj: Tensor) -> tuple[Tensor, Tensor]:
    """Returns η V [d] of a constant source, and the source [d], with these taps in the middle and this P."""
    taps = torch.zeros(bench.module.d, bench.kernel, dtype=torch.float64)
    taps[:, bench.kernel // 2] = middle
    row = bench.scale * bench.units(1)[0]
    with bench.generator_of(taps, proj):
        return bench.constant(row, bench.chunk).mean(0), row


def _taps(bench: Bench) -> Tensor:
    """Returns a different kernel for each channel, [d, k], with no entry near 0."""
    return 0.5 + torch.rand(
        bench.module.d, bench.kernel, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def _offsets(bench: Bench) -> dict[int, float]:
    """Returns by offset o the weight of token t + o in the target of token t, far from chunk edges."""
    at = bench.chunk // 2
    target = bench.zeros(bench.chunk)
    target[at] = bench.scale
    with bench.generator_of(_taps(bench), bench.identity()):
        sizes = torch.linalg.vector_norm(bench.written(target), dim=-1)
    if sizes.max() == 0:
        raise NotChecked("an impulse in the target source changes nothing")
    return {
        at - t: float(size / sizes.max()) for t, size in enumerate(sizes) if size > _VISIBLE * sizes.max()
    }


def zero_tap(bench: Bench) -> int:
    """Returns the index of the tap on the token itself. Raises NotChecked if there is none."""
    at = bench.chunk // 2
    target = bench.zeros(bench.chunk)
    target[at] = bench.scale
    for tap in range(bench.kernel):
        taps = torch.zeros(bench.module.d, bench.kernel, dtype=torch.float64)
        taps[:, tap] = 1
        with bench.generator_of(taps, bench.identity()):
            if int(torch.linalg.vector_norm(bench.written(target), dim=-1).argmax()) == at:
                return tap
    raise NotChecked("no tap of the convolution takes the token itself")


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _cosine(a: Tensor, b: Tensor) -> float:
    """Returns the absolute cosine. Another item measures the sign."""
    return abs(float(torch.nn.functional.cosine_similarity(a, b, dim=0)))
