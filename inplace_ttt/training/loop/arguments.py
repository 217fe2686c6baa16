"""Translates a recipe's settings for transformers and DeepSpeed."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
from transformers import TrainingArguments

from ..recipe.recipe import Recipe
from .meeting import Meeting


def training_arguments(recipe: Recipe, one_disk: bool = True) -> TrainingArguments:
    """Returns the Trainer's arguments.

    Call it after the process group is open, and before the model is built: ZeRO-3 then partitions the model
    while it loads.

    Args:
        recipe: the run's recipe.
        one_disk: True if all processes see the same output folder. Otherwise each node saves the files that
            its own processes need to resume.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    o, m, shared = recipe.training, recipe.monitor, recipe.parallel.sequence_parallel_size
    on_gpu = torch.cuda.is_available()
    parallelism = None
    if shared > 1:
        handler = DeepSpeedSequenceParallelConfig(
            sp_attn_implementation=recipe.model.attn_implementation, sp_seq_length_is_variable=True
        )
        parallelism = ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=shared,
            dp_replicate_size=recipe.parallel.world // shared,
            sp_handler=handler,
        )
    return TrainingArguments(
        output_dir=recipe.output,
        max_steps=recipe.steps,
        per_device_train_batch_size=o.batch_size,
        per_device_eval_batch_size=o.batch_size,
        gradient_accumulation_steps=o.gradient_accumulation_steps,
        learning_rate=o.learning_rate,
        max_grad_norm=o.max_grad_norm,
        **_recomputing(o.gradient_checkpointing),
        use_liger_kernel=o.liger,
        bf16=recipe.model.dtype == "bfloat16",
        use_cpu=not on_gpu,
        deepspeed=deepspeed_config(recipe, one_disk),
        parallelism_config=parallelism,
        logging_steps=m.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to=list(m.report_to),
        eval_strategy="steps" if m.eval_steps else "no",
        eval_steps=m.eval_steps or None,
        save_strategy="steps",
        save_steps=m.save_steps,
        save_total_limit=None,  # FastWeightTrainer removes old checkpoints once a new one is complete
        ignore_data_skip=True,  # a resumed run's rows start at its checkpoint
        remove_unused_columns=False,
        label_names=["labels"],
        ddp_timeout=round(60 * recipe.parallel.timeout_minutes),
        seed=o.seed,
        disable_tqdm=False,
    )


def _recomputing(on: bool) -> dict[str, Any]:
    """Returns the arguments of gradient checkpointing, with their names in this version of transformers."""
    name = (
        "activation_checkpointing"
        if hasattr(TrainingArguments, "activation_checkpointing")
        else "gradient_checkpointing"
    )
    return {name: on, f"{name}_kwargs": {"use_reentrant": False} if on else None}


def open_group(meeting: Meeting, recipe: Recipe) -> None:
    """Opens the run's process group, and registers it with DeepSpeed.

    Its timeout also becomes torch's default. DeepSpeed and accelerate reduce gradients in groups of their
    own. These use that default, and no argument can change it.
    """
    import deepspeed
    from torch.distributed import distributed_c10d

    timeout = timedelta(minutes=recipe.parallel.timeout_minutes)
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    meeting.open_group("nccl" if torch.cuda.is_available() else "gloo", timeout)
    deepspeed.init_distributed(auto_mpi_discovery=False, timeout=timeout)


def accumulates_in_float32(recipe: Recipe) -> bool:
    """Returns True if the gradients of micro-steps are summed in float32.

    In bfloat16 each sum would lose a bit. ZeRO 2 and 3 sum in float32 unless the DeepSpeed settings name
    another dtype. ZeRO 0 cannot, and ZeRO 1 would keep all gradients on each device.
    """
    types = recipe.deepspeed_settings.get("data_types")
    asked = types.get("grad_accum_dtype", "fp32") if isinstance(types, dict) else "fp32"
    return recipe.model.dtype == "float32" or (
        recipe.zero_stage >= 2 and asked in ("fp32", "float32", "float")
    )


def deepspeed_config(recipe: Recipe, one_disk: bool = True) -> dict[str, Any]:
    """Returns the recipe's DeepSpeed settings, completed from the recipe.

    Args:
        recipe: the run's recipe.
        one_disk: as in `training_arguments`.
    """
    settings = json.loads(json.dumps(recipe.deepspeed_settings))
    zero = settings.setdefault("zero_optimization", {"stage": 0})
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    ):
        settings.setdefault(name, "auto")
    settings.setdefault("bf16", {}).setdefault("enabled", "auto")
    if accumulates_in_float32(recipe):
        settings.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    if zero.get("stage", 0) == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    if not one_disk:
        settings.setdefault("checkpoint", {})["use_node_local_storage"] = True
    if zero.get("offload_optimizer"):
        settings.setdefault("zero_force_ds_cpu_optimizer", torch.cuda.is_available())
    return settings
