"""One process of a run: prepares the model and its rows, trains, and saves the checkpoint and the report."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback

from ...attention_window import attention_reach
from ...errors import InPlaceTTTError, NotSoError, one_line
from ...files.folders import new_file
from ...files.text import ids_within, require_known_ids
from ...ops.precision import note_on_emulation
from ...surgery import config_of
from ..audit import audit_recipe, write_report
from ..data.building import TrainingData
from ..data.data import build_data
from ..data.practice import seen_anyway, with_practice
from ..data.row_order import rows_to_come
from ..loop.arguments import open_group, training_arguments
from ..loop.batches import collate
from ..loop.guards import FirstStep, GradientTap
from ..loop.meeting import Meeting
from ..loop.monitor import (
    CompareCallback,
    DiagnoseCallback,
    EtaWarmup,
    LayerMonitor,
    document_to_diagnose,
    documents_to_compare,
)
from ..loop.run_state import LOG, REPORT, Start, agree, claim, held, made_by, refuse_others, settle
from ..loop.saving import TrialSave
from ..loop.speed import Clock, Speed, SpeedLog
from ..loop.stopping import LAUNCHER, STOPPED, Stopping
from ..loop.trainer import FastWeightTrainer
from ..model import build_model, meta_model
from ..plan.flops import device_peak, model_flops
from ..recipe.changes import DOCUMENTS, facts_of
from ..recipe.deepspeed import without_effect
from ..recipe.packages import check_packages
from ..recipe.recipe import Recipe
from ..ulysses import check_sharing, sdpa_sees_documents, ulysses_in_evaluation
from .card import write_run_card

logger = logging.getLogger(__name__)


def meet(recipe: Recipe) -> Meeting:
    """Joins the other processes of the run, through the environment variables that a launcher sets.

    Args:
        recipe: the run's recipe.

    Raises:
        InPlaceTTTError: if the variables are missing, or the number of processes differs from the recipe's.
    """
    if "RANK" not in os.environ:
        slurm = "; srun alone does not set RANK: let it start inplace-ttt train, once per node"
        raise InPlaceTTTError(
            "this is one process of a run; start all of them with `inplace-ttt train`, torchrun, or "
            "DeepSpeed's launcher"
            f"{slurm * ('SLURM_PROCID' in os.environ)} (docs/launch.md)."
        )
    world = int(os.environ["WORLD_SIZE"])
    if world != recipe.parallel.world:
        raise InPlaceTTTError(
            f"the recipe is for {recipe.parallel.world} processes, but {world} run; set "
            "parallel.nproc_per_node, or --num-processes."
        )
    return Meeting.by_environment()


def run(recipe: Recipe, meeting: Meeting, *, resume: bool = True, audit: bool = True) -> dict[str, Any]:
    """Trains by the recipe in this process, together with the other processes of `meeting`.

    A signal of `stopping.SIGNALS` during training saves a checkpoint and ends the process (SystemExit with
    `STOPPED`).

    Args:
        recipe: the run's recipe.
        meeting: the run's processes.
        resume: resume from the last complete checkpoint in `recipe.output`, if there is one.
        audit: refuse to start if the audit finds a fault or, with a profile, an undeclared deviation.

    Returns:
        The report, also written to `output`/train_report.json.

    Raises:
        InPlaceTTTError: if the run is refused.
        NotSoError: if the audit or a guard stops the run.
    """
    output = Path(recipe.output)
    holds = meeting.rank == 0 and LAUNCHER not in os.environ  # otherwise our launcher has locked it
    with held(recipe, resume) if holds else nullcontext():
        check_packages(recipe)
        start = agree(recipe, meeting, resume)
        if start.report is not None:
            logger.warning("%s is finished; nothing was run", output)
            meeting.part()
            return start.report
        return _train(prepare(recipe, meeting, start, resume, audit), recipe)


def _train(ready: Prepared, recipe: Recipe) -> dict[str, Any]:
    began, trainer, start = time.perf_counter(), ready.trainer, ready.start
    with trainer.stopping.noted():
        result = trainer.train(resume_from_checkpoint=str(start.checkpoint) if start.checkpoint else None)
    state = trainer.state
    # only `asked` is set if the signal came after the ranks' last agreement; all steps are then saved
    if trainer.stopping.stopped or trainer.stopping.asked:
        logger.warning(
            "stopped after step %d of %d, as asked; the same command goes on from there",
            state.global_step,
            recipe.steps,
        )
        sys.exit(STOPPED)
    evaluation = trainer.evaluate() if ready.data.validation is not None else {}
    final = trainer.save_final(
        lambda folder: write_run_card(
            folder, recipe, trainer.model, ready.data.report, state.global_step, evaluation
        )
    )
    report = {
        "output": str(final),
        "steps": state.global_step,
        "final_loss": next(
            (log["loss"] for log in reversed(state.log_history) if "loss" in log), result.training_loss
        ),
        "evaluation": {key: value for key, value in evaluation.items() if isinstance(value, (int, float))},
        "speed": ready.speed.of_run(),
        "seconds": round(time.perf_counter() - began, 1),
        "resumed_from": str(start.checkpoint) if start.checkpoint else None,
        "changes": trainer.made_by.changes,
        "data": ready.data.report.to_dict(),
        "skipped_steps": trainer.skipped.count,
        "warnings": [*ready.warnings, *trainer.skipped.warnings()],
        "recipe": recipe.to_dict(),
    }
    if trainer.is_world_process_zero():
        with new_file(Path(recipe.output) / REPORT, ours=True) as file:
            file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        warnings: warnings for the report, which grow until the run ends.
    """

    trainer: FastWeightTrainer
    speed: Speed
    data: TrainingData
    start: Start
    warnings: list[str]


