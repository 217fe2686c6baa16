"""Runs every measurement of a model on some rows, and derives the findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..errors import InPlaceTTTError
from ..surgery import config_of
from .diagnosed_model import GENERATOR, DiagnosedModel, Key
from .findings import SEVERITIES, Finding
from .gradients import Rates, summed
from .measurements import Measurements, measure
from .rules import findings_of

Progress = Callable[[int, int, str], None]
PAPER_RATE = 5e-6
_GROUPS = ("conv", "proj", "weight", "embeddings")


@dataclass(frozen=True)
class Diagnosis:
    """Holds the measurements and the findings of a model.

    Attributes:
        subject: name of the model.
        measured: the measurements.
        findings: the findings, the most severe first.
        rows: number of rows B and of tokens T.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.diagnostics import diagnose
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> diagnosis = diagnose(model, {"input_ids": torch.randint(32000, (2, 50))})
        >>> diagnosis.rows
        (2, 50)
    """

    subject: str
    measured: Measurements
    findings: tuple[Finding, ...]
    rows: tuple[int, int]

    def of(self, severity: str) -> list[Finding]:
        """Selects the findings of one severity.

        Args:
            severity: "severe", "warning" or "info".

        Returns:
            The findings, in the order of `findings`.

        Examples:
            >>> "zero-init" in [finding.id for finding in diagnosis.of("info")]
            True
        """
        return [finding for finding in self.findings if finding.severity == severity]

    def to_dict(self) -> dict[str, Any]:
        """Converts the diagnosis to JSON values.

        Returns:
            The values of `diagnose.json`. Numbers that are not finite are None.

        Examples:
            >>> [layer["layer"] for layer in diagnosis.to_dict()["layers"]]
            [0]
        """
        m = self.measured
        return _plain(
            {
                "subject": self.subject,
                "rows": list(self.rows),
                "chunk_size": m.layout.chunk_size,
                "chunks_read": m.layout.writes(),
                "loss": m.gradients.loss,
                "groups": {name: _group(m, name) for name in _GROUPS},
                "layers": [_layer(m, index) for index in m.etas],
                "effect_of_all_writes": None if m.all_writes is None else asdict(m.all_writes),
                "keys_of_all_layers": {str(index): asdict(keys) for index, keys in sorted(m.keys.items())},
                "advisor": {sweep.name: sweep.to_dict() for sweep in m.sweeps},
                "findings": [finding.to_dict() for finding in self.findings],
            }
        )


def diagnose(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    learning_rates: Rates | float | None = None,
    float32_masters: bool = False,
    name: str | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Diagnoses gradient flow, writes, precision and safe ranges of a converted model on rows of tokens.

    docs/diagnostics.md lists the findings. The measurements change the model. Afterwards its parameters,
    `.grad` and modes, and the random generators, are restored bit by bit. Parameters that require a gradient
    count as trained.

    Args:
        model: a converted model.
        batch: input_ids [B, T], int64, and optionally attention_mask, position_ids and labels of that shape.
        learning_rates: rates of Adam's first step, one number or `Rates`. Default: 5e-6, as in the paper's
            continued training.
        float32_masters: True if the optimizer keeps parameters in float32, as DeepSpeed does. No step is then
            lost to rounding.
        name: name of the model in the report. Default: the name of its class.
        tokenizer: decodes the token that a finding names.
        progress: called with passes done, passes expected and the title of the next pass.

    Returns:
        The diagnosis.

    Raises:
        InPlaceTTTError: if the model is not converted, uses several steps per chunk, or has partitioned
            weights. Also if the rows do not fit the model, or a learning rate is negative or not finite.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.diagnostics import diagnose
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> diagnosis = diagnose(model, {"input_ids": torch.randint(32000, (2, 50))}, learning_rates=1e-3)
        >>> "zero-init" in [finding.id for finding in diagnosis.findings]  # a fresh conversion
        True
    """
    if config_of(model).steps_per_chunk > 1:
        raise InPlaceTTTError(
            "a diagnosis makes a training step, and steps_per_chunk above 1 cannot be trained; diagnose a "
            "conversion with steps_per_chunk=1."
        )
    diagnosed = DiagnosedModel.of(model, batch, tokenizer)
    rate = PAPER_RATE if learning_rates is None else learning_rates
    rates = rate if isinstance(rate, Rates) else Rates(rate, rate, rate)
    steps = _Steps(progress, 5 + len(diagnosed.layers) + 10)
    measured = measure(diagnosed, rates, steps)
    found = findings_of(
        diagnosed,
        measured,
        rates,
        steps,
        rates_given=learning_rates is not None,
        float32_masters=float32_masters,
    )
    steps.finish()
    findings = sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
    rows, tokens = diagnosed.inputs["input_ids"].shape
    return Diagnosis(name or type(model).__name__, measured, tuple(findings), (rows, tokens))


