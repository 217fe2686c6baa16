"""Plans a run from its recipe alone: bytes, operations, tokens, steps, and warnings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ...config import InPlaceTTTConfig
from ...surgery import config_of, fast_weights
from ..model import meta_model
from ..recipe.deepspeed import without_effect
from ..recipe.recipe import Recipe
from ..ulysses import attention_heads, sharing_problems
from .device_memory import (
    DeviceMemory,
    ModelSize,
    checkpoint_bytes,
    communication,
    deepspeed_memory,
    saved_by_quantization,
)
from .flops import attention_flops, attention_of_targets, fast_weight_flops, fast_weight_sizes
from .meta_step import StepCost, evaluation_cost, step_cost

_GB = 10**9


@dataclass(frozen=True)
class TrainingPlan:
    """Holds the figures that `inplace-ttt plan` prints.

    Bytes are per device and optimizer step, unless stated otherwise.

    Attributes:
        model_type: `model_type` of the text model's config.
        parameters: number of all parameters.
        trained_parameters: number of parameters that learn.
        ttt_parameters: number of the new parameters that learn.
        ttt_layers: indices of the TTT layers.
        chunk_size: tokens per chunk.
        devices: number of devices.
        zero_stage: ZeRO stage.
        sequence_parallel: ranks that share one row.
        per_device_bytes: bytes of each part at the peak of a step, and their total.
        evaluation_bytes: bytes at the peak of reading held-out rows; 0 if nothing is held out.
        host_bytes: bytes offloaded to host memory.
        checkpoint_bytes: bytes of one checkpoint on disk.
        disk_bytes: bytes of checkpoints and trained model on disk, at the peak of the run.
        saving_host_bytes: host memory of the first node while ZeRO-3 saves.
        logits_bytes: bytes of logits at the peak of the activations.
        state_bytes_per_sequence: bytes of the states S of one sequence, over all layers.
        communication_bytes: bytes that one device sends, for each purpose.
        steps: optimizer steps of the run.
        tokens: tokens of the run.
        tokens_per_step: tokens per optimizer step, over all devices.
        rows_per_step: rows per optimizer step, over all devices.
        sequence_length: tokens per row.
        chunks_per_row: chunks of a document as long as a row. The writes of all but the last are read.
        flops_per_step: operations per optimizer step over all devices, with recomputation.
        flops: operations of the run.
        fast_weight_flops: fraction of `flops` that TTT adds.
        warnings: one sentence per problem.
    """

    model_type: str
    parameters: int
    trained_parameters: int
    ttt_parameters: int
    ttt_layers: list[int]
    chunk_size: int
    devices: int
    zero_stage: int
    sequence_parallel: int
    per_device_bytes: dict[str, int]
    evaluation_bytes: int
    host_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    saving_host_bytes: int
    logits_bytes: int
    state_bytes_per_sequence: int
    communication_bytes: dict[str, int]
    steps: int
    tokens: int
    tokens_per_step: int
    rows_per_step: int
    sequence_length: int
    chunks_per_row: int
    flops_per_step: int
    flops: int
    fast_weight_flops: float
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Converts the plan to JSON values.

        Returns:
            The figures by name.
        """
        return dataclasses.asdict(self)


