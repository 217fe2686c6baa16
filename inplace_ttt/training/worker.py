"""One process of a run: prepare the model and its rows, train, save the trained checkpoint and the report."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainerCallback

from ..errors import InPlaceTTTError, NotSoError, one_line
from ..surgery import config_of
from .arguments import open_group, training_arguments
from .audit import audit_recipe, write_report
from .batches import collate
from .data import TrainingData, build_data
from .data_report import DataReport
from .flops import device_peak, model_flops
from .guards import FirstStep, GradientTap
from .meeting import Meeting
from .model import build_model, meta_model
from .monitor import CompareCallback, DiagnoseCallback, EtaWarmup, LayerMonitor, document_to_diagnose, documents_to_compare
from .packages import check_packages
from .recipe import Recipe
from .repeated_passages import with_repeated_passages
from .row_order import rows_to_come
from .speed import Clock, Speed
from .trainer import FastWeightTrainer, last_checkpoint, remove_incomplete
from .ulysses import check_sharing, sdpa_sees_documents, ulysses_in_evaluation

logger = logging.getLogger(__name__)

REPORT = "train_report.json"


def run(recipe: Recipe, *, resume: bool = True, audit: bool = True) -> dict[str, Any]:
    """Train by the recipe in this process, one of `recipe.parallel.world` that DeepSpeed's launcher started.

    resume: go on from the last complete checkpoint in `recipe.output`, if there is one.
    audit: refuse to start on a deviation from the paper that the recipe does not declare.
    Returns the report that is also written to `output`/train_report.json.
    """
    ready = prepare(recipe, resume, audit)
    began = time.perf_counter()
    result = ready.trainer.train(resume_from_checkpoint=str(ready.checkpoint) if ready.checkpoint else None)
    evaluation = ready.trainer.evaluate() if ready.data.validation is not None else {}
    final = ready.trainer.save_final()
    state = ready.trainer.state
    report = {
        "output": str(final),
        "steps": state.global_step,
        "final_loss": next((log["loss"] for log in reversed(state.log_history) if "loss" in log), result.training_loss),
        "evaluation": {key: value for key, value in evaluation.items() if isinstance(value, (int, float))},
        "speed": ready.speed.of_run(),
        "seconds": round(time.perf_counter() - began, 1),
        "resumed_from": str(ready.checkpoint) if ready.checkpoint else None,
        "data": ready.data.report.to_dict(),
        "skipped_steps": ready.trainer.skipped.count,
        "warnings": [*ready.warnings, *ready.trainer.skipped.warnings()],
        "recipe": recipe.to_dict(),
    }
    if ready.trainer.is_world_process_zero():
        (Path(recipe.output) / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return report


@dataclass(frozen=True)
class Prepared:
    """A run that can start. checkpoint: where it goes on from. warnings: what is said of it, until its end."""

    trainer: FastWeightTrainer
    speed: Speed
    data: TrainingData
    checkpoint: Path | None
    warnings: list[str]


def prepare(recipe: Recipe, resume: bool, audit: bool) -> Prepared:
    """Everything that can be refused is refused here, before the first step."""
    output, rank = Path(recipe.output), _rank(recipe)
    check_packages(recipe)
    checkpoint = last_checkpoint(output) if resume else None
    done = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    if done >= recipe.steps:
        raise InPlaceTTTError(f"{checkpoint} has run all {recipe.steps} steps already; raise optimisation.steps, or name another output.")
    meeting = Meeting.by_environment()
    with meeting.preparing():
        shape = meta_model(recipe)
        check_sharing(recipe, config_of(shape).chunk_size, shape.config)
        tokenizer = read_tokenizer(recipe)
        data = build_data(recipe, tokenizer, config_of(shape).chunk_size)
        if audit and recipe.audit.profile is not None and checkpoint is None and rank == 0:
            refuse_undeclared(recipe, data.report, output)
    open_group(meeting, recipe)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output / "tensorboard"))
    arguments = training_arguments(recipe)
    model = build_model(recipe)
    model.config.use_cache = False
    if recipe.parallel.sequence_parallel > 1:
        sdpa_sees_documents()
        ulysses_in_evaluation()
    if rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        for folder in remove_incomplete(output):
            logger.warning("%s was not written to its end and is removed", folder)
    warnings = list(data.report.warnings)
    held_out = data.validation and data.validation.select(range(min(len(data.validation), recipe.monitor.evaluate_rows)))
    micro_steps = recipe.optimisation.accumulation * recipe.parallel.world
    speed = Speed(recipe, Clock(), model_flops(recipe, shape) * micro_steps, device_peak(recipe))
    trainer = FastWeightTrainer(
        recipe,
        checkpoint,
        speed.clock,
        model=model,
        args=arguments,
        train_dataset=with_repeated_passages(rows_to_come(data.train, recipe, done, checkpoint), recipe.data.repeat, recipe.data.seed),
        eval_dataset=held_out,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=callbacks(speed, model, data.train if held_out is None else held_out, warnings, rank == 0),
    )
    return Prepared(trainer, speed, data, checkpoint, warnings)


def _rank(recipe: Recipe) -> int:
    """This process's number among those that the launcher started."""
    if "RANK" not in os.environ:
        raise InPlaceTTTError("this is one process of a run; start them with `inplace-ttt train`, or with DeepSpeed's launcher.")
    world = int(os.environ["WORLD_SIZE"])
    if world != recipe.parallel.world:
        raise InPlaceTTTError(
            f"the recipe is for {recipe.parallel.world} processes and {world} run; set parallel.processes, or --num-processes."
        )
    return int(os.environ["RANK"])


def refuse_undeclared(recipe: Recipe, data: DataReport, output: Path) -> None:
    """The audit before the first step, written beside the run; NotSoError on an undeclared deviation."""
    report = audit_recipe(recipe, data=data)
    page = write_report(report, output)
    if report.undeclared:
        raise NotSoError(
            f"the run deviates from the {recipe.audit.profile} profile in {', '.join(report.undeclared)} without saying so; read {page}, "
            "then declare each with a reason under audit.deviations, or start with --no-audit."
        )


def read_tokenizer(recipe: Recipe) -> Any:
    """The recipe's tokenizer; None for data that needs none."""
    if recipe.data.recall is not None:
        return None
    try:
        return AutoTokenizer.from_pretrained(recipe.model.tokenizer_path)
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(f"{recipe.model.tokenizer_path} has no tokenizer ({one_line(error)}); set model.tokenizer.") from None


def callbacks(speed: Speed, model: Any, rows: Any, warnings: list[str], main: bool) -> list[TrainerCallback]:
    """What watches the run; `rows` has the document of every diagnosis."""
    recipe, gradients = speed.recipe, GradientTap(model)
    output = Path(recipe.output)
    found: list[TrainerCallback] = [EtaWarmup(steps)] if (steps := recipe.optimisation.eta_warmup_steps) else []
    found += [FirstStep(gradients, warnings), LayerMonitor(speed, gradients, warnings, output / "log.jsonl" if main else None)]
    if recipe.monitor.diagnose_every and main:
        document = document_to_diagnose(rows, config_of(model).chunk_size)
        found.append(DiagnoseCallback(speed, document, gradients, warnings, output / "diagnose"))
    if recipe.monitor.compare_every and main:
        found.append(CompareCallback(speed, documents_to_compare(rows, config_of(model).chunk_size), output / "log.jsonl"))
    return found
