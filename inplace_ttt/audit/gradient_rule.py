"""The declared rule of `target: gradient`, which makes plain gradient steps on one document, by autograd.

It is the reference for models whose targets are loss gradients. It reads one document at a time, chunk by
chunk, with the writes of the model off. Its own hooks add the reads, which `DeclaredRule` computes in
float64. It uses none of the package's layout, op, stream or gradient reading, so it does not share their
faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from ..config import InPlaceTTTConfig
from ..families import CACHE
from ..ops import state_dtype
from ..surgery import disable_ttt, fast_weights
from .declared_rule import DeclaredRule


class GradientRule:
    """Reads documents by the declared rule.

    Attributes:
        lm: a converted model with `target: gradient`.
        config: the settings of the model.
        rules: the declared rule of each TTT layer, by layer.
        sums: the sums of writes of each layer that has written: [d, r], and KᵀK [r, r] for a ridge rule.
        deltas: layer and Frobenius norm of each delta that was written, before a clip.
        reads: norm of the last reads over the norm of W0's outputs, the largest over all layers.
    """

    def __init__(self, lm: Any, config: InPlaceTTTConfig, training: bool = False) -> None:
        self.lm, self.config = lm, config
        self.rules = {
            index: DeclaredRule.of(layer, config, config.eta_of(place), training)
            for place, (index, layer) in enumerate(fast_weights(lm).items())
        }
        self.sums: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.deltas: list[tuple[int, float]] = []
        self.reads = 0.0
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def logits(self, ids: Tensor, *, graph: bool = False) -> Tensor:
        """Reads one document.

        Args:
            ids: token ids [1, T].
            graph: keep the graph through keys, sums and the KV cache. Targets are constants in the graph.

        Returns:
            Logits [T, V].
        """
        cache, found = DynamicCache(config=self.lm.config.get_text_config()), []
        if graph:  # a weight with preserved row norms depends on W0
            for index, layer in fast_weights(self.lm).items():
                w0 = layer.matrix()
                assert w0 is not None
                self.rules[index].tensors["w0"] = w0.double()
        with self._hooked(graph), disable_ttt(self.lm), torch.enable_grad():
            for chunk in ids.split(self.config.chunk_size, dim=1):
                whole = chunk.shape[1] == self.config.chunk_size
                steps = self.config.steps_per_chunk if whole else 0
                before = copy.deepcopy(cache) if steps > 1 else cache
                out = self._read(chunk, cache)
                found.append(out if graph else out.detach())
                for layer in [] if graph else cache.layers:
                    layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
                for step in range(steps):
                    self._write(self._read(chunk, copy.deepcopy(before)) if step else out, chunk, graph)
        return torch.cat(found)

    def _read(self, chunk: Tensor, cache: DynamicCache) -> Tensor:
        logits: Tensor = self.lm(input_ids=chunk, **{CACHE: cache}, use_cache=True).logits[0]
        return logits

    def _write(self, logits: Tensor, chunk: Tensor, graph: bool) -> None:
        """Adds the step of one chunk to the sums of every layer."""
        wide = logits[:-1].to(state_dtype(logits.dtype))
        loss = cross_entropy(wide, chunk[0, 1:], reduction="sum")
        probes = [probe for _, probe in self._seen.values()]
        for index, gradient in zip(
            [*self._seen], torch.autograd.grad(loss, probes, retain_graph=graph), strict=True
        ):
            rule, keys = self.rules[index], self._seen[index][0]
            values = -rule.tensors["gain"] * gradient[0].double().cpu()
            self.deltas.append((index, float(torch.linalg.vector_norm(values.T @ keys.detach()))))
            total, gram = self.sums.get(index, (None, None))
            self.sums[index] = rule.after(total, gram, keys, values)

    @contextmanager
    def _hooked(self, graph: bool) -> Iterator[None]:
        self.sums, self.reads = {}, 0.0
        handles = [
            layer.register_forward_hook(self._hook(index, graph))
            for index, layer in fast_weights(self.lm).items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, index: int, graph: bool) -> Callable[..., Tensor]:
        """Returns a hook that adds the reads to a layer's output, and a zero for its gradient."""
        rule = self.rules[index]

        def hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            keys = rule.keys(args[0][0].double().cpu())
            if index in self.sums:
                read = rule.eta * rule.read(keys, *self.sums[index])
                size = float(torch.linalg.vector_norm(read.detach()) / (out.detach().double().norm() + 1e-30))
                self.reads = max(self.reads, size)
                out = out + read.to(out)[None]
            probe = torch.zeros_like(out, requires_grad=True)
            self._seen[index] = keys if graph else keys.detach(), probe
            return out + probe

        return hook
