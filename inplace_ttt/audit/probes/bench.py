"""The measurements that probes share, on one TTT layer.

If only the target source X varies, the outputs of chunk i are linear in the writes of chunks j:

    O_i(X) - O_i(0) = Σ_j K[i, j] · Z_i Z_jᵀ V_j,  V = generator(X)

In the paper, K[i, j] = η for j < i in one document, and 0 elsewhere. Each fault of the rule shows in a region
or a property of K, and each fault of the target generator shows in V. So most items are decided from two
measurements. `reads` is K up to a factor, from chunks with equal keys. `written` is η V, from a chunk that
reads another chunk with the same keys.

Least squares (an extension) is also linear in the targets. Let n chunks have equal keys, and let g be the
eigenvalue of one chunk's KᵀK. Each chunk is then read with the factor 1 / (n g + λ). The bench divides K by
this factor, so K has the same meaning for both rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import InPlaceTTTError
from ..adapters import AuditedModule
from ..law import least_squares_reads
from ..outcome import TOLERANCE, NotChecked
from .driver import Driver

CHUNKS = 5
_STRONG = 30.0
"""Factor by which writes exceed the outputs. The module's rounding is then negligible in comparison."""
_SMALL_KEYS = 0.01
SCALES = tuple(10.0**power for power in range(-9, 8))

AnyNumber = TypeVar("AnyNumber")


