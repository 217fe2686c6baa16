"""Bytes that one device holds and sends in a step, for each ZeRO stage and for ranks that share rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .meta_step import StepCost
from .recipe import Recipe

_REDUCE_BUCKET, _MAX_LIVE = 500_000_000, 1_000_000_000
"""DeepSpeed's own defaults, in elements: reduce_bucket_size and stage3_max_live_parameters."""


@dataclass(frozen=True)
class ModelSize:
    """What the figures below follow from.

    parameters, trained, largest: numbers, of all, of those that learn, and in the largest of these. buffers: bytes.
    queries, keys: channels of one layer's queries and keys, all heads together. fast_weights: (d, h) of each TTT layer.
    """

    parameters: int
    trained: int
    largest: int
    buffers: int
    hidden: int
    layers: int
    queries: int
    keys: int
    fast_weights: tuple[tuple[int, int], ...]

    @property
    def state_bytes(self) -> int:
        """The float32 fast-weight state of one sequence, all layers."""
        return 4 * sum(d * h for d, h in self.fast_weights)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes a device holds at the peak of a step. host: what is offloaded to the machine's own memory instead."""

    parameters: int
    gradients: int
    optimiser: int
    activations: int
    buckets: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.activations + self.buckets


def deepspeed_memory(recipe: Recipe, model: ModelSize, step: StepCost) -> DeviceMemory:
    """Under DeepSpeed: the weights' dtype for weights and gradients, float32 masters and two float32 moments."""
    settings: Mapping[str, Any] = recipe.deepspeed_settings().get("zero_optimization", {})
    stage, ranks = recipe.zero_stage, recipe.parallel.world
    size = 4 if recipe.model.dtype == "float32" else 2
    own_gradients = size * model.trained // (ranks if stage >= 2 else 1)
    masters = 12 if stage or size == 2 else 8
    optimiser = masters * model.trained // (ranks if stage else 1)
    parameters = size * model.parameters // (ranks if stage == 3 else 1) + model.buffers
    buckets = 0
    if stage:
        bucket = _elements(settings.get("reduce_bucket_size", _REDUCE_BUCKET), model)
        overlaps = settings.get("overlap_comm", stage == 3)
        buckets = size * bucket * (2 if overlaps else 1)
    if stage == 3:
        buckets += size * min(model.parameters, _elements(settings.get("stage3_max_live_parameters", _MAX_LIVE), model))
    offloads = _device(settings, "offload_optimizer") == "cpu"
    host = optimiser if offloads else 0
    if stage == 3 and _device(settings, "offload_param") == "cpu":
        host, parameters = host + parameters, model.buffers
    # The update works on a float32 copy of the gradient and one more, after the activations are gone.
    update = 0 if offloads else 8 * model.trained // ranks if stage else 8 * model.largest
    accumulates = stage >= 2 or recipe.optimisation.accumulation > 1
    beside = step.activations if accumulates else step.step - own_gradients
    activations = max(beside + _shared_rows(recipe, model), update)
    return DeviceMemory(parameters, own_gradients, 0 if offloads else optimiser, activations, buckets, host)


def single_process_memory(model: ModelSize, step: StepCost, size: int) -> DeviceMemory:
    """One process with torch's AdamW and no DeepSpeed: everything in the weights' dtype of `size` bytes."""
    gradients = size * model.trained
    activations = max(step.step - gradients, 2 * size * model.largest)
    return DeviceMemory(size * model.parameters + model.buffers, gradients, 2 * gradients, activations, 0)


def _shared_rows(recipe: Recipe, model: ModelSize) -> int:
    """Ranks that share rows: the state each TTT layer starts from is kept for the backward, and three more in the exchange."""
    if recipe.parallel.sequence_parallel == 1 or not model.fast_weights:
        return 0
    states = [4 * recipe.optimisation.batch_size * d * h for d, h in model.fast_weights]
    return (max(states) if recipe.optimisation.gradient_checkpointing else sum(states)) + 3 * max(states)


def communication(recipe: Recipe, model: ModelSize) -> dict[str, int]:
    """Bytes that one device sends in an optimiser step, by ring algorithms: P - 1 of every P parts."""
    o, ranks, shared = recipe.optimisation, recipe.parallel.world, recipe.parallel.sequence_parallel
    stage, size = recipe.zero_stage, 4 if recipe.model.dtype == "float32" else 2
    forwards = 2 if o.gradient_checkpointing else 1
    gradients = size * model.trained * (2 if stage == 0 else o.accumulation if stage >= 2 else 1)
    parameters = {0: 0, 1: size * model.trained, 2: size * model.trained}.get(stage, 2 * size * model.parameters * o.accumulation)
    length = recipe.data.sequence_length // shared
    passes = (forwards + 1) * o.accumulation * o.batch_size
    scan = passes * sum(2 * 4 * d * h for d, h in model.fast_weights)
    attention = passes * model.layers * size * length * 2 * (model.queries + model.keys)
    sent = {
        "gradients": gradients * (ranks - 1) // ranks,
        "parameters": parameters * (ranks - 1) // ranks,
        "fast_weight_scan": scan * (shared - 1) // shared,
        "attention": attention * (shared - 1) // shared,
    }
    return {**sent, "total": sum(sent.values())}


def _elements(value: Any, model: ModelSize) -> int:
    return model.hidden**2 if value == "auto" else int(value)  # as transformers fills it in


def _device(settings: Mapping[str, Any], name: str) -> str | None:
    section = settings.get(name)
    return section.get("device") if isinstance(section, Mapping) else None
