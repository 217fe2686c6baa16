"""The Hugging Face Trainer for converted models: parameter groups, shared rows and complete checkpoints."""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...checkpoint.lora import tie_to_base
from ...checkpoint.saved_tensors import verify_saved
from ...errors import NotSoError
from ...files.manifest import STEP, TRAINED, refuse_foreign
from ...surgery import config_of, disable_ttt
from ...tasks import IGNORED
from ..data.row_order import save_position
from ..recipe.changes import WEIGHTS
from ..recipe.recipe import Recipe
from .batches import needs_document_lengths, where_learned, with_document_lengths
from .checkpoints import Saved, files_in, last_checkpoint, mark_complete
from .collectives import barrier, from_all, summed
from .distillation import outputs_and_loss
from .guards import SkippedSteps, clip_finite
from .held_out_metrics import held_out_metrics
from .parameters import group_settings, parameter_groups, schedule
from .run_state import FINAL, SAVING, Start
from .saving import install, keep_newest, saving
from .speed import Clock
from .stopping import Stopping

_FROM_LAST = "free some space, and resume from the last complete checkpoint"


class FastWeightTrainer(Trainer):
    """Trains a converted model by a recipe.

    It reads rows in the dataset's order. For a resumed run, the dataset starts at the next row to train on.

    Args:
        recipe: the run's recipe.
        start: the start that all processes have agreed on.
        made_by: contents of every checkpoint's file `complete`, without the list of files.
        clock: paused while the run evaluates or saves.
        stopping: receives signals, and the agreement to stop.
        kwargs: arguments of the Trainer.
    """

    def __init__(
        self, recipe: Recipe, start: Start, made_by: Saved, clock: Clock, stopping: Stopping, **kwargs: Any
    ) -> None:
        self.recipe, self.run_start, self.made_by, self.clock, self.stopping = (
            recipe,
            start,
            made_by,
            clock,
            stopping,
        )
        self.resumes_from, self.skipped = start.checkpoint, SkippedSteps(made_by.skipped_steps)
        super().__init__(**kwargs)
        self.add_callback(stopping)
        # num_items_in_batch counts the targets of all micro-steps and ranks
        self.loss_is_scaled_for_ga = True

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.optimizer is None:  # type: ignore[has-type]
            settings = self.recipe.training
            groups = parameter_groups(model or self.model, settings)
            options: dict[str, Any] = {"betas": tuple(settings.betas), "eps": settings.epsilon}
            offload = self.recipe.deepspeed_settings.get("zero_optimization", {}).get("offload_optimizer")
            optimizer: torch.optim.Optimizer
            if offload and offload.get("device") == "cpu" and torch.cuda.is_available():
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
            else:
                optimizer = torch.optim.AdamW(groups, fused=True, **options)
            self.optimizer = optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:  # type: ignore[has-type]
            optimizer = optimizer or self.optimizer
            names = [group["name"] for group in optimizer.param_groups]
            factors = [schedule(self.recipe.training, num_training_steps, name) for name in names]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the checkpoint's moments and its place in the schedule.

        Rates, decays and betas come from the current recipe.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        settings, scheduler = self.recipe.training, self.lr_scheduler
        rates = {}
        for group in self.optimizer.param_groups:
            rates[group["name"]], group["weight_decay"] = group_settings(settings, group["name"])
            group["betas"], group["eps"] = tuple(settings.betas), settings.epsilon
        for group, factor in zip(self.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["initial_lr"] = rates[group["name"]]
            group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
        scheduler.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]  # the logged rates

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """Takes the intervals of logs, saves and evaluations from the arguments.

        The Trainer would take a resumed run's intervals from the checkpoint.
        """
        place = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        return place

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Makes no step if all steps are done.

        They are if a run was ended between its last checkpoint and `final`.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Restores the random generators with the first batch of a resumed run.

        Opening the loader has changed their state.
        """
        samples = super().get_batch_samples(*args, **kwargs)
        if self.resumes_from is not None:
            self._load_rng_state(str(self.resumes_from))
            self.resumes_from = None
        return samples

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: Any) -> Tensor:
        """Returns the targets of this optimizer step over all ranks, at least 1.

        Rows that ranks share have shifted labels already.
        """
        count = sum(
            (batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]).ne(IGNORED).sum()
            for batch in batch_samples
        )
        return summed(torch.as_tensor(count, dtype=torch.int64), device).clamp(min=1)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Makes a step of the Trainer, and counts the steps that DeepSpeed skips.

        The optimizer steps within the backward pass.
        """
        engine = self.model_wrapped
        # DeepSpeed calls it only under stage 0 in float32, the one case in which it accepts gradients that
        # are not finite.
        engine.clip_fp32_gradients = functools.partial(
            clip_finite, self.model.parameters(), self.args.max_grad_norm
        )
        steps, skipped = engine.global_steps, engine.skipped_steps
        loss = super().training_step(*args, **kwargs)
        if engine.global_steps > steps:
            self.skipped.record(self.state.global_step + 1, engine.skipped_steps > skipped)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Returns the mean loss over the step's targets on all ranks and in all micro-steps.

        DeepSpeed divides the sum of gradients by a number of ranks, so each rank's part of the loss is
        multiplied by that number. For ranks that share rows, the Trainer itself would gather the losses
        through autograd. That returns a rank's gradient once per sharing rank. The norm would
        be `sequence_parallel_size` times too large wherever DeepSpeed counts the ranks of one row once.

        Raises:
            NotSoError: if the loss is not finite on some rank.
        """
        if needs_document_lengths(self.recipe):
            inputs = with_document_lengths(inputs)
        outputs, own = outputs_and_loss(
            model, self.model, where_learned(inputs), num_items_in_batch, self.recipe
        )
        loss = own * self._divided_by
        # the mean of `reported` over the ranks is the loss
        reported = own.detach() * self.accelerator.num_processes
        loss = loss + (reported - loss.detach())
        self._look_around(loss.detach())
        return (loss, outputs) if return_outputs else loss

    @property
    def _divided_by(self) -> int:
        """The number that DeepSpeed divides the sum of all ranks' gradients by.

        Ranks that share a row count once, except if ZeRO-3 scatters gradients.
        """
        zero = self.recipe.deepspeed_settings.get("zero_optimization", {})
        scatters = zero.get("stage") == 3 and zero.get("reduce_scatter", True)
        return self.recipe.parallel.world // (1 if scatters else self.recipe.parallel.sequence_parallel_size)

    def _look_around(self, loss: Tensor) -> None:
        """Checks over all ranks that the loss is finite, and whether any rank was asked to stop.

        This happens before the gradient reaches any weight. Raises NotSoError for a loss that is not finite.
        """
        mine = torch.tensor([0.0, float(self.stopping.asked)], device=loss.device)
        mine[0] = loss
        total, asked = summed(mine, loss.device).tolist()
        self.stopping.agreed |= asked > 0
        if not math.isfinite(total):
            last, step = last_checkpoint(self.args.output_dir), self.state.global_step + 1
            remedy = (
                "lower the learning rates or eta, or look for bad rows in the data"
                if step > 1
                else "nothing is trained yet, so look for damaged weights or bad rows, or lower eta"
            )
            raise NotSoError(
                f"the loss is not finite at step {step}; the weights are as before that step, and the last "
                f"checkpoint is {last or 'none'}: {remedy}."
            )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measures held-out loss, a mean over tokens, and accuracy.

        Returns:
            `eval_loss` with writes, `eval_off_loss` without, their difference, both accuracies and the
            seconds.
        """
        rows, name, began = eval_dataset or self.eval_dataset, metric_key_prefix, time.perf_counter()
        with self.clock.paused():
            metrics = held_out_metrics(self, self.recipe, rows, name)
            with disable_ttt(self.model):
                metrics |= held_out_metrics(self, self.recipe, rows, f"{name}_off")
        metrics[f"{name}_difference"] = metrics[f"{name}_loss"] - metrics[f"{name}_off_loss"]
        metrics[f"{name}_seconds"] = round(time.perf_counter() - began, 1)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves as the Trainer does, but stores a tied weight only once.

        DeepSpeed passes a copy under each of the weight's names.
        """
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        if state_dict is not None:
            state_dict = {
                name: value for name, value in state_dict.items() if tied.get(name) not in state_dict
            }
        super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves as the Trainer does, then checks the checkpoint and marks it as complete.

        Older checkpoints are removed only after that.
        """
        output, start = Path(self.args.output_dir), self.run_start
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        target, folder = output / name, Path(self._get_output_dir(trial)) / name
        with self.clock.paused(), saving(target, _FROM_LAST):
            super()._save_checkpoint(model, trial)
            if start.leads and not self.args.should_save:
                self._save_common_files(folder)
            if self.args.should_save:
                save_position(self.train_dataset, self.recipe, self.state.global_step, folder)
        barrier()
        files = files_in(folder) if self.is_local_process_zero() or start.leads else {}
        seen = {
            rank: files
            for rank, (place, files) in enumerate(from_all((start.place, files)))
            if place == start.place
        }
        if start.leads:
            if self.args.should_save and isinstance(self.model, PreTrainedModel):
                verify_saved(folder, self.model)
            together = {name: size for files in seen.values() for name, size in files.items()}
            with saving(target, _FROM_LAST):
                mark_complete(
                    folder,
                    replace(self.made_by, files=together, skipped_steps=self.skipped.count, ranks=list(seen)),
                )
                install(folder, target, STEP)
            keep_newest(output, self.recipe.monitor.save_total_limit)
        barrier()

    def _get_output_dir(self, trial: Any) -> str:
        """Returns the temporary folder that the Trainer saves into."""
        return str(Path(self.args.output_dir) / SAVING)

    def _save_common_files(self, folder: Path) -> None:
        """Saves the files that every rank reads at resume, on a disk that rank 0 does not see.

        Elsewhere rank 0 saves them.
        """
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        (folder / "latest").write_text(f"global_step{self.model_wrapped.global_steps}")

    def save_final(self, describe: Callable[[Path], None]) -> Path:
        """Saves the trained checkpoint as `output`/final, complete or not at all; for LoRA the adapter alone.

        Args:
            describe: writes the model card into a folder.

        Returns:
            The folder.

        Raises:
            InPlaceTTTError: if the disk or a foreign file prevents it.
        """
        final = Path(self.recipe.output) / FINAL
        staging = Path(self.recipe.output) / SAVING / FINAL
        for config in (self.model.config, self.model.config.get_text_config()):
            config.use_cache = True
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        with saving(final, "free some space, and run again to continue from the last checkpoint"):
            self.save_model(str(staging))
        if self.args.should_save:
            (staging / "training_args.bin").unlink(missing_ok=True)
            if isinstance(self.model, PreTrainedModel):
                verify_saved(staging, self.model)
            if (fingerprint := self.made_by.facts.get(WEIGHTS)) is not None:
                tie_to_base(staging, fingerprint, None if self.recipe.ttt is None else config_of(self.model))
            describe(staging)
            refuse_foreign(final, TRAINED)
            install(staging, final, TRAINED)
            shutil.rmtree(staging.parent, ignore_errors=True)
        return final
