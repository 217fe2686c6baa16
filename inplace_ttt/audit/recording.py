"""What TTT layers take in and give out while a converted model runs, and how far that is from what they
declare.

The hooks are the audit's own: of the down-projection, of its MLP and of the first decoder layer, whatever the
package's hooks do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import InPlaceTTTConfig
from ..families import locate
from ..layer.fast_linear import FastWeight, plain_class
from ..ops import state_dtype
from ..surgery import fast_weights
from .declared_rule import DeclaredRule
from .limits import BIAS

STRENGTH = 0.5
"""What tokens read over what W0 gives them, as the probes set P: large beside rounding, and beside what clips
let through."""

FEW = 32
"""Tokens below which rounding alone has a bias."""


LOSS_SCALES = (1.0, 2.0**-5, 2.0**-10, 2.0**-13)
"""The last still keeps the bits of float16."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a document: where they stand in the batch of which forward. writes: whether they are to fill
    chunks."""

    forward: int
    row: int
    start: int
    stop: int
    writes: bool = True


@dataclass
class Seen:
    """Of one layer in one forward: the down-projection's input, what its targets are made of, its output;
    rows [B, T].

    passed: the output as it goes on, which others may change in place. path: the source as the targets alone
        take it, with its graph.
    """

    z: Tensor
    source: Tensor
    out: Tensor
    rows: torch.Size
    passed: Tensor
    path: Tensor

    def part(self, name: str, piece: Piece) -> Tensor:
        """One of them [n, ·] over the tokens of a piece, in float64."""
        tensor: Tensor = getattr(self, name)
        return tensor.reshape(*self.rows, -1)[piece.row, piece.start : piece.stop].double().cpu()


Document = Sequence[Piece]


@dataclass
class Recording:
    """One entry per forward: by layer, what it saw. config: the settings under which the model ran, and
    layers its TTT layers.

    dtype: what these computed in, where autocast made it another than their own. rules: what they declared
        before, where it may be
    other by now.
    """

    config: InPlaceTTTConfig
    layers: dict[int, FastWeight]
    dtype: torch.dtype | None = None
    rules: dict[int, DeclaredRule] = field(default_factory=dict)
    forwards: list[dict[int, Seen]] = field(default_factory=list)

    def whole(self, forward: int = 0) -> list[Document]:
        """Each row of a forward as one document."""
        rows, tokens = next(iter(self.forwards[forward].values())).rows
        return [[Piece(forward, row, 0, tokens)] for row in range(rows)]

    def tokens(self, forward: int) -> int:
        return next(iter(self.forwards[forward].values())).rows[1]

    def of(self, index: int, document: Document) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z [T, h], source [T, d], output [T, d] and what writes, bool [T], of a layer over a document, in
        float64."""
        writes = torch.cat([torch.full((piece.stop - piece.start,), piece.writes) for piece in document])
        z, source, out = (
            torch.cat([self.forwards[piece.forward][index].part(name, piece).detach() for piece in document])
            for name in ("z", "source", "out")
        )
        return z, source, out, writes


