"""A callback for converted models in other training loops: rates, η's warm-up, guards and a log."""

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

_RATES = ("conv_learning_rate", "proj_learning_rate", "gate_learning_rate")
_OF_GROUPS = (*_RATES, "conv_weight_decay", "proj_weight_decay")


@dataclass(kw_only=True, eq=False)
class InPlaceTTTCallback(TrainerCallback):
    """Adds the parts that fast weights need to a `Trainer` of transformers, TRL or Axolotl.

    Add it with `InPlaceTTTCallback(…).attach(trainer)`. If it is only passed in `callbacks`, it does not
    set rates and decays, but does everything else.

    It warns if rows begin without the tokenizer's BOS. It stops before a step whose loss is not finite. After
    the first step it checks that every target generator learns. It appends logs to `log.jsonl` in the
    Trainer's output, with writes and gradients of each TTT layer. Its warnings are kept in `warnings`.

    Args:
        conv_learning_rate: rate of the convolution; the default is the Trainer's. The Trainer's schedule
            applies.
        proj_learning_rate: rate of P; the default is the Trainer's. The Trainer's schedule applies.
        gate_learning_rate: rate of a gate of writes; the default is that of P. The Trainer's schedule
            applies.
        conv_weight_decay: decay of the convolution; the default is 0.
        proj_weight_decay: decay of P and a gate of writes; the default is 0.
        eta_warmup_steps: η rises linearly from 0 to its own value over this number of optimizer steps. A
            resumed run continues the warm-up.
        stop_write_ratio: the run stops if the writes of one document move a weight by more than this multiple
            of its norm.

    Raises:
        InPlaceTTTError: if a setting is invalid or, when training starts, would be ignored.
        NotSoError: if a guard stops the run while it trains.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
        >>> from inplace_ttt import InPlaceTTTCallback, InPlaceTTTConfig, convert
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> rows = [{"input_ids": list(range(64)), "labels": list(range(64))}] * 8
        >>> args = TrainingArguments("small-run", max_steps=2, report_to=[], save_strategy="no")
        >>> trainer = Trainer(model, args, train_dataset=rows)
        >>> callback = InPlaceTTTCallback(conv_learning_rate=1e-3, eta_warmup_steps=1).attach(trainer)
        >>> result = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> callback.warnings
        []
    """

    conv_learning_rate: float | None = None
    proj_learning_rate: float | None = None
    gate_learning_rate: float | None = None
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
        """Adds this callback to a trainer before it trains, and takes part in making its optimizer.

        Args:
            trainer: the trainer of a converted model.

        Returns:
            The callback.

        Raises:
            InPlaceTTTError: if the model is not converted, its target generators are frozen, or the trainer's
                optimizer exists already or chooses its parameters itself.

        Examples:
            >>> trainer = Trainer(model, args, train_dataset=rows)
            >>> callback = InPlaceTTTCallback(proj_learning_rate=1e-3).attach(trainer)
        """
        config_of(trainer.model)
        split_off(trainer.model)
        given = trainer.optimizer_cls_and_kwargs
        if trainer.optimizer is not None or (given is not None and not _is_optimizer(given[0])):
            raise InPlaceTTTError(
                "the trainer was given an optimizer that already has its parameters, or chooses them "
                "itself; let the trainer make it (args.optim), or add this callback without rates by "
                "trainer.add_callback."
            )
        trainer.optimizer_cls_and_kwargs = _Factory, {"made_by": self, "trainer": trainer, "given": given}
        trainer.add_callback(self)
        return self

    def groups(self, model: nn.Module, trainer: Trainer) -> list[dict[str, Any]]:
        """Makes the optimizer's parameter groups, for a trainer that builds its optimizer itself.

        Args:
            model: a converted model.
            trainer: its trainer.

        Returns:
            The groups that are not empty. The Trainer's own come first, because the Trainer logs the
            first group's rate. Then come `conv`, `proj` and `gate`.

        Raises:
            InPlaceTTTError: if a setting would be ignored, or a layer's target generator is frozen.

        Examples:
            >>> [group["name"] for group in callback.groups(model, trainer)]
            ['decaying', 'rest', 'conv', 'proj']
        """
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
        settings = {
            "conv": (self.conv_learning_rate, self.conv_weight_decay),
            "proj": (self.proj_learning_rate, self.proj_weight_decay),
            "gate": (self.gate_learning_rate or self.proj_learning_rate, self.proj_weight_decay),
        }
        for name, params in ttt.items():
            rate, decay = settings[name]
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
        """Refuses settings that were not used for the optimizer, and a warm-up that outlasts the run."""
        groups = {group.get("name") for group in optimizer.param_groups}
        given = [name for name in _OF_GROUPS if getattr(self, name) is not None]
        if given and not {name.partition("_")[0] for name in given} <= groups:
            raise InPlaceTTTError(
                f"{given[0]} does nothing, since the trainer made its optimizer without it; call "
                "attach(trainer) before train(), and "
                "let neither a create_optimizer of the trainer's own nor a DeepSpeed config make the "
                "optimizer."
            )
        if self.eta_warmup_steps >= steps:
            raise InPlaceTTTError(
                f"eta_warmup_steps is {self.eta_warmup_steps} and the run has {steps} steps, so η "
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
        """Passes an event to every part.

        If a part stops the run, the model gets its own η back, and the hooks are removed.
        """
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
    """Makes the optimizer from the whole model, which FSDP may have wrapped by then.

    transformers calls optimizer factories in this form.
    """

    def __call__(
        self,
        model: nn.Module,
        *_: Any,
        made_by: InPlaceTTTCallback,
        trainer: Trainer,
        given: tuple[Any, dict[str, Any]] | None,
    ) -> torch.optim.Optimizer:
        """Returns the optimizer.

        Axolotl's trainer passes its arguments a second time; they are ignored.

        Args:
            given: class and settings, None if `args.optim` names them.
        """
        kind, options = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
        if not _is_optimizer(kind) or {"params", "model", "optimizer_dict"} & set(options):
            raise InPlaceTTTError(
                f"optim={trainer.args.optim} chooses its parameters itself, so conv and P cannot be "
                "groups of their own; choose "
                "another, or add the callback without rates by trainer.add_callback."
            )
        return kind(made_by.groups(model, trainer), **options)


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
