"""The sections of a recipe and the checks within each; `data` and `training` have files of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from ...files.schema import at_least, at_most, require
from .data_section import MOST

_MOST_LAYERS = 4096
_LAYERS = re.compile(r"(^|_)layers?$")
"""Keys of a model's config that count its layers. Each layer takes time to build, even without weights."""


@dataclass(frozen=True)
class AttentionWindow:
    """Sliding-window attention: each token sees the last `size` tokens and its document's first `sinks`.

    Attributes:
        size: tokens that a token sees. A layer with a window of its own keeps the smaller of the two, and
            sees no sinks.
        sinks: first tokens of the document that stay visible.
    """

    size: int
    sinks: int = 4

    def __post_init__(self) -> None:
        at_least(1, self, "size")
        require(0 <= self.sinks < self.size, "sinks", "must be at least 0 and below size")


@dataclass(frozen=True)
class Model:
    """The model to train.

    Attributes:
        path: folder or hub id: a base, a full converted checkpoint, or an adapter folder.
        config: in place of `path`, values of a transformers config with `model_type`, for a model from
            scratch.
        tokenizer: folder or hub id; None for `path`.
        overrides: values that replace those of the model's own config (YaRN, a window). A table such as
            `rope_parameters` is completed from the model's own.
        dtype: dtype of weights and gradients. DeepSpeed keeps float32 masters.
        attn_implementation: attention of transformers. With packed rows, sdpa needs a mask of length² per
            layer.
        window: sliding-window attention, for a model whose own attention sees everything.
        load_in: hold the base's linear maps frozen in 4 bits (nf4) or 8 bits, by bitsandbytes. It needs
            `trainable: lora` and ZeRO 0 to 2.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    window: AttentionWindow | None = None
    load_in: Literal["4bit", "8bit"] | None = None

    def __post_init__(self) -> None:
        require(
            self.load_in is None or self.path is not None, "load_in", "does nothing with a model from scratch"
        )
        require(
            (self.path is None) != (self.config is None),
            "path",
            "give either path or config (a model from scratch)",
        )
        require(self.config is None or "model_type" in self.config, "config", "config needs model_type")
        for table in (self.config or {}, self.overrides):
            for name, value in table.items():
                least = _MOST_LAYERS if _LAYERS.search(name) else MOST
                require(
                    not isinstance(value, (int, float)) or abs(value) <= least,
                    "config",
                    f"{name} must be at most {least:,}",
                )
        require(
            self.window is None or self.attn_implementation == "sdpa",
            "window",
            f"does nothing with {self.attn_implementation} attention",
        )

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.path or ""


@dataclass(frozen=True)
class Parallel:
    """Processes and nodes of a run.

    Attributes:
        nproc_per_node: processes on each node, one per device.
        sequence_parallel_size: ranks that share one row: attention by Ulysses, the fast weight by one scan.
        nnodes: number of nodes.
        launcher: the launcher that `inplace-ttt train` starts on several nodes. With `deepspeed`, run the
            command on one node; DeepSpeed starts the nodes of the hostfile. With `torchrun`, run it on each
            node, for example by srun.
        hostfile: the nodes, for DeepSpeed's launcher: one `HOST slots=8` per line.
        rdzv_endpoint: HOST:PORT of a node at which the nodes of torchrun meet.
        timeout_minutes: time that a process waits for another in a collective operation. Then the run ends.
            DeepSpeed's own groups have the same limit.
    """

    nproc_per_node: int = 1
    sequence_parallel_size: int = 1
    nnodes: int = 1
    launcher: Literal["deepspeed", "torchrun"] = "deepspeed"
    hostfile: str | None = None
    rdzv_endpoint: str | None = None
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        by_torchrun = self.launcher == "torchrun"
        require(not by_torchrun or self.hostfile is None, "hostfile", "does nothing with launcher: torchrun")
        require(
            by_torchrun or self.rdzv_endpoint is None,
            "rdzv_endpoint",
            "does nothing without launcher: torchrun",
        )
        require(
            self.rdzv_endpoint is None or re.fullmatch(r"\S+:\d{1,5}", self.rdzv_endpoint) is not None,
            "rdzv_endpoint",
            "must be HOST:PORT of a node",
        )
        require(0 < self.timeout_minutes <= 100_000, "timeout_minutes", "must be above 0 and at most 100,000")
        at_least(1, self, "nproc_per_node", "sequence_parallel_size", "nnodes")
        at_most(65536, self, "nproc_per_node", "sequence_parallel_size", "nnodes")
        world = self.nproc_per_node * self.nnodes
        require(
            world % self.sequence_parallel_size == 0,
            "sequence_parallel_size",
            f"{self.sequence_parallel_size} does not divide {world} processes",
        )

    @property
    def world(self) -> int:
        return self.nproc_per_node * self.nnodes

    @property
    def starts_itself(self) -> bool:
        """True if `inplace-ttt train` starts the processes itself, without a launcher."""
        return self.nnodes == 1 and self.hostfile is None and self.launcher == "deepspeed"


@dataclass(frozen=True)
class Monitor:
    """Logging, evaluation and checkpoints. The intervals are in steps.

    Attributes:
        logging_steps: interval of log lines.
        eval_steps: interval of evaluations of the held-out loss with writes on and off. 0 evaluates at the
            end alone.
        evaluate_rows: held-out rows per evaluation.
        diagnose_steps: interval of diagnoses; 0 for never.
        compare_steps: interval of comparisons with writes on, off, and those of another document; 0 for
            never. They read the longest document of each of `evaluate_rows` held-out rows. `evaluate` reports
            the same figures.
        save_steps: interval of checkpoints.
        save_total_limit: number of checkpoints to keep.
        report_to: trackers that get the log.
        stop_write_ratio: the run stops if the writes of one document move a weight by more than this many
            times its norm.
    """

    logging_steps: int = 10
    eval_steps: int = 0
    evaluate_rows: int = 8
    diagnose_steps: int = 0
    compare_steps: int = 0
    save_steps: int = 500
    save_total_limit: int = 2
    report_to: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    stop_write_ratio: float = 10.0

    def __post_init__(self) -> None:
        at_least(1, self, "logging_steps", "save_steps", "save_total_limit", "evaluate_rows")
        at_least(0, self, "eval_steps", "diagnose_steps", "compare_steps")
        require(self.stop_write_ratio > 0, "stop_write_ratio", "must be above 0")


@dataclass(frozen=True)
class Deviation:
    """A deviation that the run declares.

    Attributes:
        id: name of the audit's item.
        why: the reason.
    """

    id: str
    why: str


@dataclass(frozen=True)
class Audit:
    """The audit before the first step.

    Attributes:
        profile: the method that the run claims to follow. An undeclared deviation from it stops the run. With
            None, deviations from the paper are reported, and only a fault stops the run.
        enabled: False skips the audit, as `--no-audit` does.
        deviations: the declared deviations from the profile.
    """

    profile: Literal["paper", "reference", "ttt_ntp"] | None = None
    enabled: bool = True
    deviations: list[Deviation] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.profile is not None or not self.deviations, "deviations", "do nothing without a profile")