def prepare(recipe: Recipe, meeting: Meeting, start: Start, resume: bool, audit: bool) -> Prepared:
    """Builds everything that a run needs, and puts the output in order after an earlier run.

    Every refusal happens here, before the first step.

    Args:
        recipe: the run's recipe.
        meeting: the run's processes.
        start: the start that all processes have agreed on.
        resume: the run may resume.
        audit: audit the run if it is new or changed.

    Raises:
        InPlaceTTTError: if the run is refused.
    """
    output, main = Path(recipe.output), meeting.rank == 0
    shape = meta_model(recipe)
    facts = facts_of(recipe, shape)
    made_by(start, facts)  # refuses early: reading the data may take hours
    check_sharing(recipe, config_of(shape).chunk_size, shape.config)
    tokenizer = read_tokenizer(recipe, shape)
    data = build_data(recipe, tokenizer, config_of(shape).chunk_size)
    made = made_by(start, {**facts, DOCUMENTS: data.report.sha256})
    is_new = start.checkpoint is None or any(change["after_step"] == start.done for change in made.changes)
    if start.leads:
        refuse_others(recipe, start.done if resume else 0)
        claim(output)
    if audit and recipe.audit.enabled and main and is_new:
        hold_audit(recipe, shape, data, output)
    meeting.gather("prepared")
    open_group(meeting, recipe)
    settle(start, output, from_scratch=not resume)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output / "tensorboard"))
    arguments = training_arguments(recipe, start.one_disk)
    model = build_model(recipe)
    # a vision-language model's text decoder has a config of its own
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    shared = recipe.parallel.sequence_parallel_size
    if shared > 1:
        sdpa_sees_documents()
        ulysses_in_evaluation()
    window = recipe.model.window
    reach = attention_reach(shape.config.get_text_config(), None if window is None else window.size)
    warnings = [
        *data.report.warnings,
        *seen_anyway(recipe.data, reach),
        *without_effect(recipe.deepspeed_settings),
    ]
    if slow := note_on_emulation(model.dtype, shape.num_parameters(), "set model.dtype: float32"):
        warnings.append(slow)
    for warning in warnings if main else ():
        logger.warning(warning)
    held_out = data.validation and data.validation.select(
        range(min(len(data.validation), recipe.monitor.evaluate_rows))
    )
    # if all steps are done, the rows are not read
    rows = rows_to_come(data.train, recipe, min(start.done, recipe.steps - 1), start.checkpoint)
    micro_steps = recipe.training.gradient_accumulation_steps * recipe.parallel.world
    speed = Speed(recipe, Clock(), model_flops(recipe, shape) * micro_steps, device_peak(recipe))
    trainer = FastWeightTrainer(
        recipe,
        start,
        made,
        speed.clock,
        Stopping(every=shared // math.gcd(shared, recipe.training.gradient_accumulation_steps)),
        model=model,
        args=arguments,
        train_dataset=with_practice(rows, recipe.data, functools.partial(ids_within, tokenizer), data.begins),
        eval_dataset=held_out,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=callbacks(speed, model, data.train if held_out is None else held_out, warnings, main),
    )
    return Prepared(trainer, speed, data, start, warnings)


def hold_audit(recipe: Recipe, shape: PreTrainedModel, data: TrainingData, output: Path) -> None:
    """Audits the run and writes the report into its folder.

    Raises:
        NotSoError: if a fault is found, or if the recipe has a profile and deviates from it undeclared.
    """
    profile = recipe.audit.profile
    report = audit_recipe(recipe, data=data)
    page = write_report(report, output)
    if profile is not None and report.undeclared:
        raise NotSoError(
            f"the run deviates from the {profile} profile in {', '.join(report.undeclared)}; read {page}, "
            "then declare each with a reason under audit.deviations, leave out audit.profile, or start with "
            "--no-audit."
        )
    if report.faults:
        raise NotSoError(
            f"the audit found faults in {', '.join(report.faults)}; read {page}, correct them, or start with "
            "--no-audit."
        )
    if report.undeclared:
        logger.warning(
            "the run deviates from the paper in %s; %s has the reasons", ", ".join(report.undeclared), page
        )


def read_tokenizer(recipe: Recipe, model: PreTrainedModel) -> Any:
    """Returns the recipe's tokenizer, None if the data needs none.

    Args:
        recipe: the run's recipe.
        model: the recipe's model, on any device.

    Raises:
        InPlaceTTTError: if the tokenizer is missing, or belongs to another model.
    """
    if recipe.data.recall is not None:
        return None
    path = recipe.model.tokenizer_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(f"{path} lacks a tokenizer ({one_line(error)}); set model.tokenizer.") from None
    require_known_ids(tokenizer, model, path)
    return tokenizer


def callbacks(speed: Speed, model: Any, rows: Any, warnings: list[str], main: bool) -> list[TrainerCallback]:
    """Returns the callbacks of the run.

    Args:
        speed: the run's speed.
        model: the model to train.
        rows: source of the documents that are diagnosed and compared.
        warnings: list that warnings are appended to.
        main: this process writes the log.
    """
    recipe, gradients = speed.recipe, GradientTap(model)
    output = Path(recipe.output)
    found: list[TrainerCallback] = [EtaWarmup(steps)] if (steps := recipe.training.eta_warmup_steps) else []
    found += [TrialSave(output), FirstStep(gradients, warnings), SpeedLog(speed)]
    found += [
        LayerMonitor(gradients, warnings, recipe.monitor.stop_write_ratio, output / LOG if main else None)
    ]
    if recipe.monitor.diagnose_steps and main:
        document = document_to_diagnose(rows, config_of(model).chunk_size)
        found.append(DiagnoseCallback(speed, document, gradients, warnings, output / "diagnose"))
    if recipe.monitor.compare_steps and main:
        found.append(
            CompareCallback(speed, documents_to_compare(rows, config_of(model).chunk_size), output / LOG)
        )
    return found
