"""The section `training` of a recipe, its parts, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from ...errors import shown
from ...files.schema import WrongSetting, at_least, at_most, require

_HIGHEST_RANK = 4096


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, trained with the TTT parameters (`trainable: lora`).

    Attributes:
        rank: rank of each adapter, at most 4,096.
        alpha: scale; an update is multiplied by alpha / rank.
        dropout: dropout probability.
        targets: names of modules, or one regular expression.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    )

    def __post_init__(self) -> None:
        at_least(1, self, "rank")
        at_most(_HIGHEST_RANK, self, "rank")
        require(self.alpha > 0, "alpha", "must be above 0")
        require(0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1")
        require(
            bool(self.targets) and all(self.targets),
            "targets",
            "must name modules, or be a regular expression of their names",
        )
        if isinstance(self.targets, str):
            try:
                re.compile(self.targets)
            except re.error as error:
                raise WrongSetting(
                    "targets", f"{shown(self.targets)} is not a regular expression: {error}"
                ) from None


@dataclass(frozen=True)
class Distillation:
    """Soft targets: the model's own answers with full attention and without writes.

    Attributes:
        weight: part of the loss that compares with these answers. The rest is the loss on the labels.
        temperature: divides the logits of both.
    """

    weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.weight <= 1, "weight", "must be above 0 and at most 1")
        require(0 < self.temperature <= 100, "temperature", "must be above 0 and at most 100")


@dataclass(frozen=True)
class Training:
    """Parameters to train, length of the run, and optimizer (AdamW).

    Attributes:
        trainable: `all` parameters; the new ones alone (`ttt`); or the new ones and LoRA (`lora`).
        steps: length of the run in optimizer steps.
        tokens: in place of `steps`, length of the run in tokens.
        batch_size: rows per device and micro-step.
        gradient_accumulation_steps: micro-steps per step.
        learning_rate: peak learning rate.
        weight_decay: weight decay, except for conv and P.
        warmup_steps: steps over which the learning rate rises.
        conv_learning_rate: learning rate of the convolution; None for `learning_rate`.
        proj_learning_rate: learning rate of P; None for `learning_rate`.
        gate_learning_rate: learning rate of a gate of writes; None for that of P.
        conv_weight_decay: weight decay of the convolution.
        proj_weight_decay: weight decay of P and of a gate of writes.
        ttt_warmup_steps: warm-up steps of conv, P and a gate of writes; None for `warmup_steps`.
        eta_warmup_steps: steps over which η rises linearly from 0.
        lr_scheduler: schedule after the warm-up.
        min_lr_ratio: final learning rate as a fraction of the peak; without effect on `constant`.
        betas: AdamW's two coefficients.
        epsilon: AdamW's epsilon.
        max_grad_norm: upper bound on the norm of the gradient.
        gradient_checkpointing: recompute each layer in the backward pass.
        liger: use Liger's kernels (`pip install liger-kernel`), mainly for a loss that never holds all
            logits.
        seed: seed of training.
        lora: settings of LoRA.
        distillation: soft targets for the tokens with a label; None for the labels alone.
    """

    trainable: Literal["all", "ttt", "lora"] = "all"
    steps: int | None = None
    tokens: int | None = None
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-6
    weight_decay: float = 0.1
    warmup_steps: int = 0
    conv_learning_rate: float | None = None
    proj_learning_rate: float | None = None
    gate_learning_rate: float | None = None
    conv_weight_decay: float = 0.0
    proj_weight_decay: float = 0.0
    ttt_warmup_steps: int | None = None
    eta_warmup_steps: int = 0
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    liger: bool = False
    seed: int = 0
    lora: Lora | None = None
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        require((self.steps is None) != (self.tokens is None), "steps", "give either steps or tokens")
        at_least(1, self, "steps", "tokens", "batch_size", "gradient_accumulation_steps")
        rates = ("learning_rate", "conv_learning_rate", "proj_learning_rate", "gate_learning_rate")
        for name in (*rates, "epsilon", "max_grad_norm"):
            value = getattr(self, name)
            require(value is None or value > 0, name, "must be above 0")
        at_least(0, self, "seed")
        at_most(2**32 - 1, self, "seed")
        at_most(2**20, self, "batch_size", "gradient_accumulation_steps")
        at_least(
            0,
            self,
            "weight_decay",
            "conv_weight_decay",
            "proj_weight_decay",
            "warmup_steps",
            "ttt_warmup_steps",
            "eta_warmup_steps",
        )
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "must be from 0 to 1")
        unused = self.lr_scheduler == "constant" and self.min_lr_ratio != Training.min_lr_ratio
        require(not unused, "min_lr_ratio", "does nothing with lr_scheduler: constant")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "betas",
            "must be two numbers from 0 up to 1",
        )
        require(self.lora is None or self.trainable == "lora", "lora", "does nothing without trainable: lora")
        require(
            self.distillation is None or not self.liger,
            "distillation",
            "needs all logits, which training.liger never holds; set liger: false",
        )
