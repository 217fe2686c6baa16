"""Computes the bytes that one device holds and sends per step, for each ZeRO stage and for shared rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..loop.arguments import accumulates_in_float32
from ..recipe.recipe import Recipe
from .meta_step import StepCost

_REDUCE_BUCKET, _MAX_LIVE = 500_000_000, 1_000_000_000
"""DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters, in elements."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model, from which its memory and communication follow.

    Attributes:
        parameters: number of all parameters.
        trained: number of parameters that learn.
        largest: number of elements of the largest parameter that learns.
        buffers: bytes of buffers.
        hidden: width d.
        layers: number of layers.
        queries: channels of one layer's queries, over all heads.
        keys: channels of one layer's keys, over all heads.
        states: bytes of one sequence's state, per TTT layer.
        saved: bytes that quantization saves.
    """

    parameters: int
    trained: int
    largest: int
    buffers: int
    hidden: int
    layers: int
    queries: int
    keys: int
    states: tuple[int, ...]
    saved: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the states S of one sequence, over all layers."""
        return sum(self.states)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a device holds at the peak of a step.

    Attributes:
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients.
        optimizer: bytes of float32 masters and moments.
        activations: bytes of activations.
        buckets: bytes of DeepSpeed's communication buffers.
        host: bytes that are offloaded to host memory.
        evaluation: total bytes at the peak of reading held-out rows, between two steps.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int
    host: int = 0
    evaluation: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The device's bytes at the peak of a step, by part."""
        return {
            name: getattr(self, name)
            for name in ("parameters", "gradients", "optimizer", "activations", "buckets")
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def deepspeed_memory(recipe: Recipe, model: ModelSize, step: StepCost, evaluation: int = 0) -> DeviceMemory:
    """Returns the memory of one device under DeepSpeed.

    Weights have the recipe's dtype, and so do gradients, unless they are summed in float32. Masters and
    moments are float32.

    Args:
        recipe: the run's recipe.
        model: sizes of the model.
        step: cost of one micro-step.
        evaluation: bytes that one batch of held-out rows adds to the weights; 0 if nothing is held out.
    """
    settings: Mapping[str, Any] = recipe.deepspeed_settings.get("zero_optimization", {})
    stage, ranks = recipe.zero_stage, recipe.parallel.world
    size = 4 if recipe.model.dtype == "float32" else 2
    own_gradients = (
        (4 if accumulates_in_float32(recipe) else size) * model.trained // (ranks if stage >= 2 else 1)
    )
    masters = 12 if stage or size == 2 else 8
    optimizer = masters * model.trained // (ranks if stage else 1)
    parameters = size * model.parameters // (ranks if stage == 3 else 1) - model.saved + model.buffers
    buckets = 0
    if stage:
        bucket = _elements(settings.get("reduce_bucket_size", _REDUCE_BUCKET), model)
        overlaps = settings.get("overlap_comm", stage == 3)
        buckets = size * bucket * (2 if overlaps else 1)
    if stage == 3:
        buckets += size * min(
            model.parameters, _elements(settings.get("stage3_max_live_parameters", _MAX_LIVE), model)
        )
    offloads = _device(settings, "offload_optimizer") == "cpu"
    host = optimizer if offloads else 0
    if stage == 3 and _device(settings, "offload_param") == "cpu":
        host, parameters = host + parameters, model.buffers
    # The update uses two float32 copies of the gradient, after the activations are freed.
    update = 0 if offloads else 8 * model.trained // ranks if stage else 8 * model.largest
    accumulates = stage >= 2 or recipe.training.gradient_accumulation_steps > 1
    beside = step.activations if accumulates else step.step - own_gradients
    kept = recipe.training.gradient_checkpointing
    activations = max(beside + _shared_rows(recipe, model, one_layer=kept), update)
    held = 0 if offloads else optimizer
    if evaluation:
        # Between steps, ZeRO-3 keeps gradients and buckets; the other stages free them.
        evaluation += (
            parameters
            + held
            + _shared_rows(recipe, model, one_layer=True)
            + (own_gradients + buckets if stage == 3 else 0)
        )
    return DeviceMemory(parameters, own_gradients, held, activations, buckets, host, evaluation)


def saved_by_quantization(recipe: Recipe, model: PreTrainedModel) -> int:
    """Returns the bytes that `model.load_in` saves on linear maps that do not learn, except the output's.

    Args:
        recipe: the run's recipe.
        model: the recipe's model on the meta device.
    """
    if recipe.model.load_in is None:
        return 0
    output = model.get_output_embeddings()
    linear = (
        module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not output
    )
    return sum(
        weight.nbytes - _packed(weight, recipe.model.load_in) for weight in linear if not weight.requires_grad
    )


def _packed(weight: Tensor, how: str) -> int:
    """Returns the bytes of a packed weight.

    8 bits have a float32 scale per row. 4 bits have an 8-bit scale per 64 elements, and a float32 scale per
    256 of these scales.
    """
    numbers = weight.numel()
    return (
        numbers + 4 * weight.shape[0]
        if how == "8bit"
        else numbers // 2 + numbers // 64 + 4 * -(-numbers // (64 * 256))
    )


def single_process_memory(model: ModelSize, step: StepCost, size: int, evaluation: int = 0) -> DeviceMemory:
    """Returns the memory of one process with torch's AdamW, without DeepSpeed.

    Args:
        model: sizes of the model.
        step: cost of one micro-step.
        size: bytes per element of weights, gradients and moments.
        evaluation: bytes that one batch of held-out rows adds to the weights.
    """
    parameters, gradients = size * model.parameters + model.buffers, size * model.trained
    activations = max(step.step - gradients, 2 * size * model.largest)
    return DeviceMemory(
        parameters,
        gradients,
        2 * gradients,
        activations,
        0,
        evaluation=parameters + 2 * gradients + evaluation,
    )


def checkpoint_bytes(recipe: Recipe, model: ModelSize) -> tuple[int, int]:
    """Returns the bytes on disk of one checkpoint to resume from, and of the trained model at the end.

    A checkpoint holds the model as transformers saves it, DeepSpeed's float32 masters and moments, and
    DeepSpeed's own copy of the weights. For LoRA, that copy leaves out frozen weights. Under ZeRO-3 it leaves
    out trained weights, because the masters replace them.
    """
    size = 4 if recipe.model.dtype == "float32" else 2
    adapter, stage = recipe.training.trainable == "lora", recipe.zero_stage
    final = size * (model.trained if adapter else model.parameters)
    masters = 12 if stage or size == 2 else 8
    copied = (model.trained if adapter else model.parameters) - (model.trained if stage == 3 else 0)
    return final + masters * model.trained + size * copied, final


def _shared_rows(recipe: Recipe, model: ModelSize, one_layer: bool) -> int:
    """Returns the bytes of the starting states of ranks that share rows, and of three states for the scan.

    Args:
        recipe: the run's recipe.
        model: sizes of the model.
        one_layer: hold the starting state of one layer at a time. Otherwise the backward holds all.
    """
    if recipe.parallel.sequence_parallel_size == 1 or not model.states:
        return 0
    states = [recipe.training.batch_size * state for state in model.states]
    return (max(states) if one_layer else sum(states)) + 3 * max(states)


def communication(recipe: Recipe, model: ModelSize) -> dict[str, int]:
    """Returns the bytes that one device sends per optimizer step. A ring of P sends P - 1 of P parts."""
    o, ranks, shared = recipe.training, recipe.parallel.world, recipe.parallel.sequence_parallel_size
    stage, size = recipe.zero_stage, 4 if recipe.model.dtype == "float32" else 2
    forwards = 2 if o.gradient_checkpointing else 1
    gradients = (
        size * model.trained * (2 if stage == 0 else o.gradient_accumulation_steps if stage >= 2 else 1)
    )
    parameters = {0: 0, 1: size * model.trained, 2: size * model.trained}.get(
        stage, 2 * size * model.parameters * o.gradient_accumulation_steps
    )
    length = recipe.data.sequence_length // shared
    passes = (forwards + 1) * o.gradient_accumulation_steps * o.batch_size
    scan = passes * 2 * model.state_bytes
    attention = passes * model.layers * size * length * 2 * (model.queries + model.keys)
    sent = {
        "gradients": gradients * (ranks - 1) // ranks,
        "parameters": parameters * (ranks - 1) // ranks,
        "fast_weight_scan": scan * (shared - 1) // shared,
        "attention": attention * (shared - 1) // shared,
    }
    return {**sent, "total": sum(sent.values())}


def _elements(value: Any, model: ModelSize) -> int:
    return model.hidden**2 if value == "auto" else int(value)  # as transformers fills in "auto"


def _device(settings: Mapping[str, Any], name: str) -> str | None:
    section = settings.get(name)
    return section.get("device") if isinstance(section, Mapping) else None