class _Steps:
    """Counts passes for a progress bar. A fault adds passes to the expected number."""

    def __init__(self, progress: Progress | None, expected: int) -> None:
        self.progress, self.expected, self.done = progress, expected, 0

    def __call__(self, title: str) -> None:
        if self.progress is not None:
            self.progress(self.done, max(self.expected, self.done + 1), title)
        self.done += 1

    def finish(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.done, "")


def _group(m: Measurements, kind: str) -> dict[str, Any]:
    """Returns sizes and gradients of one kind of parameter, over all layers."""
    g = m.gradients
    sizes, norms, steps, weights = (
        summed(x, name)
        for x, name in ((m.sizes, kind), (g.norms, kind), (g.steps, kind), (g.norms, "weight"))
    )
    return _flow(
        sizes, norms, steps, weights, any(trains for (_, name), trains in m.trained.items() if name == kind)
    )


def _parameter(m: Measurements, key: Key) -> dict[str, Any]:
    """Returns sizes and gradients of one parameter."""
    g = m.gradients
    return _flow(
        m.sizes[key], g.norms.get(key), g.steps.get(key), g.norms.get((key[0], "weight")), m.trained[key]
    )


def _flow(
    size: float | None, gradient: float | None, step: float | None, of_weight: float | None, trained: bool
) -> dict[str, Any]:
    return {
        "parameter": size,
        "gradient": gradient,
        "adam_step": step,
        "step_over_parameter": _over(step, size),
        "gradient_over_weight": _over(gradient, of_weight),
        "trained": trained,
    }


def _layer(m: Measurements, index: int) -> dict[str, Any]:
    writes, keys, effect = m.writes.get(index), m.keys.get(index), m.effects.get(index)
    after = (
        None
        if m.after_step is None
        else {name: m.after_step.norms.get((index, name)) for name in (*GENERATOR, "weight")}
    )
    return {
        "layer": index,
        "eta": m.etas[index],
        "parameters": {
            name: _parameter(m, (index, name)) for name in (*GENERATOR, "weight") if (index, name) in m.sizes
        },
        "gradients_after_first_step": after,
        "gradient_by_chunk": m.gradients.by_chunk.get(index, []),
        "clipped_in_training": m.gradients.clipped.get(index, 0.0),
        "writes": None
        if writes is None
        else {
            "state_ratio": writes.state_ratio,
            "growth": writes.growth,
            "clipped": writes.clipped,
            "alignment": writes.alignment,
            "effective_rank": writes.effective_rank,
            "gate_mean": writes.gate_mean,
            "gate_spread": writes.gate_spread,
            "by_chunk": [asdict(chunk) for chunk in writes.by_chunk],
        },
        "keys": None if keys is None else asdict(keys),
        "effect": None
        if effect is None
        else {
            "loss_change": effect.loss.loss,
            "stderr": effect.loss.stderr,
            "logit_change": effect.logits,
            "of_few_tokens": asdict(effect.few),
        },
        "precision": {
            "state": sorted(str(dtype).removeprefix("torch.") for dtype in m.states[index]),
            "lost": None if writes is None else asdict(writes.lost),
        },
    }


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
