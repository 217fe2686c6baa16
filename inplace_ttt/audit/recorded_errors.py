"""Errors of recorded outputs and gradients against the declared rule of their layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layer.fast_linear import FastWeight, plain_class
from ..ops import state_dtype
from .declared_rule import DeclaredRule
from .limits import BIAS, by_solve
from .recording import Document, Recording, Seen

STRENGTH = 0.5
"""Norm of the reads over the norm of W0's outputs, as the probes set it through P.

It is large compared with the effect of rounding and with clipped writes.
"""

FEW = 32
"""Number of tokens below which rounding alone can cause a bias."""


LOSS_SCALES = (1.0, 2.0**-5, 2.0**-10, 2.0**-13)
"""Factors on the loss, tried in this order. Even the last factor loses no bits of float16."""


def base_output(layer: FastWeight, z: Tensor) -> Tensor:
    """Returns the output [T, d] of the layer without its fast weight, for z [T, h].

    It is computed in float64 if W0 can be read as one matrix.
    """
    w0 = layer.matrix()
    if w0 is None:
        plain: Any = plain_class(layer)
        own = z.to(next(layer.ttt.parameters()).device, layer.ttt.proj.dtype)
        with torch.no_grad():
            return plain.forward(layer, own).double().cpu()
    bias = getattr(layer, "bias", None)
    out = z @ w0.detach().double().cpu().T
    return out if bias is None else out + bias.detach().double().cpu()


def deviation(
    record: Recording, index: int, layer: FastWeight, documents: Sequence[Document], rule: DeclaredRule
) -> float:
    """Returns the error of the layer's outputs against the declared rule, relative to the size of a read.

    The size of a read is the root mean square of the declared reads, over the tokens that read something. If
    no token does, it is the size of the output without fast weight. With a write norm in half precision, it
    is at least `STRENGTH` times the output. In that case η alone sets the size of the writes, and rounding of
    the outputs may exceed it.

    The error is the larger of two errors. One is the root mean square error over the tokens of the worst
    chunk. The other is `BIAS` times the largest bias of a document. The bias is the fraction by which the
    reads of a document are too large or too small.

    Args:
        record: the recording.
        index: number of the layer.
        layer: the layer.
        documents: the documents that were read.
        rule: the declared rule of the layer.
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
    if bool((size > 0).any()):
        size = size[size > 0].mean()
    else:
        size = base_size if float(base_size) else torch.ones_like(base_size)
    if rule.config.write_norm is not None and torch.finfo(rule.dtype).bits < 32:
        size = torch.maximum(size, STRENGTH**2 * base_size)
    scatter = torch.stack([part.mean() for part in off]).max().div(size).sqrt()
    bias = torch.stack([part.sum() / max(len(part), FEW) for part in biases]).abs().max().div(size)
    return float(torch.maximum(scatter, BIAS * bias))


def error_of_solve(record: Recording, index: int, documents: Sequence[Document], rule: DeclaredRule) -> float:
    """Returns `limits.by_solve` for the largest G of the documents, or 0 without ridge regression.

    Args:
        record: the recording.
        index: number of the layer.
        documents: the documents that were read.
        rule: the declared rule of the layer.
    """
    if rule.config.ridge is None:
        return 0.0
    largest = 0.0
    for document in documents:
        z, _, _, writes = record.of(index, document)
        if bool(writes.any()):
            keys = rule.counted(rule.keys(z))[writes]
            largest = max(largest, float(torch.linalg.matrix_norm(keys, 2)) ** 2)
    return by_solve(largest, rule.config.ridge, rule.dtype)


def gradient_errors(
    record: Recording,
    layers: dict[int, FastWeight],
    documents: Sequence[Document],
    rule: Callable[[int], DeclaredRule],
) -> dict[int, dict[str, float]]:
    """Returns the relative error of autograd's gradient against the declared rule's, by layer and tensor.

    The loss is a random weighted sum of the layers' outputs over the documents' tokens. Both gradients of a
    layer start from the same gradient at its output.

    Args:
        record: a recording of one forward with a graph.
        layers: the layers to differentiate, by number.
        documents: the documents that were read, one piece each.
        rule: returns the declared rule for the number of a layer.
    """
    (seen,) = record.forwards
    generator = torch.Generator().manual_seed(0)
    loss: Any = 0.0
    for s in seen.values():
        weights = torch.zeros(*s.rows, s.out.shape[-1])
        for (piece,) in documents:
            here = weights[piece.row, piece.start : piece.stop]
            here.copy_(torch.randn(here.shape, generator=generator))
        weights = weights.reshape(s.out.shape).to(s.out.device)
        loss = loss + (s.passed.to(state_dtype(s.passed.dtype)) * weights).sum()
    own = {index: _differentiated(seen[index], layer) for index, layer in layers.items()}
    through_source = not rule(next(iter(seen))).config.detach_target and len(layers) == len(seen)
    sources = {
        id(s.path): (index, s.path)
        for index, s in reversed(seen.items())
        if through_source and s.path.requires_grad
    }
    """Target sources, each with the first layer that reads it. All layers share the embeddings."""
    tensors = [
        *(seen[i].passed for i in own),
        *(t for found in own.values() for t in found.values()),
        *(path for _, path in sources.values()),
    ]
    # One backward pass through the model computes all gradients.
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
    """Returns the gradients of the loss, which is scaled down if the gradients overflow float16."""
    for scale in LOSS_SCALES:
        found = torch.autograd.grad(scale * loss, tensors, retain_graph=True, allow_unused=True)
        if all(gradient is None or bool(gradient.isfinite().all()) for gradient in found):
            break
    return found


def _differentiated(seen: Seen, layer: FastWeight) -> dict[str, Tensor]:
    """Returns the tensors that the outputs depend on, by the names in `DeclaredRule.tensors`.

    z and W0 are among them if W0 can be read as one matrix.
    """
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
    """Returns the gradient in the orientation of `wanted`, [d, h] for a weight stored as [h, d]."""
    if gradient is None:
        return torch.zeros_like(wanted)
    gradient = gradient.to(wanted)
    return gradient if gradient.shape == wanted.shape else gradient.T