class Bench(Driver):
    """One module, inputs for it and the measurements on it.

    Args:
        module: the layer to measure.
        seed: seed of all inputs.

    Raises:
        InPlaceTTTError: if the module's chunks are too short for its kernel.
    """

    def __init__(self, module: AuditedModule, seed: int = 0) -> None:
        super().__init__(module, seed)
        self._sizes: dict[bool | None, list[float]] = {}
        self.margin = self.kernel - 1  # further inside, no tap reaches the chunk's edge with any padding
        if module.chunk_size < 2 * self.margin + 2:
            raise InPlaceTTTError(
                f"{module.name} has chunks of {module.chunk_size} tokens and a kernel of {self.kernel}, "
                "too short to separate edges from the middle; "
                f"audit it with chunks of at least {2 * self.margin + 2}."
            )
        self.neutral()
        rows = max(module.chunk_size, min(2 * module.chunk_size, module.h))
        self.bank = module.inputs(rows, self.generator)

    # Inputs

    def tiled(self, tokens: int, start: int = 0) -> Tensor:
        """Returns inputs [tokens, input] that repeat per chunk. All chunks then have the same keys."""
        return self.bank[(torch.arange(tokens) + start) % self.chunk]

    def same(self, tokens: int) -> Tensor:
        """Returns inputs [tokens, input] with one key. Every token then reads all earlier writes."""
        return self.bank[:1].expand(tokens, -1).clone()

    def middle(self, tokens: int, *chunks_at: int) -> Tensor:
        """Returns a target source [tokens, d] that is zero except in the middle of some chunks.

        Args:
            tokens: length of the source.
            chunks_at: first tokens of these chunks.
        """
        target = self.zeros(tokens)
        for start in chunks_at:
            target[start + self.margin : start + self.chunk - self.margin] = self.scale * self._pattern
        return target

    @cached_property
    def _pattern(self) -> Tensor:
        return self.units(self.chunk - 2 * self.margin)

    # Measurements

    @cached_property
    def chunk(self) -> int:
        """Tokens per chunk, as measured."""
        return measured_chunk(self.module, self.module.chunk_size, self.bank[0]) or self.module.chunk_size

    @cached_property
    def scale(self) -> float:
        """Size of a target whose write is large compared with the outputs and is not clipped."""
        chunk = self.module.chunk_size
        outputs = torch.linalg.vector_norm(self.run(self.bank[:chunk].repeat(2, 1), self.zeros(2 * chunk)))
        sizes = self.sizes(training=None)
        one = sizes[SCALES.index(1.0)]
        wanted = 1.0 if one == 0 or not float(outputs) else float(_STRONG * outputs / one)
        knee = self.knee(sizes)
        return wanted if knee is None else min(wanted, knee / 10)

    def sizes(self, training: bool | None) -> list[float]:
        """Returns the norm of a write's effect on the next chunk for targets of each size in `SCALES`.

        Args:
            training: the mode to measure in; None keeps the present mode.
        """
        if training in self._sizes:
            return self._sizes[training]
        chunk = self.module.chunk_size
        x = self.bank[:chunk].repeat(2, 1)
        target = self.zeros(2 * chunk)
        target[:chunk] = torch.nn.functional.normalize(torch.ones(self.module.d, dtype=torch.float64), dim=0)
        with self.mode(training), self.module.bare():
            none = self.run(x, self.zeros(2 * chunk))
            changes = [(self.run(x, s * target) - none)[chunk:] for s in SCALES]
        return self._sizes.setdefault(training, [float(torch.linalg.vector_norm(c)) for c in changes])

    @staticmethod
    def knee(sizes: Sequence[float]) -> float | None:
        """Returns the size of target at which its effect stops growing.

        The result is the smallest size if the effect never grows, and None if it grows throughout.

        Args:
            sizes: the effects, one per size in `SCALES`.
        """
        slopes = [b / a if a > 0 else float("nan") for a, b in itertools.pairwise(sizes)]
        grows = [8 < slope < 12.5 for slope in slopes]
        if True not in grows:
            return SCALES[0] if all(0.8 < slope < 1.25 for slope in slopes) else None
        stops = [i for i, slope in enumerate(slopes) if slope < 8 and any(grows[:i])]
        return SCALES[stops[0]] if stops else None

    @cached_property
    def unit(self) -> Tensor:
        """The effect of one write: the change [C, d] of the next chunk's outputs if the keys are equal.

        Other effects are measured relative to it.
        """
        tokens = 2 * self.chunk
        return self.yardstick(self.response(self.tiled(tokens), self.middle(tokens, 0))[self.chunk :])

    def yardstick(self, effect: Tensor) -> Tensor:
        """Returns the effect. Raises NotChecked if it is zero."""
        if float(torch.linalg.vector_norm(effect)) == 0:
            raise NotChecked("no write is ever read, so none can be measured")
        return effect

    def share(self, effect: Tensor) -> float:
        """Returns ⟨effect, one write⟩ / ‖one write‖², the effect [C, d] as a multiple of one write."""
        return float((effect * self.unit).sum() / (self.unit * self.unit).sum())

    def size(self, effect: Tensor) -> float:
        """Returns the norm of an effect on some tokens over the norm of one write on a chunk."""
        return float(torch.linalg.vector_norm(effect) / torch.linalg.vector_norm(self.unit))

    @cached_property
    def reads(self) -> Tensor:
        """K [chunks, chunks] in units of K[1, 0]: the share of chunk j's write that chunk i reads.

        The sequence is read in one call.
        """
        return self._reads(lambda x, target: self.response(x, target))

    @cached_property
    def stream_reads(self) -> Tensor:
        """K as in `reads`, measured with one chunk per call."""
        return self._reads(lambda x, target: self.stream_response(x, target, [self.chunk] * CHUNKS))

    def _reads(self, response: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = self.tiled(CHUNKS * self.chunk)
        columns = []
        for j in range(CHUNKS):
            effect = response(x, self.middle(len(x), j * self.chunk))
            parts = enumerate(effect.split(self.chunk))
            columns.append([self.share(part) / self.diluted(max(i, j + 1)) for i, part in parts])
        return torch.tensor(columns, dtype=torch.float64).T

    def diluted(self, writes: int) -> float:
        """Returns the factor on the read of one write if `writes` chunks with equal keys were written.

        It is 1 for the sum.
        """
        ridge = self.module.ridge
        if ridge is None:
            return 1.0
        one = float(self.keys_of(self.tiled(self.chunk)).square().sum()) / min(self.chunk, self.module.h)
        return (one + ridge) / (writes * one + ridge)

    def written(self, target: Tensor) -> Tensor:
        """Returns η V [C, d] of a chunk of target source, for each token separately.

        A chunk with the same keys reads it back.
        """
        tokens = len(target)
        x = self.bank[:tokens]
        effect = self.response(torch.cat([x, x]), torch.cat([target, self.zeros(tokens)]))[tokens:]
        return self.decode(x, effect)

    def decode(self, x: Tensor, effect: Tensor, writes: int = 1) -> Tensor:
        """Returns η V [n, d] from the reads of n tokens.

        Args:
            x: inputs [n, input] of the chunk that wrote, whose keys the reading tokens share.
            effect: the reads [n, d].
            writes: number of chunks written so far with these keys.

        Raises:
            NotChecked: if the keys do not separate tokens, or the reads do not follow the keys or the
                declared law.
        """
        h, ridge = self.module.h, self.module.ridge
        if not self.tells_tokens_apart:
            raise NotChecked(
                f"keys of {h} numbers do not separate the {self.chunk} tokens of the probe's chunk"
            )
        if (self.module.whitening is not None or ridge is not None) and self.key_error >= TOLERANCE:
            raise NotChecked("reads do not follow the keys, so no targets follow from them, see `keys`")
        self.refuse_unlawful()
        z = self.keys_of(x)
        of_sum = torch.linalg.solve(z @ z.T, effect)
        return of_sum if ridge is None else writes * effect + ridge * of_sum

    def refuse_unlawful(self) -> None:
        """Raises NotChecked if reads in one call are not the declared least-squares map.

        Other measurements cannot be compared with them in that case.
        """
        if self.module.ridge is not None and self.law_error >= TOLERANCE:
            raise NotChecked("reads in one call are not the declared least-squares map; see `least-squares`")

    @property
    def tells_tokens_apart(self) -> bool:
        """True if the tokens of a chunk can have linearly independent keys."""
        return self.module.h >= self.chunk

    @cached_property
    def key_error(self) -> float:
        """Error of the reads with scattered keys against K Kᵀ V, apart from their size.

        Under least squares the keys are so small that λ dominates. M is then the sum divided by λ.
        """
        chunk, size = self.chunk, 1.0 if self.module.ridge is None else _SMALL_KEYS
        x, target = self.scattered(2 * chunk, size), self.zeros(2 * chunk)
        target[:chunk] = self.scale / size**2 * self.units(chunk)
        effect = self.yardstick(self.response(x, target)[chunk:])
        written, read = self.keys_of(x).split(chunk)
        wanted = read @ written.T @ self.values_of(target)[:chunk]
        return error(float((effect * wanted).sum() / (effect * effect).sum()) * effect, wanted)

    @cached_property
    def law_error(self) -> float:
        """Error of the reads with scattered keys against the least-squares map with the module's λ.

        Four chunks and a part of another are read.
        """
        assert self.module.ridge is not None
        tokens = 4 * self.chunk + self.chunk // 2
        x, target = self.scattered(tokens), self.scale * self.units(tokens)
        law = least_squares_reads(self.keys_of(x), self.values_of(target), self.chunk, self.module.ridge)
        return error(self.response(x, target), (self.module.eta or 1.0) * law)

    @torch.no_grad()
    def values_of(self, target: Tensor) -> Tensor:
        """Returns V [T, d] computed by the module's own target generator."""
        return self.module.targets(target).detach().double().cpu()

    def constant(self, row: Tensor, chunk: int) -> Tensor:
        """Returns η V [n, d] in the middle of a chunk whose target source is `row` at every token.

        The middle is independent of the chunk's edges and of any padding.
        """
        return self.written(row.expand(chunk, -1))[self.margin : chunk - self.margin]

    def kappa(self) -> float:
        """Returns the measured η, which is ⟨η V, V⟩ / ⟨V, V⟩ with V = X constant and of norm at most 1.

        With a V of norm 1, normalized targets do not change the result. Another item detects normalization.
        """
        row = min(self.scale, 1.0) * self.units(1)[0]
        return float((self.constant(row, self.chunk) @ row).mean() / (row @ row))


def error(found: Tensor, wanted: Tensor) -> float:
    """Returns ‖found - wanted‖ / ‖wanted‖."""
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted).clamp(min=1e-30))


