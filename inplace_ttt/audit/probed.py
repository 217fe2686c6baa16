"""A converted model prepared for readings, and its deviation from the rules that its layers declare."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layer.fast_linear import FastWeight
from ..surgery import config_of
from .borrowing import probe_chunk, small_chunks
from .declared_rule import DeclaredRule
from .limits import limits, room
from .prepared import Prepared
from .recorded_errors import STRENGTH, base_output, deviation, error_of_solve
from .recording import Document, Recording, recording

Documents = Sequence[Document]
Reading = tuple[str, Recording, Documents]
Scene = Callable[["Probed"], Iterator[Reading]]
"""Runs a model and yields readings.

A reading is its name, the recording of the layers, and the documents in it.
"""


class Probed(Prepared):
    """A prepared model whose TTT layers are compared one by one with the rules that they declare."""

    @classmethod
    @contextmanager
    def of(cls, lm: Any, seed: int, strength: float = STRENGTH) -> Iterator[Probed]:
        """Yields the prepared model, and restores it on exit.

        Args:
            lm: a converted model.
            seed: seed of the token ids and the target generator.
            strength: norm of the reads over the norm of W0's outputs.
        """
        declared = config_of(lm)
        chunk = probe_chunk(declared.kernel_size)
        with small_chunks(lm, chunk, seed), torch.no_grad():
            probed = cls(
                lm, dataclasses.replace(declared, chunk_size=chunk, clip=None, prompt_write=None), seed
            )
            record = probed.read(probed.ids(1, 4 * chunk))
            norms = probed._strengthen(
                record, strength, relative=declared.clip is not None and declared.clip.relative
            )
            with probed.clipping_half(declared, norms) as clipped:
                yield clipped

    def _strengthen(self, record: Recording, strength: float, relative: bool) -> list[float]:
        """Scales each layer's P so that reads have a visible size, and returns norms of the chunks' deltas.

        With `relative`, the norms are divided by ‖W0‖.
        """
        norms = []
        for index, layer in self.layers.items():
            z, source, _, writes = record.of(index, record.whole()[0])
            rule = self.rule(index)
            reads, base = rule.reads(z, source, writes), base_output(layer, z)
            wanted = base.norm() if bool(base.any()) else reads.norm()
            factor = float(strength * wanted / reads.norm()) if bool(reads.any()) else 1.0
            if self.config.write_norm is None:
                layer.ttt.proj.data = layer.ttt.proj.data * factor
            one = float(rule.tensors["w0"].norm()) or 1.0 if relative else 1.0
            for k, x in zip(rule.keys(z).split(self.chunk), source.split(self.chunk), strict=True):
                norms.append(factor * float((rule.targets(x).T @ rule.counted(k)).norm()) / one)
        return norms

    def rule(self, index: int) -> DeclaredRule:
        """Returns the declared rule of a layer."""
        return self._rule_of(self.layers[index], index, self.config)

    def _rule_of(self, layer: FastWeight, index: int, config: InPlaceTTTConfig) -> DeclaredRule:
        eta = config.eta[sorted(self.layers).index(index)] if isinstance(config.eta, tuple) else config.eta
        return DeclaredRule.of(layer, config, eta, self.training)

    @cached_property
    def _fewest_logits(self) -> dict[str, int]:
        """The argument that makes the model compute the last token's logits alone; empty if there is none."""
        return (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.lm.forward).parameters else {}
        )

    def forward(self, ids: Tensor, **kwargs: Any) -> None:
        """Runs the model once. The readings use the TTT layers' outputs, not the logits."""
        self.lm(input_ids=ids, **self._fewest_logits, **kwargs)

    def read(self, ids: Tensor, **kwargs: Any) -> Recording:
        with recording(self.lm, self.config) as record:
            self.forward(ids, **{"use_cache": False, **kwargs})
        return record

    @cached_property
    def takes_padding(self) -> bool:
        """True if the model accepts padded rows. Models with an attention window refuse them."""
        try:
            self.read(
                self.ids(2, 2), attention_mask=torch.tensor([[0, 1], [1, 1]], device=self.ids(1, 1).device)
            )
        except InPlaceTTTError:
            return False
        return True

    def deviations(self, scene: Scene) -> dict[str, dict[int, float]]:
        """Returns the errors of each reading by its name, then by layer."""
        return {name: self.errors(record, documents) for name, record, documents in scene(self)}

    def errors(self, record: Recording, documents: Documents) -> dict[int, float]:
        """Returns by layer the error of its outputs against the declared rule.

        Under autocast, or if a solve amplifies rounding, another limit applies than the model's. The error is
        then scaled by the ratio of the two limits, and can be compared with the model's own limit.
        """
        own = usual = limits(self.lm.dtype).outputs
        if record.dtype not in (None, self.lm.dtype):
            usual = limits(record.dtype).outputs * room(record.dtype, self.config)
        found = {}
        for i, layer in record.layers.items():
            rule = record.rules.get(i) or self._rule_of(layer, i, record.config)
            rule = dataclasses.replace(rule, dtype=record.dtype or rule.dtype)
            limit = max(usual, error_of_solve(record, i, documents, rule))
            found[i] = own / limit * deviation(record, i, layer, documents, rule)
        return found
