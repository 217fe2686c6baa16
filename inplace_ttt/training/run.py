"""One process of a run: build the model and its rows, train, write the trained checkpoint and the report."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, TrainingArguments

from ..checkpoint.saved_tensors import verify_saved
from ..errors import InPlaceTTTError, NotSoError, one_line
from ..surgery import config_of
from .attention import sdpa_sees_documents
from .guards import FirstStep, GradientTap
from .model import build_model
from .monitor import DiagnoseCallback, EtaWarmup, LayerMonitor, document_to_diagnose
from .order import rows_to_come
from .recipe import Recipe
from .repeats import with_repeats
from .trainer import FastWeightTrainer, last_checkpoint, remove_incomplete

logger = logging.getLogger(__name__)

REPORT = "train_report.json"


def run(recipe: Recipe, *, resume: bool = True, audit: bool = True) -> dict[str, Any]:
    """Train by the recipe in this process, one of `recipe.parallel.world` that DeepSpeed's launcher started.

    resume: go on from the last complete checkpoint in `recipe.output`, if there is one.
    audit: refuse to start on a deviation from the paper that the recipe does not declare.
    Returns the report that is also written to `output`/train_report.json.
    """
    from .data import build_data

    if "RANK" not in os.environ:
        raise InPlaceTTTError("this is one process of a run; start them with `inplace-ttt train`, or with DeepSpeed's launcher.")
    world = int(os.environ["WORLD_SIZE"])
    if world != recipe.parallel.world:
        raise InPlaceTTTError(
            f"the recipe is for {recipe.parallel.world} processes and {world} run; set parallel.processes, or --num-processes."
        )
    output = Path(recipe.output)
    checkpoint = last_checkpoint(output) if resume else None
    done = _steps_of(checkpoint)
    if done >= recipe.steps:
        raise InPlaceTTTError(f"{checkpoint} has run all {recipe.steps} steps already; raise optimisation.steps, or name another output.")
    if audit and recipe.audit.profile is not None and checkpoint is None and os.environ["RANK"] == "0":
        refuse_undeclared(recipe, output)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output / "tensorboard"))
    arguments = training_arguments(recipe)
    main = arguments.process_index == 0
    model = build_model(recipe)
    tokenizer = read_tokenizer(recipe)
    chunk_size = config_of(model).chunk_size
    with arguments.main_process_first(desc="tokenising"):
        data = build_data(recipe, tokenizer, chunk_size)
    warnings = list(data.report.warnings)
    if main:
        output.mkdir(parents=True, exist_ok=True)
        for folder in remove_incomplete(output):
            logger.warning("%s was not written to its end and is removed", folder)
    if recipe.parallel.sequence_parallel > 1:
        check_heads(model.config, recipe.parallel.sequence_parallel)
        sdpa_sees_documents()
    model.config.use_cache = False
    gradients = GradientTap(model)
    callbacks = [FirstStep(gradients, warnings), LayerMonitor(recipe, gradients, warnings, output / "log.jsonl" if main else None)]
    if recipe.optimisation.eta_warmup_steps:
        callbacks.insert(0, EtaWarmup(recipe.optimisation.eta_warmup_steps))
    held_out = data.validation and data.validation.select(range(min(len(data.validation), recipe.monitor.evaluate_rows)))
    if recipe.monitor.diagnose_every and main:
        document = document_to_diagnose(data.train if held_out is None else held_out, chunk_size)
        callbacks.append(DiagnoseCallback(recipe, document, gradients, warnings, output / "diagnose"))
    trainer = FastWeightTrainer(
        recipe,
        checkpoint,
        model=model,
        args=arguments,
        train_dataset=with_repeats(rows_to_come(data.train, recipe, done), recipe.data.repeat, recipe.data.seed),
        eval_dataset=held_out,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=callbacks,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=accuracy,
    )
    began = time.perf_counter()
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    evaluation = trainer.evaluate() if data.validation is not None else {}
    final = save_final(trainer, recipe)
    report = {
        "output": str(final),
        "steps": trainer.state.global_step,
        "final_loss": next((log["loss"] for log in reversed(trainer.state.log_history) if "loss" in log), result.training_loss),
        "evaluation": {key: value for key, value in evaluation.items() if isinstance(value, (int, float))},
        "seconds": round(time.perf_counter() - began, 1),
        "resumed_from": str(checkpoint) if checkpoint else None,
        "data": data.report.to_dict(),
        "warnings": warnings,
        "recipe": recipe.to_dict(),
    }
    if main:
        (output / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return report


def read_tokenizer(recipe: Recipe) -> Any:
    """The recipe's tokenizer; None for data that needs none."""
    if recipe.data.recall is not None:
        return None
    try:
        return AutoTokenizer.from_pretrained(recipe.model.tokenizer_path)
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(f"{recipe.model.tokenizer_path} has no tokenizer ({one_line(error)}); set model.tokenizer.") from None