def largest_difference(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest |found - wanted| over the largest |wanted|."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def measured_chunk(module: AuditedModule, meant: int, x: Tensor) -> int | None:
    """Returns the tokens per chunk, measured with equal keys and equal targets.

    The outputs then change in steps, and the distance of two steps is the chunk size.

    Args:
        module: the layer to measure.
        meant: the declared tokens per chunk.
        x: the repeated input [input].

    Returns:
        The measured size, or None if the outputs do not step.

    Raises:
        NotChecked: if an output is not finite.
    """
    tokens = 2 * meant + 2
    inputs = x.expand(1, tokens, -1)
    target = torch.ones(1, tokens, module.d, dtype=torch.float64)
    with torch.no_grad(), module.guarded(), module.unclipped():
        out = module.forward(inputs, target)[0].double().cpu()
    if not bool(out.isfinite().all()):
        raise NotChecked(f"with one key for all of {tokens} tokens, not all outputs are finite")
    steps = torch.linalg.vector_norm(out.diff(dim=0), dim=-1)
    if steps.max() <= 1e-9 * torch.linalg.vector_norm(out, dim=-1).max():
        return None
    edges = (steps > 0.01 * steps.max()).nonzero().flatten() + 1
    return int(edges.diff()[0]) if len(edges) > 1 else int(edges[0])
