"""What a converted model needs of a training loop that is not ours: its own rates, η's warm-up, guards and a
log of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ...config_tables import is_number
from ...errors import InPlaceTTTError, shown
from ...surgery import config_of
from .guards import FiniteGradients, FirstStep, GradientTap, check_beginnings
from .monitor import EtaWarmup, LayerMonitor
from .parameters import refuse_without_effect, split_off
from .run_state import LOG, shorten_log

_OF_GROUPS = ("conv_learning_rate", "proj_learning_rate", "conv_weight_decay", "proj_weight_decay")


@dataclass(kw_only=True, eq=False)
class InPlaceTTTCallback(TrainerCallback):
    """For a transformers `Trainer`, or one made of it (TRL's, Axolotl's):
    `InPlaceTTTCallback(…).attach(trainer)`.

    conv_learning_rate, proj_learning_rate: of the convolution; of P and a gate of writes; the Trainer's own
        without one. The Trainer's
    schedule holds for both. conv_weight_decay, proj_weight_decay: 0 without one.
    eta_warmup_steps: η rises linearly from 0 to its own value over as many optimiser steps; a resumed run
        goes on in it.
    stop_write_ratio: the run stops where the writes of one document move a weight by more than so many times
        its norm.

    It also warns of rows that begin without the tokenizer's BOS, stops before a step whose loss is no number,
    checks after the first step that every target generator learns, and writes what is logged into `log.jsonl`
    in the Trainer's output, with writes and gradients of each TTT layer. `warnings` has what it warned of.
    Given as one of `callbacks` without `attach` it does all of this but the rates and decays.

    Raises InPlaceTTTError for settings that cannot be or would have no effect, and NotSoError where a guard
    stops the run.
    """

    conv_learning_rate: float | None = None
    proj_learning_rate: float | None = None
    conv_weight_decay: float | None = None
    proj_weight_decay: float | None = None
    eta_warmup_steps: int = 0
    stop_write_ratio: float = 10.0

    def __post_init__(self) -> None:
        for name in _OF_GROUPS:
            value, rate = getattr(self, name), name.endswith("rate")
            if value is not None and not (is_number(value) and (value > 0 if rate else value >= 0)):
                raise InPlaceTTTError(
                    f"{name} must be a number {'above 0' if rate else 'of at least 0'}, got {shown(value)}."
                )
        if type(self.eta_warmup_steps) is not int or self.eta_warmup_steps < 0:
            raise InPlaceTTTError(
                f"eta_warmup_steps must be a whole number of at least 0, got {shown(self.eta_warmup_steps)}."
            )
        if not is_number(self.stop_write_ratio) or self.stop_write_ratio <= 0:
            raise InPlaceTTTError(
                f"stop_write_ratio must be a number above 0, got {shown(self.stop_write_ratio)}."
            )
        self.warnings: list[str] = []
        self._parts: list[TrainerCallback] = []
        self._tap: GradientTap | None = None

    def attach(self, trainer: Trainer) -> InPlaceTTTCallback:
        """Join the trainer before it trains: among its callbacks, and in what its optimiser is made of.
        Returns the callback.

        Raises InPlaceTTTError where its model is not converted, its target generators are frozen, or its
        optimiser is made otherwise.
        """
        config_of(trainer.model)
        split_off(trainer.model)
        given = trainer.optimizer_cls_and_kwargs
        if trainer.optimizer is not None or (given is not None and not _is_optimizer(given[0])):
            raise InPlaceTTTError(
                "the trainer was given an optimiser that has its parameters already, or chooses them "
                "itself; leave it to the trainer "
                "(args.optim), or add this callback without rates by trainer.add_callback."
            )
        trainer.optimizer_cls_and_kwargs = _Factory, {"made_by": self, "trainer": trainer, "given": given}
        trainer.add_callback(self)
        return self

    def groups(self, model: nn.Module, trainer: Trainer) -> list[dict[str, Any]]:
        """The Trainer's own groups first, whose rate is the one that is logged; then `conv` and `proj`, those
        that there are."""
        ttt, rest = split_off(model)
        refuse_without_effect(ttt, **{name: getattr(self, name) for name in _OF_GROUPS})
        decaying = set(trainer.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = [
            {
                "name": "decaying",
                "params": [p for name, p in rest.items() if name in decaying],
                "weight_decay": trainer.args.weight_decay,
            },
            {
                "name": "rest",
                "params": [p for name, p in rest.items() if name not in decaying],
                "weight_decay": 0.0,
            },
        ]
        for name, params in ttt.items():
            rate, decay = getattr(self, f"{name}_learning_rate"), getattr(self, f"{name}_weight_decay")
            group = {"name": name, "params": params, "weight_decay": decay or 0.0}
            groups.append(group if rate is None else {**group, "lr": rate})
        return [group for group in groups if group["params"]]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        config_of(model)
        split_off(model)
        self._check_effect(kwargs["optimizer"], state.max_steps)
        if state.is_world_process_zero:
            check_beginnings(
                getattr(kwargs.get("train_dataloader"), "dataset", None),
                kwargs.get("processing_class"),
                self.warnings,
            )
        log = Path(args.output_dir) / LOG if state.is_world_process_zero else None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            shorten_log(log, state.global_step)
        self._tap = GradientTap(model)
        self._parts = [EtaWarmup(self.eta_warmup_steps)] if self.eta_warmup_steps else []
        self._parts += [FiniteGradients(self._tap), FirstStep(self._tap, self.warnings)]
        self._parts.append(LayerMonitor(self._tap, self.warnings, self.stop_write_ratio, log))

    def _check_effect(self, optimizer: Any, steps: int) -> None:
        """Refuse settings that the optimiser was made without, and a warm-up that outlasts the run."""
        groups = {group.get("name") for group in optimizer.param_groups}
        given = [name for name in _OF_GROUPS if getattr(self, name) is not None]
        if given and not {name.partition("_")[0] for name in given} <= groups:
            raise InPlaceTTTError(
                f"{given[0]} has no effect, since the trainer made its optimiser without it; call "
                "attach(trainer) before train(), and "
                "let neither a create_optimizer of the trainer's own nor a DeepSpeed config make the "
                "optimiser."
            )
        if self.eta_warmup_steps >= steps:
            raise InPlaceTTTError(
                f"eta_warmup_steps is {self.eta_warmup_steps} and the run has {steps} steps, so that η "
                "would never reach its own value; "
                "shorten the warm-up."
            )

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._pass_on("on_step_begin", *args, **kwargs)

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._pass_on("on_substep_end", *args, **kwargs)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._pass_on("on_pre_optimizer_step", *args, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._pass_on("on_step_end", *args, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self._pass_on("on_log", *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._pass_on("on_train_end", *args, **kwargs)
        self._leave()

    def _pass_on(self, event: str, *args: Any, **kwargs: Any) -> None:
        """To every part; where one of them stops the run, the model is left with its own η and without
        hooks."""
        try:
            for part in self._parts:
                getattr(part, event)(*args, **kwargs)
        except InPlaceTTTError:
            for part in self._parts:
                part.on_train_end(*args, **kwargs)
            self._leave()
            raise

    def _leave(self) -> None:
        if self._tap is not None:
            self._tap.remove()
        self._tap, self._parts = None, []


class _Factory:
    """How transformers asks for an optimiser that is made from a whole model, which FSDP may have wrapped by
    then."""

    def __call__(
        self,
        model: nn.Module,
        *_: Any,
        made_by: InPlaceTTTCallback,
        trainer: Trainer,
        given: tuple[Any, dict[str, Any]] | None,
    ) -> torch.optim.Optimizer:
        """given: class and settings, where not `args.optim` says them. (Axolotl's trainer gives its arguments
        a second time.)"""
        kind, options = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        if not _is_optimizer(kind) or {"params", "model", "optimizer_dict"} & set(options):
            raise InPlaceTTTError(
                f"optim={trainer.args.optim} chooses its parameters itself, so that conv and P cannot be "
                "groups of their own; take "
                "another, or add the callback without rates by trainer.add_callback."
            )
        return kind(made_by.groups(model, trainer), **options)


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