@contextmanager
def recording(lm: Any, config: InPlaceTTTConfig) -> Iterator[Recording]:
    """Within it each forward of the model is an entry; tensors keep their graph where there is one."""
    decoder, found = locate(lm), Recording(config, fast_weights(lm))
    held: dict[str, Tensor] = {}

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.forwards.append({})

    def note(index: int, down: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        source = held["embeddings" if config.target == "embeddings" else f"mlp {index}"]
        rows = held["embeddings"].shape[:2]
        found.forwards[-1][index] = Seen(
            args[0], source.detach().clone(), out.detach().clone(), rows, out, source
        )

    handles = _fork_of_input(decoder.blocks[0], held, "embeddings")
    handles.append(decoder.blocks[0].register_forward_pre_hook(start, with_kwargs=True))
    for index, layer in found.layers.items():
        handles += _fork_of_input(decoder.layers[index].mlp, held, f"mlp {index}")
        handles.append(layer.register_forward_pre_hook(_for_the_layer_alone))
        handles.append(layer.register_forward_hook(functools.partial(note, index)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _fork_of_input(module: nn.Module, held: dict[str, Tensor], name: str) -> list[Any]:
    """Hooks by which other hooks of the module see a view of its input, kept in `held`, and the module itself
    the input.

    A gradient by that view is what comes through the hooks alone: the targets, whose source they take.
    """
    own: list[Tensor] = []

    def change(
        args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own[:] = [args[0] if args else kwargs["hidden_states"]]
        held[name] = own[0].view_as(own[0])
        return change(args, kwargs, held[name])

    def last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(args, kwargs, own.pop())

    return [
        module.register_forward_pre_hook(first, with_kwargs=True, prepend=True),
        module.register_forward_pre_hook(last, with_kwargs=True),
    ]


def _for_the_layer_alone(down: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """The same input as a tensor of the layer's own: a gradient by it leaves out what else reads it, as LoRA
    around the layer does."""
    return (args[0].view_as(args[0]),)


def base_output(layer: FastWeight, z: Tensor) -> Tensor:
    """What the layer gives without fast weight [T, d] for z [T, h], in float64 where its weight can be
    read."""
    w0 = layer.matrix()
    if w0 is None:
        plain: Any = plain_class(layer)
        with torch.no_grad():
            return (
                plain.forward(layer, z.to(next(layer.ttt.parameters()).device, layer.ttt.proj.dtype))
                .double()
                .cpu()
            )
    bias = getattr(layer, "bias", None)
    out = z @ w0.detach().double().cpu().T
    return out if bias is None else out + bias.detach().double().cpu()


def deviation(
    record: Recording, index: int, layer: FastWeight, documents: Sequence[Document], rule: DeclaredRule
) -> float:
    """How far the layer's outputs are from what it declares, as a share of what a token that reads something
    reads.

    Of each document's chunks the worst one counts, by the root mean square over its tokens, or its bias: how
    much more or less it reads of what is declared. Half precision rounds outputs, beside which writes of one
    norm stay as small as η makes them: there it is a share of `STRENGTH` of the outputs at least. Where
    nothing is to be read, it is a share of the outputs without fast weight.
    """
    off: list[Tensor] = []
    biases: list[Tensor] = []
    sizes: list[Tensor] = []
    bases: list[Tensor] = []
    for document in documents:
        z, source, out, writes = record.of(index, document)
        reads, base = rule.reads(z, source, writes), base_output(layer, z)
        error = out - base - reads
        off += error.square().sum(-1).split(rule.config.chunk_size)
        biases.append((error * reads).sum(-1)[reads.any(-1)])
        sizes.append(reads.square().sum(-1))
        bases.append(base.square().sum(-1))
    size, base_size = torch.cat(sizes), torch.cat(bases).mean()
    size = (
        size[size > 0].mean()
        if bool((size > 0).any())
        else base_size
        if float(base_size)
        else torch.ones_like(base_size)
    )
    if rule.config.write_norm is not None and torch.finfo(rule.dtype).bits < 32:
        size = torch.maximum(size, STRENGTH**2 * base_size)
    scatter = torch.stack([part.mean() for part in off]).max().div(size).sqrt()
    bias = torch.stack([part.sum() / max(len(part), FEW) for part in biases]).abs().max().div(size)
    return float(torch.maximum(scatter, BIAS * bias))


def gradient_errors(
    record: Recording,
    layers: dict[int, FastWeight],
    documents: Sequence[Document],
    rule: Callable[[int], DeclaredRule],
) -> dict[int, dict[str, float]]:
    """By layer and tensor, how far autograd's gradient is from that of the declared rule, relative to this.

    record: of one forward with a graph. rule: of a layer's index, `DeclaredRule`. What is differentiated is a
        random sum over the
    layers' outputs for the documents' tokens; each layer's own gradient there is handed to both.
    """
    (seen,) = record.forwards
    generator = torch.Generator().manual_seed(0)
    loss: Any = 0.0
    for s in seen.values():
        weights = torch.zeros(*s.rows, s.out.shape[-1])
        for (piece,) in documents:
            here = weights[piece.row, piece.start : piece.stop]
            here.copy_(torch.randn(here.shape, generator=generator))
        loss = (
            loss
            + (s.passed.to(state_dtype(s.passed.dtype)) * weights.reshape(s.out.shape).to(s.out.device)).sum()
        )
    own = {index: _differentiated(seen[index], layer) for index, layer in layers.items()}
    through_source = not rule(next(iter(seen))).config.detach_target and len(layers) == len(seen)
    sources = {
        id(s.path): (index, s.path)
        for index, s in reversed(seen.items())
        if through_source and s.path.requires_grad
    }
    """Each source of targets, and the first layer that reads it: embeddings are one of all layers."""
    tensors = [
        *(seen[i].passed for i in own),
        *(t for found in own.values() for t in found.values()),
        *(path for _, path in sources.values()),
    ]
    # of all at once: one backward pass through the model
    gradients = iter(_gradients_in_range(loss, tensors))
    wanted = {i: _declared_gradients(seen[i], documents, rule(i), next(gradients)) for i in own}
    found = {i: {name: _off(next(gradients), wanted[i][name]) for name in own[i]} for i in own}
    for index, path in sources.values():
        of_path = torch.stack([wanted[i]["source"] for i in own if seen[i].path is path]).sum(0)
        found[index]["the target's source"] = _off(next(gradients), of_path)
    return found


def _off(got: Tensor | None, wanted: Tensor) -> float:
    return float((_like(got, wanted) - wanted).norm() / wanted.norm().clamp(min=1e-30))


def _gradients_in_range(loss: Tensor, tensors: Sequence[Tensor]) -> Sequence[Any]:
    """Gradients of the loss, made smaller where they leave float16's range, as loss scaling has it."""
    for scale in LOSS_SCALES:
        found = torch.autograd.grad(scale * loss, tensors, retain_graph=True, allow_unused=True)
        if all(gradient is None or bool(gradient.isfinite().all()) for gradient in found):
            break
    return found


def _differentiated(seen: Seen, layer: FastWeight) -> dict[str, Tensor]:
    """What the outputs depend on, by the names in `DeclaredRule.tensors`; z and W0 where this can be read as
    one matrix."""
    found: dict[str, Tensor | None] = {"conv": layer.ttt.conv, "proj": layer.ttt.proj, "gate": layer.ttt.gate}
    if layer.matrix() is not None:
        found |= {"w0": layer.get_parameter("weight"), "z": seen.z}
    return {name: parameter for name, parameter in found.items() if parameter is not None}


def _declared_gradients(
    seen: Seen, documents: Sequence[Document], rule: DeclaredRule, upstream: Tensor
) -> dict[str, Tensor]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in rule.tensors.items()}
    own, given = dataclasses.replace(rule, tensors=leaves), dataclasses.replace(seen, out=upstream)
    z, source = (tensor.detach().clone().requires_grad_() for tensor in (seen.z, seen.source))
    total: Any = 0.0
    for (piece,) in documents:
        leaf = dataclasses.replace(seen, z=z, source=source)
        here = leaf.part("z", piece)
        out = own.reads(here, leaf.part("source", piece), torch.ones(len(here), dtype=torch.bool))
        out = out if "w0" not in leaves else out + here @ leaves["w0"].T
        total = total + (out * given.part("out", piece)).sum()
    names = [*leaves, "z", "source"]
    found = torch.autograd.grad(total, [*leaves.values(), z, source], allow_unused=True)
    return {
        name: torch.zeros(()) if gradient is None else gradient
        for name, gradient in zip(names, found, strict=True)
    }


def _like(gradient: Tensor | None, wanted: Tensor) -> Tensor:
    """A gradient as the declared one lies, [d, h] of a weight that is kept as [h, d]."""
    if gradient is None:
        return torch.zeros_like(wanted)
    gradient = gradient.to(wanted)
    return gradient if gradient.shape == wanted.shape else gradient.T