def make_plan(recipe: Recipe, device_memory: int | None = None) -> TrainingPlan:
    """Plans a run. It reads the model's config, but never its weights.

    Args:
        recipe: the run's recipe.
        device_memory: bytes of a device. If they do not suffice, the plan warns.

    Returns:
        The plan. Its `warnings` name each part of the run that will not fit or not train.

    Raises:
        InPlaceTTTError: if the model's config cannot be read, or the recipe's `ttt` does not fit the model.

    Examples:
        >>> import json
        >>> from pathlib import Path
        >>> from inplace_ttt.training.plan import make_plan
        >>> from inplace_ttt.training.recipe import load_recipe
        >>> small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
        >>> recipe = {
        ...     "model": {"config": {**small, "num_hidden_layers": 2}, "tokenizer": "./smollm2-135m"},
        ...     "ttt": {"chunk_size": 64},
        ...     "data": {"train": "book.txt", "sequence_length": 512},
        ...     "training": {"steps": 20, "learning_rate": 1e-3},
        ...     "output": "runs/small",
        ... }
        >>> _ = Path("small.yaml").write_text(json.dumps(recipe))  # JSON is YAML too
        >>> plan = make_plan(load_recipe("small.yaml"), device_memory=24 * 10**9)
        >>> plan.chunks_per_row, plan.tokens, plan.warnings
        (8, 10240, [])
    """
    model = meta_model(recipe)
    ttt, text = config_of(model), model.config.get_text_config()
    layers = fast_weights(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    heads, kv_heads = attention_heads(text)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    size = ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained),
        largest=max(p.numel() for p in trained),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        queries=width * heads,
        # with fewer heads than ranks, each head is repeated until each rank has one
        keys=width * max(kv_heads, recipe.parallel.sequence_parallel_size),
        states=tuple(ttt.state_bytes([layer]) for layer in fast_weight_sizes(model)),
        saved=saved_by_quantization(recipe, model),
    )
    step = step_cost(recipe)
    holds_out = bool(recipe.data.validation or recipe.data.validation_documents)
    memory = deepspeed_memory(recipe, size, step, evaluation_cost(recipe) if holds_out else 0)
    checkpoint, final = checkpoint_bytes(recipe, size)
    checkpoints = min(
        recipe.monitor.save_total_limit + 1, recipe.steps // recipe.monitor.save_steps
    )  # a new one is written before an old one is deleted
    again = int(recipe.training.gradient_checkpointing)
    flops = step.product_flops
    if recipe.model.attn_implementation != "eager":  # the step counts the products of eager attention
        flops += attention_flops(recipe, text, 3 + again) + attention_of_targets(recipe, model)
    micro_steps = recipe.training.gradient_accumulation_steps * recipe.parallel.world
    tokens_per_step = recipe.rows_per_step * recipe.data.sequence_length
    return TrainingPlan(
        model_type=text.model_type,
        parameters=size.parameters,
        trained_parameters=size.trained,
        ttt_parameters=sum(
            p.numel() for layer in layers.values() for p in layer.ttt.parameters() if p.requires_grad
        ),
        ttt_layers=list(layers),
        chunk_size=ttt.chunk_size,
        devices=recipe.parallel.world,
        zero_stage=recipe.zero_stage,
        sequence_parallel=recipe.parallel.sequence_parallel_size,
        per_device_bytes={**memory.parts, "total": memory.total},
        evaluation_bytes=memory.evaluation,
        host_bytes=memory.host,
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoints * checkpoint + final,
        saving_host_bytes=final if recipe.zero_stage == 3 else 0,
        logits_bytes=step.logits,
        state_bytes_per_sequence=size.state_bytes,
        communication_bytes=communication(recipe, size),
        steps=recipe.steps,
        tokens=recipe.steps * tokens_per_step,
        tokens_per_step=tokens_per_step,
        rows_per_step=recipe.rows_per_step,
        sequence_length=recipe.data.sequence_length,
        chunks_per_row=-(-recipe.data.sequence_length // ttt.chunk_size),
        flops_per_step=flops * micro_steps,
        flops=flops * micro_steps * recipe.steps,
        fast_weight_flops=fast_weight_flops(recipe, model, again) / flops,
        warnings=[*_will_not_train(recipe, ttt, text), *_will_not_fit(recipe, memory, step, device_memory)],
    )


def _will_not_train(recipe: Recipe, ttt: InPlaceTTTConfig, text: PreTrainedConfig) -> list[str]:
    """Returns a sentence for each setting under which a part would not learn, or the run would stop."""
    o, length, found = recipe.training, recipe.data.sequence_length, []
    chunk, layers = ttt.chunk_size, ttt.layers
    etas = [ttt.eta_of(position) for position in range(len(layers))]
    if chunk >= length:
        found.append(
            f"A chunk of {chunk} tokens is at least as long as a row of {length}: no write is ever read, and "
            "conv and P learn nothing; "
            f"lower ttt.chunk_size below {length}, best to {max(length // 8, 1)} or less."
        )
    elif chunk * 2 > length:
        found.append(
            f"A row of {length} tokens holds one whole chunk of {chunk}, so at most one write per row is "
            "ever read; lower ttt.chunk_size."
        )
    if not any(etas):
        found.append("eta is 0: nothing is written, and conv and P learn nothing; set ttt.eta above 0.")
    elif not all(etas):
        found.append(
            f"eta is 0 in layers {[i for i, eta in zip(layers, etas, strict=True) if not eta]}: they write "
            "nothing."
        )
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and length > context:
        found.append(
            f"Rows of {length} tokens are longer than the model's context of {context}; lower "
            "data.sequence_length, or extend the context "
            "in model.overrides (max_position_embeddings and rope_parameters)."
        )
    for name in ("warmup_steps", "ttt_warmup_steps", "eta_warmup_steps"):
        value = getattr(o, name)
        if value and value >= recipe.steps:
            found.append(
                f"The warm-up training.{name} of {value} steps is at least as long as the run of "
                f"{recipe.steps}; lower it."
            )
    return [*found, *without_effect(recipe.deepspeed_settings), *sharing_problems(recipe, chunk, text)]


def _will_not_fit(recipe: Recipe, memory: DeviceMemory, step: StepCost, available: int | None) -> list[str]:
    if available is None:
        return []
    found = []
    if memory.total > available:
        largest = max(memory.parts, key=lambda name: memory.parts[name])
        found.append(
            f"A device needs {memory.total / _GB:.1f} GB but has {available / _GB:.1f}; the largest part "
            f"is {largest} with "
            f"{memory.parts[largest] / _GB:.1f} GB: {_remedy(recipe, largest, step)}."
        )
    if memory.evaluation > available:
        found.append(
            f"A device needs {memory.evaluation / _GB:.1f} GB to read held-out rows but has "
            f"{available / _GB:.1f}; lower "
            "training.batch_size, or raise parallel.sequence_parallel_size."
        )
    return found


def _remedy(recipe: Recipe, part: str, step: StepCost) -> str:
    o, ranks = recipe.training, recipe.parallel.world
    if part == "activations":
        if step.logits > step.activations // 3 and not o.liger:
            return f"{step.logits / _GB:.1f} of them are logits, so set training.liger: true"
        if not o.gradient_checkpointing:
            return "set training.gradient_checkpointing: true"
        if o.batch_size > 1:
            return "lower training.batch_size and raise training.gradient_accumulation_steps"
        return "raise parallel.sequence_parallel_size, or lower data.sequence_length"
    if part == "buckets":
        return (
            "set smaller buckets in the DeepSpeed settings (reduce_bucket_size, stage3_max_live_parameters)"
        )
    stage = {"optimizer": 1, "gradients": 2, "parameters": 3}[part]
    if ranks > 1 and recipe.zero_stage < stage:
        return f"use ZeRO stage {stage} or 3"
    if part == "optimizer":
        return "offload the optimizer to the host, or use more devices"
    return "use more devices under ZeRO-3, or train less (training.trainable)"
