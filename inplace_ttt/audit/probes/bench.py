"""The measurements that probes share, on one TTT layer.

With the target source X as the only thing that varies, the outputs are linear in what was written:
    O_i(X) - O_i(0) = Σ_j K[i, j] · Z_i Z_jᵀ V_j,  V = generator(X)
for chunks i, j. The method is K[i, j] = η for j < i in one document, 0 elsewhere; each fault of the rule is a
region or a property of K, and each fault of the generator one of V. So two measurements carry most of the
audit: `reads`, K up to a factor, from chunks with equal keys; and `written`, η V, from a chunk that reads
another one with the same keys.

Least squares (extension) is linear in the targets too. After n chunks with equal keys whose KᵀK has the
eigenvalue g it reads each of them with 1 / (n g + λ), by which its K is divided here, so that K means the
same for both rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import InPlaceTTTError
from ..adapters import AuditedModule, Stream
from ..law import key_size, least_squares_reads
from ..outcome import TOLERANCE, NotChecked

CHUNKS = 5
_STRONG = 30.0
"""Writes move the outputs by about this factor, so that rounding in the module is far below them."""
_SMALL_KEYS = 0.01
SCALES = tuple(10.0**power for power in range(-9, 8))

AnyNumber = TypeVar("AnyNumber")


class Bench:
    """One module, inputs for it, and what was measured on it. `seed` draws every input."""

    def __init__(self, module: AuditedModule, seed: int = 0) -> None:
        self.module = module
        self._sizes: dict[bool | None, list[float]] = {}
        self.generator = torch.Generator().manual_seed(seed)
        self.kernel = module.conv.shape[-1]
        self.margin = self.kernel - 1  # beyond it, no tap of any padding reaches the chunk's edge
        if module.chunk_size < 2 * self.margin + 2:
            raise InPlaceTTTError(
                f"{module.name} has chunks of {module.chunk_size} tokens and a kernel of {self.kernel}, "
                "too short to tell edges "
                f"from the middle; audit it with chunks of at least {2 * self.margin + 2}."
            )
        self.neutral()
        rows = max(module.chunk_size, min(2 * module.chunk_size, module.h))
        self.bank = module.inputs(rows, self.generator)

    # Runs

    def run(self, x: Tensor, target: Tensor, **kwargs: object) -> Tensor:
        """Outputs [T, d] of one row: inputs [T, input], target source [T, d]. The module's tensors are as
        before afterwards."""
        return self.run_batch(x[None], target[None], **kwargs)[0]

    @torch.no_grad()
    def run_batch(self, x: Tensor, target: Tensor, **kwargs: object) -> Tensor:
        """Outputs [B, T, d] in float64."""
        with self.module.guarded():
            return self.module.forward(x, target, **kwargs).double().cpu()  # type: ignore[arg-type]

    def response(self, x: Tensor, target: Tensor, **kwargs: object) -> Tensor:
        """What the writes of `target` change in the outputs [T, d]."""
        with self.module.bare():
            return self.run(x, target, **kwargs) - self.run(x, torch.zeros_like(target), **kwargs)

    @torch.no_grad()
    def stream(
        self, x: Tensor, target: Tensor, pieces: Sequence[int], stream: Stream | None = None
    ) -> Tensor:
        """Outputs [T, d] of one row that is read in pieces."""
        assert sum(pieces) == len(x)
        with self.module.guarded():
            stream = stream or self.module.stream()
            parts = [
                stream(a[None], b[None])
                for a, b in zip(x.split(list(pieces)), target.split(list(pieces)), strict=True)
            ]
            return torch.cat(parts, 1)[0].double().cpu()

    def stream_response(self, x: Tensor, target: Tensor, pieces: Sequence[int]) -> Tensor:
        """`response` of a row that is read in pieces."""
        with self.module.bare():
            return self.stream(x, target, pieces) - self.stream(x, torch.zeros_like(target), pieces)

    # Inputs and the target generator

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def zeros(self, tokens: int) -> Tensor:
        """No target: [tokens, d]."""
        return torch.zeros(tokens, self.module.d, dtype=torch.float64)

    def units(self, rows: int) -> Tensor:
        """Random rows of norm 1, [rows, d]."""
        return torch.nn.functional.normalize(self.random(rows, self.module.d), dim=-1)

    def tiled(self, tokens: int, start: int = 0) -> Tensor:
        """Inputs [tokens, input] that repeat with each chunk, so that all chunks have the same keys."""
        return self.bank[(torch.arange(tokens) + start) % self.chunk]

    def same(self, tokens: int) -> Tensor:
        """Inputs [tokens, input] of one key, so that every token reads all that was written before it."""
        return self.bank[:1].expand(tokens, -1).clone()

    def scattered(self, tokens: int, size: float = 1.0) -> Tensor:
        """Inputs [tokens, input] of random keys, none orthogonal to another, `size` times as large as those
        of the bank."""
        keys = torch.nn.functional.normalize(self.random(tokens, self.module.h), dim=-1)
        return self.module.inputs_of(size * key_size(self.module.ridge) * keys)

    def keys_of(self, x: Tensor) -> Tensor:
        """What the module says is written under and read with, [n, h]."""
        return self.module.keys(x).detach().double().cpu()

    def middle(self, tokens: int, *chunks_at: int) -> Tensor:
        """A target source [tokens, d] in the middle of the chunks that start at the given tokens, and zero
        elsewhere."""
        target = self.zeros(tokens)
        for start in chunks_at:
            target[start + self.margin : start + self.chunk - self.margin] = self.scale * self._pattern
        return target

    @cached_property
    def _pattern(self) -> Tensor:
        return self.units(self.chunk - 2 * self.margin)

    @torch.no_grad()
    def generate(self, taps: Tensor, proj: Tensor) -> None:
        """Set the target generator: a factor for each channel and tap [d, k], and P [d, d]."""
        conv = self.module.conv
        values = torch.zeros_like(conv)
        if conv.shape[1] == 1:
            values[:, 0] = taps.to(values)
        else:
            channels = torch.arange(len(conv))
            values[channels, channels] = taps.to(values)
        conv.copy_(values)
        if self.module.proj is not None:
            self.module.proj.copy_(proj.to(self.module.proj))
        elif not torch.equal(proj, self.identity()):
            raise NotChecked("the module has no P")

    def neutral(self) -> None:
        """V = X, but for a shift of tokens that depends on the padding: one tap of 1, P = 1."""
        taps = torch.zeros(self.module.d, self.kernel, dtype=torch.float64)
        taps[:, self.kernel // 2] = 1
        self.generate(taps, torch.eye(self.module.d, dtype=torch.float64))

    @contextmanager
    def generator_of(self, taps: Tensor, proj: Tensor) -> Iterator[None]:
        """Within it the target generator is another than the neutral one."""
        self.generate(taps, proj)
        try:
            yield
        finally:
            self.neutral()

    def identity(self) -> Tensor:
        return torch.eye(self.module.d, dtype=torch.float64)

    # Measurements

    @cached_property
    def chunk(self) -> int:
        """Tokens a chunk, measured."""
        return measured_chunk(self.module, self.module.chunk_size, self.bank[0]) or self.module.chunk_size

    @cached_property
    def scale(self) -> float:
        """A size of target at which writes are large beside the outputs, and a clip does not act."""
        outputs = torch.linalg.vector_norm(
            self.run(self.bank[: self.module.chunk_size].repeat(2, 1), self.zeros(2 * self.module.chunk_size))
        )
        sizes = self.sizes(training=None)
        one = sizes[SCALES.index(1.0)]
        wanted = 1.0 if one == 0 or not float(outputs) else float(_STRONG * outputs / one)
        knee = self.knee(sizes)
        return wanted if knee is None else min(wanted, knee / 10)

    def sizes(self, training: bool | None) -> list[float]:
        """‖what a chunk of targets of each size in `SCALES` changes in the next one‖, in a mode (None: the
        present one, unclipped)."""
        if training in self._sizes:
            return self._sizes[training]
        chunk = self.module.chunk_size
        x = self.bank[:chunk].repeat(2, 1)
        target = self.zeros(2 * chunk)
        target[:chunk] = torch.nn.functional.normalize(torch.ones(self.module.d, dtype=torch.float64), dim=0)
        with self.mode(training), self.module.bare():
            none = self.run(x, self.zeros(2 * chunk))
            changes = [
                float(torch.linalg.vector_norm((self.run(x, s * target) - none)[chunk:])) for s in SCALES
            ]
        return self._sizes.setdefault(training, changes)

    @staticmethod
    def knee(sizes: Sequence[float]) -> float | None:
        """Size of target from which its effect no longer grows with it, the least where it never grows; None
        where it grows all along."""
        slopes = [b / a if a > 0 else float("nan") for a, b in itertools.pairwise(sizes)]
        grows = [8 < slope < 12.5 for slope in slopes]
        if True not in grows:
            return SCALES[0] if all(0.8 < slope < 1.25 for slope in slopes) else None
        stops = [i for i, slope in enumerate(slopes) if slope < 8 and any(grows[:i])]
        return SCALES[stops[0]] if stops else None

    @contextmanager
    def mode(self, training: bool | None) -> Iterator[None]:
        """Training or evaluation mode; evaluation afterwards."""
        if training is None:
            yield
            return
        self.module.train(training)
        try:
            yield
        finally:
            self.module.train(False)

    @cached_property
    def unit(self) -> Tensor:
        """What a chunk's writes change in the next chunk with the same keys, [C, d]: the yardstick of one
        write."""
        return self.yardstick(
            self.response(self.tiled(2 * self.chunk), self.middle(2 * self.chunk, 0))[self.chunk :]
        )

    def yardstick(self, effect: Tensor) -> Tensor:
        if float(torch.linalg.vector_norm(effect)) == 0:
            raise NotChecked("nothing that is written is ever read, so there is no write to measure")
        return effect

    def share(self, effect: Tensor) -> float:
        """⟨effect, one write⟩ / ‖one write‖²: how much of one write an effect [C, d] is."""
        return float((effect * self.unit).sum() / (self.unit * self.unit).sum())

    def size(self, effect: Tensor) -> float:
        """Norm of an effect on some tokens, over the norm of one write on a chunk."""
        return float(torch.linalg.vector_norm(effect) / torch.linalg.vector_norm(self.unit))

    @cached_property
    def reads(self) -> Tensor:
        """K [chunks, chunks] in units of K[1, 0]: how much of chunk j's write chunk i reads. Whole sequence
        in one call."""
        return self._reads(lambda x, target: self.response(x, target))

    @cached_property
    def stream_reads(self) -> Tensor:
        """The same, read one chunk a call."""
        return self._reads(lambda x, target: self.stream_response(x, target, [self.chunk] * CHUNKS))

    def _reads(self, response: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = self.tiled(CHUNKS * self.chunk)
        columns = []
        for j in range(CHUNKS):
            effect = response(x, self.middle(len(x), j * self.chunk))
            columns.append(
                [
                    self.share(part) / self.diluted(max(i, j + 1))
                    for i, part in enumerate(effect.split(self.chunk))
                ]
            )
        return torch.tensor(columns, dtype=torch.float64).T

    def diluted(self, writes: int) -> float:
        """How much of a write is read where `writes` chunks with equal keys were written, over one alone."""
        ridge = self.module.ridge
        if ridge is None:
            return 1.0
        one = float(self.keys_of(self.tiled(self.chunk)).square().sum()) / min(self.chunk, self.module.h)
        return (one + ridge) / (writes * one + ridge)

    def written(self, target: Tensor) -> Tensor:
        """η V [C, d] of a chunk of target source, each token's on its own: read back by a chunk with the same
        keys."""
        tokens = len(target)
        x = self.bank[:tokens]
        effect = self.response(torch.cat([x, x]), torch.cat([target, self.zeros(tokens)]))[tokens:]
        return self.decode(x, effect)

    def decode(self, x: Tensor, effect: Tensor, writes: int = 1) -> Tensor:
        """η V [n, d] from what n tokens read of n writes under the same keys; `writes`: chunks written so far
        with these keys."""
        if not self.tells_tokens_apart:
            raise NotChecked(
                f"keys of {self.module.h} numbers do not tell the {self.chunk} tokens of the probe's chunk "
                "apart"
            )
        if (
            self.module.whitening is not None or self.module.ridge is not None
        ) and self.key_error >= TOLERANCE:
            raise NotChecked(
                "what is read does not follow the keys, so that targets cannot be told from it; `keys` "
                "reports it"
            )
        self.refuse_unlawful()
        z, ridge = self.keys_of(x), self.module.ridge
        of_sum = torch.linalg.solve(z @ z.T, effect)
        return of_sum if ridge is None else writes * effect + ridge * of_sum

    def refuse_unlawful(self) -> None:
        """What is read in one call must be the declared least-squares map, where other things are held
        against it."""
        if self.module.ridge is not None and self.law_error >= TOLERANCE:
            raise NotChecked(
                "one call itself does not read the least-squares map that is declared, nothing can be held "
                "against it"
            )

    @property
    def tells_tokens_apart(self) -> bool:
        """Whether the tokens of a chunk can have independent keys."""
        return self.module.h >= self.chunk

    @cached_property
    def key_error(self) -> float:
        """Of what scattered keys read of others, but for its size, against K Kᵀ V.

        Under least squares these keys are so small that λ alone matters beside them, and M is the sum over λ.
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
        """Of what scattered keys read over four chunks and a piece of another, against the least-squares map
        with the module's λ."""
        assert self.module.ridge is not None
        x, target = (
            self.scattered(4 * self.chunk + self.chunk // 2),
            self.scale * self.units(4 * self.chunk + self.chunk // 2),
        )
        law = least_squares_reads(self.keys_of(x), self.values_of(target), self.chunk, self.module.ridge)
        return error(self.response(x, target), (self.module.eta or 1.0) * law)

    @torch.no_grad()
    def values_of(self, target: Tensor) -> Tensor:
        """V [T, d] by the module's own target generator."""
        return self.module.targets(target).detach().double().cpu()

    def constant(self, row: Tensor, chunk: int) -> Tensor:
        """η V [n, d] of a chunk whose target source is `row` at every token, in the middle: no edge, any
        padding."""
        return self.written(row.expand(chunk, -1))[self.margin : chunk - self.margin]

    def kappa(self) -> float:
        """η as measured: ⟨η V, V⟩ / ⟨V, V⟩ with V = X constant and of norm 1, so that normalised targets show
        elsewhere."""
        row = min(self.scale, 1.0) * self.units(1)[0]
        return float((self.constant(row, self.chunk) @ row).mean() / (row @ row))


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖."""
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted).clamp(min=1e-30))


def largest_difference(found: Tensor, wanted: Tensor) -> float:
    """The largest |found - wanted|, over the largest |wanted|."""
    return float(
        (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)
    )


def measured_chunk(module: AuditedModule, meant: int, x: Tensor) -> int | None:
    """Tokens a chunk: where the outputs step, when all keys are equal and all targets too. None where they do
    not.

    x [input]: the input that is repeated.
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