def check_heads(config: PreTrainedConfig, ranks: int) -> None:
    """Ulysses gives each rank whole heads."""
    text = config.get_text_config()
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise InPlaceTTTError(
            f"sequence_parallel {ranks} does not divide the model's {heads} attention heads and {kv_heads} key-value heads; "
            "choose a number that divides both, or is a multiple of the latter."
        )


def refuse_undeclared(recipe: Recipe, output: Path) -> None:
    """The audit before the first step, on a copy of the model, written beside the run; NotSoError on an undeclared deviation."""
    from .audit import audit_recipe, write_report

    report = audit_recipe(recipe)
    page = write_report(report, output)
    if report.undeclared:
        raise NotSoError(
            f"the run deviates from the {recipe.audit.profile} profile in {', '.join(report.undeclared)} without saying so; read {page}, "
            "then declare each with a reason under audit.deviations, or start with --no-audit."
        )


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """The Trainer's arguments; made before the model, so that ZeRO-3 partitions it while it loads."""
    import deepspeed
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    o, m, shared = recipe.optimisation, recipe.monitor, recipe.parallel.sequence_parallel
    on_gpu = torch.cuda.is_available()
    parallelism = None
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", auto_mpi_discovery=False)
    if shared > 1:
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=recipe.model.attention, sp_seq_length_is_variable=True)
        parallelism = ParallelismConfig(
            sp_backend="deepspeed", sp_size=shared, dp_replicate_size=recipe.parallel.world // shared, sp_handler=handler
        )
    return TrainingArguments(
        output_dir=recipe.output,
        max_steps=recipe.steps,
        per_device_train_batch_size=o.batch_size,
        per_device_eval_batch_size=o.batch_size,
        gradient_accumulation_steps=o.accumulation,
        learning_rate=o.learning_rate,
        max_grad_norm=o.max_grad_norm,
        gradient_checkpointing=o.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if o.gradient_checkpointing else None,
        use_liger_kernel=o.liger,
        bf16=recipe.model.dtype == "bfloat16",
        use_cpu=not on_gpu,
        deepspeed=deepspeed_config(recipe),
        parallelism_config=parallelism,
        logging_steps=m.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to=list(m.report_to),
        eval_strategy="steps" if m.evaluate_every else "no",
        eval_steps=m.evaluate_every or None,
        save_strategy="steps",
        save_steps=m.save_every,
        save_total_limit=None,  # the trainer's own rotation waits until a checkpoint is complete
        ignore_data_skip=True,  # the rows start where the run stopped
        remove_unused_columns=False,
        label_names=["labels"],
        seed=o.seed,
        disable_tqdm=False,
    )


def deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe's DeepSpeed settings, with what follows from the recipe filled in."""
    settings = json.loads(json.dumps(recipe.deepspeed_settings()))
    zero = settings.setdefault("zero_optimization", {"stage": 0})
    settings.setdefault("train_micro_batch_size_per_gpu", "auto")
    settings.setdefault("gradient_accumulation_steps", "auto")
    settings.setdefault("train_batch_size", "auto")
    settings.setdefault("gradient_clipping", "auto")
    settings.setdefault("bf16", {"enabled": "auto"})
    if zero.get("stage", 0) == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    if zero.get("offload_optimizer"):
        settings.setdefault("zero_force_ds_cpu_optimizer", torch.cuda.is_available())
    return settings


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows to a batch [B, T]; no attention mask, since position_ids show the documents."""
    return {
        name: torch.stack([torch.as_tensor(row[name], dtype=torch.int64) for row in rows])
        for name in ("input_ids", "position_ids", "labels")
    }


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of the targets that the most likely token hits."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    scored = labels != -100
    return {"accuracy": float((guesses == labels)[scored].mean()) if scored.any() else float("nan")}


def save_final(trainer: FastWeightTrainer, recipe: Recipe) -> Path:
    """The trained checkpoint as `output`/final, whole or not at all; for LoRA the adapter alone."""
    final = Path(recipe.output) / "final"
    staging = final.with_name(".final.partial")
    trainer.model.config.use_cache = True
    try:
        trainer.save_model(str(staging))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InPlaceTTTError(f"cannot save {final}: {error}; free some space, and run again to go on from the last checkpoint.") from None
    if trainer.args.should_save:
        (staging / "training_args.bin").unlink(missing_ok=True)
        if isinstance(trainer.model, PreTrainedModel):
            verify_saved(staging, trainer.model)
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
    return final


def _steps_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
