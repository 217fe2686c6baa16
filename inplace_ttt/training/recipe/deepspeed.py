"""Checks a recipe's DeepSpeed settings before the run is prepared.

They must agree with the recipe's own settings, and DeepSpeed must accept them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import one_line, shown
from ...files.schema import WrongSetting, require

_TABLES = (
    "bf16",
    "fp16",
    "data_types",
    "checkpoint",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)
_KNOWN = (
    "activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger "
    "communication_data_type compile "
    "compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last "
    "datastates_ckpt "
    "disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler "
    "fp16 "
    "gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor "
    "graph_harvesting hybrid_engine "
    "log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients "
    "progressive_layer_drop "
    "quantize_training scheduler seq_parallel_communication_data_type sequence_parallel_size "
    "sparse_attention sparse_gradients "
    "steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size "
    "train_micro_batch_size_per_gpu "
    "use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"
)
KNOWN = frozenset(_KNOWN.split())
"""Top-level keys of a config in DeepSpeed 0.18 and 0.19."""


def check_deepspeed(settings: Mapping[str, Any], own: Mapping[str, tuple[str, Any]]) -> None:
    """Checks DeepSpeed settings.

    Args:
        settings: the recipe's DeepSpeed config.
        own: the values that the recipe fills in. It maps `key` or `table.key` to the recipe's own name for
            the setting and its value.

    Raises:
        WrongSetting: if a setting contradicts the recipe, or DeepSpeed refuses it.
    """
    for name in ("optimizer", "scheduler"):
        require(
            name not in settings,
            "deepspeed",
            f"{name} would replace the recipe's settings under training; leave it out",
        )
    for name in _TABLES:
        value = _at(settings, name, {})
        require(isinstance(value, Mapping | None), "deepspeed", f"{name} must be a table, got {shown(value)}")
    for name, (setting, value) in own.items():
        given = _at(settings, name, "auto")
        same = given == value and isinstance(given, bool) == isinstance(value, bool)
        require(
            given == "auto" or same,
            "deepspeed",
            f"{name} is {shown(given)}, but {setting} sets it to {shown(value)}; leave it out",
        )
    try:
        with _silent():
            from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
    except ImportError:  # a plan needs no DeepSpeed
        return
    alone = {name: value for name, value in settings.items() if name not in own}
    try:
        with _silent():
            DeepSpeedConfig({**alone, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
            if (dtype := _at(settings, "data_types.grad_accum_dtype", None)) is not None:
                DtypeEnum(dtype)
    except Exception as error:
        raise WrongSetting(
            "deepspeed", f"DeepSpeed refuses it: {_said(error)}; correct it, or leave it out"
        ) from None


def without_effect(settings: Mapping[str, Any]) -> list[str]:
    """Returns a warning for each top-level key that DeepSpeed ignores."""
    return [
        f"deepspeed.{name} is not a setting of DeepSpeed, which ignores it; correct its name or "
        "place, or leave it out."
        for name in settings
        if name not in KNOWN
    ]


def _at(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of `key` or `table.key`."""
    table, _, key = name.rpartition(".")
    held = settings.get(table) if table else settings
    return held.get(key, default) if isinstance(held, Mapping) else default


def _said(error: Exception) -> str:
    """Returns DeepSpeed's message. An error of pydantic also gives the place and the value."""
    if not hasattr(error, "errors"):
        return one_line(error).rstrip(".")
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {shown(first['input'])}"


@contextmanager
def _silent() -> Iterator[None]:
    """Silences DeepSpeed, which logs its accelerator and more when it is imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
