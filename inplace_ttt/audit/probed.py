"""The yardsticks of readings: each layer's declared rule, and plain gradient steps on the whole model."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..config import InPlaceTTTConfig
from ..layer.fast_linear import FastWeight
from ..surgery import config_of, disable_ttt
from .declared_rule import DeclaredRule
from .gradient_rule import GradientRule
from .limits import STEPS, limits, room
from .prepared import Prepared
from .recorded_errors import STRENGTH, base_output, deviation, error_of_solve
from .recording import Documents, LogitsRecord, Recording, recording, recording_logits

_STRENGTH_OF_STEPS = 0.3
"""`STRENGTH` for gradient steps. Much stronger steps would amplify rounding."""


def prepared(lm: Any, seed: int) -> AbstractContextManager[Prepared]:
    """Returns a context with the model prepared for readings.

    Args:
        lm: a converted model.
        seed: seed of the token ids and the target generator.
    """
    return yardstick(config_of(lm)).of(lm, seed)


def yardstick(config: InPlaceTTTConfig) -> type[Prepared]:
    """Returns the class that measures readings of a model with these settings."""
    return Stepped if config.target == "gradient" else Probed


class Probed(Prepared):
    """A prepared model whose TTT layers are compared one by one with the rules that they declare."""

    by_layers = True
    differs = (
        "the outputs of layer {layer} differ from the declared rule by {error:.2g} of the size of a read"
    )

    @staticmethod
    def limit(dtype: torch.dtype) -> float:
        return limits(dtype).outputs

    def recording(self) -> AbstractContextManager[Recording]:
        return recording(self.lm, self.config)

    def strengthen(self, relative: bool) -> list[float]:
        record = self.read(self.ids(1, 4 * self.chunk))
        norms = []
        for index, layer in self.layers.items():
            z, source, _, writes = record.of(index, record.whole()[0])
            rule = self.rule(index)
            reads, base = rule.reads(z, source, writes), base_output(layer, z)
            wanted = base.norm() if bool(base.any()) else reads.norm()
            factor = float(STRENGTH * wanted / reads.norm()) if bool(reads.any()) else 1.0
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
        # the list itself is read, because `eta_of` belongs to the code under audit
        eta = config.eta[sorted(self.layers).index(index)] if isinstance(config.eta, tuple) else config.eta
        return DeclaredRule.of(layer, config, eta, self.training)

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


class Stepped(Prepared):
    """A prepared model with `target: gradient`, whose logits are compared with plain gradient steps."""

    by_layers = False
    differs = "the logits differ from plain gradient steps by {error:.2g} of the writes' effect"

    @staticmethod
    def limit(dtype: torch.dtype) -> float:
        return STEPS[dtype]

    def recording(self) -> AbstractContextManager[LogitsRecord]:
        return recording_logits(self.lm, self.config)

    def strengthen(self, relative: bool) -> list[float]:
        rule = GradientRule(self.lm, self.config)
        rule.logits(self.ids(1, 3 * self.chunk))
        factor = _STRENGTH_OF_STEPS / rule.reads if rule.reads else 1.0
        for layer in self.layers.values():
            assert layer.ttt.gain is not None
            layer.ttt.gain = layer.ttt.gain * factor
        return [
            factor * norm / (float(rule.rules[index].tensors["w0"].norm()) if relative else 1.0)
            for index, norm in rule.deltas
        ]

    @torch.no_grad()
    def errors(self, record: LogitsRecord, documents: Documents) -> dict[int, float]:
        """Returns the error of all logits, relative to the effect of the writes, as that of layer 0.

        The result is empty if some tokens of the reading do not write.
        """
        if not all(piece.writes for document in documents for piece in document):
            return {}
        off = size = 0.0
        for document in documents:
            ids, known, logits = record.of(document)
            wanted = GradientRule(record.lm, record.config).logits(ids[None])[known].double()
            with disable_ttt(record.lm):
                without = record.lm(input_ids=ids[None], use_cache=False).logits[0, known].double()
            off += float((logits.double() - wanted).square().sum())
            size += float((without - wanted).square().sum())
        return {0: float(off / size) ** 0.5 if size else float("inf")}
