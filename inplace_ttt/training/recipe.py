"""A training run as one YAML file: its sections and what they must keep to."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import InPlaceTTTConfig
from ..errors import shown
from ..files.json_files import parse_json
from ..files.paths import name_problem, require_regular
from ..files.schema import WrongSetting, at_least, at_most, require
from ..files.settings import read_settings
from .data_settings import MOST, Data
from .deepspeed_settings import check_deepspeed

_MOST_LAYERS = 4096
_HIGHEST_RANK = 4096
_LAYERS = re.compile(r"(^|_)layers?$")
"""Values of a model's config that count its layers: each takes time to build, even without weights."""


@dataclass(frozen=True)
class AttentionWindow:
    """Sliding-window attention: each token sees the last `size` and its document's first `sinks`."""

    size: int
    sinks: int = 4

    def __post_init__(self) -> None:
        at_least(1, self, "size")
        require(0 <= self.sinks < self.size, "sinks", "must be at least 0 and below size")


@dataclass(frozen=True)
class Model:
    """What is trained.

    path: checkpoint folder or hub id, converted already or not; or
    config: values of a transformers config, `model_type` among them, for a model from scratch.
    tokenizer: folder or hub id; `path` without one. overrides: values put over the model's own config (YaRN, a window).
    window: attention that sees a window, for a model whose own sees everything.
    quantise: hold the base's linear maps in so many bits (bitsandbytes; nf4 for four), frozen.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    window: AttentionWindow | None = None
    quantise: Literal["4bit", "8bit"] | None = None

    def __post_init__(self) -> None:
        require(self.quantise is None or self.path is not None, "quantise", "has no effect on a model from scratch")
        require((self.path is None) != (self.config is None), "path", "give either path or config (a model from scratch)")
        require(self.config is None or "model_type" in self.config, "config", "config needs model_type")
        for table in (self.config or {}, self.overrides):
            for name, value in table.items():
                least = _MOST_LAYERS if _LAYERS.search(name) else MOST
                require(not isinstance(value, (int, float)) or abs(value) <= least, "config", f"{name} must be at most {least:,}")
        require(self.window is None or self.attention == "sdpa", "window", f"has no effect with {self.attention} attention")

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.path or ""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters beside the TTT parameters (`train: lora`); `targets` are module names or one regular expression."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"])

    def __post_init__(self) -> None:
        at_least(1, self, "rank")
        at_most(_HIGHEST_RANK, self, "rank")
        require(self.alpha > 0, "alpha", "must be above 0")
        require(0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1")
        require(bool(self.targets) and all(self.targets), "targets", "must name modules, or be a regular expression of their names")
        if isinstance(self.targets, str):
            try:
                re.compile(self.targets)
            except re.error as error:
                raise WrongSetting("targets", f"{shown(self.targets)} is no regular expression: {error}") from None


@dataclass(frozen=True)
class Optimisation:
    """What is trained and how (AdamW).

    train: "all" parameters; the new ones alone ("ttt"); or the new ones and LoRA ("lora").
    steps or tokens: length of the run. batch_size: rows a device and micro-step; accumulation: micro-steps a step.
    conv_*, proj_*: the groups of the target generator (a gate of writes is in P's), whose settings default to those of the rest, except
    that they carry no weight decay. eta_warmup_steps: η rises linearly from 0 over as many steps.
    """

    train: Literal["all", "ttt", "lora"] = "all"
    steps: int | None = None
    tokens: int | None = None
    batch_size: int = 1
    accumulation: int = 1
    learning_rate: float = 5e-6
    weight_decay: float = 0.1
    warmup_steps: int = 0
    conv_learning_rate: float | None = None
    proj_learning_rate: float | None = None
    conv_weight_decay: float = 0.0
    proj_weight_decay: float = 0.0
    ttt_warmup_steps: int | None = None
    eta_warmup_steps: int = 0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_ratio: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    liger: bool = False
    seed: int = 0
    lora: Lora | None = None

    def __post_init__(self) -> None:
        require((self.steps is None) != (self.tokens is None), "steps", "give either steps or tokens")
        at_least(1, self, "steps", "tokens", "batch_size", "accumulation")
        for name in ("learning_rate", "conv_learning_rate", "proj_learning_rate", "epsilon", "max_grad_norm"):
            value = getattr(self, name)
            require(value is None or value > 0, name, "must be above 0")
        at_least(0, self, "seed")
        at_most(2**32 - 1, self, "seed")
        at_most(2**20, self, "batch_size", "accumulation")
        at_least(0, self, "weight_decay", "conv_weight_decay", "proj_weight_decay", "warmup_steps", "ttt_warmup_steps", "eta_warmup_steps")
        require(0 <= self.final_ratio <= 1, "final_ratio", "must be from 0 to 1")
        unused = self.schedule == "constant" and self.final_ratio != Optimisation.final_ratio
        require(not unused, "final_ratio", "has no effect with schedule: constant")
        require(len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", "must be two numbers from 0 up to 1")
        require(self.lora is None or self.train == "lora", "lora", "has no effect without train: lora")


@dataclass(frozen=True)
class Parallel:
    """processes: on each node, one a device. sequence_parallel: ranks that share one row (Ulysses). nodes: several machines.

    launcher: what `inplace-ttt train` starts on several nodes: DeepSpeed's, which it runs on one of them and which starts those of the
    hostfile; or torchrun, for which it runs on each of them (by srun, say) and which meets the others at rendezvous, HOST:PORT of one.
    timeout_minutes: how long a process waits for another one in a collective operation before the run ends.
    """

    processes: int = 1
    sequence_parallel: int = 1
    nodes: int = 1
    launcher: Literal["deepspeed", "torchrun"] = "deepspeed"
    hostfile: str | None = None
    rendezvous: str | None = None
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        by_torchrun = self.launcher == "torchrun"
        require(not by_torchrun or self.hostfile is None, "hostfile", "has no effect with launcher: torchrun")
        require(by_torchrun or self.rendezvous is None, "rendezvous", "has no effect without launcher: torchrun")
        require(
            self.rendezvous is None or re.fullmatch(r"\S+:\d{1,5}", self.rendezvous) is not None,
            "rendezvous",
            "must be HOST:PORT of a node",
        )
        require(0 < self.timeout_minutes <= 100_000, "timeout_minutes", "must be above 0 and at most 100,000")
        at_least(1, self, "processes", "sequence_parallel", "nodes")
        at_most(65536, self, "processes", "sequence_parallel", "nodes")
        world = self.processes * self.nodes
        require(world % self.sequence_parallel == 0, "sequence_parallel", f"{self.sequence_parallel} does not divide {world} processes")

    @property
    def world(self) -> int:
        return self.processes * self.nodes

    @property
    def starts_itself(self) -> bool:
        """Whether `inplace-ttt train` starts the processes, not a launcher."""
        return self.nodes == 1 and self.hostfile is None and self.launcher == "deepspeed"


@dataclass(frozen=True)
class Monitor:
    """How often (in steps) things are reported: the log line, held-out loss with writes on and off, a diagnosis, checkpoints.

    compare_every: held-out documents with writes on, off, and with another document's (what `evaluate` says of a checkpoint).
    """

    log_every: int = 10
    evaluate_every: int = 0
    evaluate_rows: int = 8
    diagnose_every: int = 0
    compare_every: int = 0
    save_every: int = 500
    keep: int = 2
    report_to: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    stop_write_ratio: float = 10.0

    def __post_init__(self) -> None:
        at_least(1, self, "log_every", "save_every", "keep", "evaluate_rows")
        at_least(0, self, "evaluate_every", "diagnose_every", "compare_every")
        require(self.stop_write_ratio > 0, "stop_write_ratio", "must be above 0")


@dataclass(frozen=True)
class Deviation:
    """A deviation from the paper that the run declares: the audit's item, and the reason."""

    id: str
    why: str


@dataclass(frozen=True)
class Audit:
    """The gate before the first step. profile: what the run is held against; None skips it."""

    profile: Literal["paper", "official", "ttt_ntp"] | None = "paper"
    deviations: list[Deviation] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.profile is not None or not self.deviations, "deviations", "have no effect without a profile")


@dataclass(frozen=True)
class Recipe:
    """A run. Relative paths start at the current folder; `deepspeed` and `hostfile` at the recipe's own.

    surgery: what is converted and how, with `preset` for where the rest comes from; none where `model.path` is converted.
    deepspeed: a ZeRO stage, a DeepSpeed JSON file, or its contents; what the recipe says itself is filled in.
    """

    model: Model
    data: Data
    optimisation: Optimisation
    output: str
    surgery: InPlaceTTTConfig | None = None
    parallel: Parallel = field(default_factory=Parallel)
    deepspeed: int | str | dict[str, Any] = 1
    monitor: Monitor = field(default_factory=Monitor)
    audit: Audit = field(default_factory=Audit)
    path: Path | None = field(default=None, metadata={"internal": True})

    def __post_init__(self) -> None:
        require((problem := name_problem(self.output)) is None, "output", f"{shown(self.output)} {problem}")
        if isinstance(self.deepspeed, int):
            require(0 <= self.deepspeed <= 3, "deepspeed", f"there is no ZeRO stage {self.deepspeed}; use 0 to 3, a file, or settings")
        require(
            bool(self.model.tokenizer_path) or self.data.recall is not None, "model", "a model from scratch needs a tokenizer to read text"
        )
        shared, stage = self.parallel.sequence_parallel, self.zero_stage
        if self.model.quantise is not None:
            require(self.optimisation.train == "lora", "model", "quantise holds the base's weights frozen and packed: set train: lora")
            require(stage <= 2, "model", "quantise packs weights in a way that ZeRO-3 cannot shard: set deepspeed: 2")
        require(
            self.data.sequence_length % shared == 0,
            "data",
            f"sequence_length {self.data.sequence_length} does not divide by {shared} ranks",
        )
        require(
            self.monitor.save_every * self.optimisation.accumulation % shared == 0,
            "monitor",
            f"save_every x accumulation must be a multiple of sequence_parallel = {shared}, so that a resumed run meets the same rows",
        )
        for name in ("diagnose_every", "compare_every"):
            require(
                not getattr(self.monitor, name) or (stage <= 2 and shared == 1),
                "monitor",
                f"{name} needs whole weights and whole rows on a process: ZeRO stage 0 to 2, and sequence_parallel 1",
            )
        for name in ("evaluate_every", "compare_every"):
            held_out = bool(self.data.validation or self.data.validation_documents)
            require(held_out or not getattr(self.monitor, name), "monitor", f"{name} needs held-out documents; set data.validation")
        checkpoint = self.deepspeed_settings.get("checkpoint")
        universal = isinstance(checkpoint, dict) and bool(checkpoint.get("load_universal"))
        require(
            not universal or stage in (1, 2),
            "deepspeed",
            "checkpoint.load_universal is exact under ZeRO 1 and 2 alone; go on with the number of processes that the run had",
        )
        if not isinstance(self.deepspeed, int):
            check_deepspeed(self.deepspeed_settings, self._of_deepspeed())
        require(shared == 1 or stage >= 1, "deepspeed", "sequence_parallel needs ZeRO stage 1, 2 or 3")
        require(shared == 1 or self.model.window is None, "model", "window does not go with sequence_parallel")

    def beside(self, name: str) -> Path:
        """A file named by the recipe, which lies beside it."""
        here = Path(name)
        return here if here.is_absolute() or self.path is None else self.path.parent / here

    @functools.cached_property
    def deepspeed_settings(self) -> dict[str, Any]:
        """The DeepSpeed config as written (HF's "auto" values still open)."""
        if isinstance(self.deepspeed, Mapping):
            return dict(self.deepspeed)
        if isinstance(self.deepspeed, int):
            return {"zero_optimization": {"stage": self.deepspeed}}
        file = self.beside(self.deepspeed)
        require_regular(file, "the DeepSpeed settings cannot be read")
        try:
            values = parse_json(file.read_bytes())
        except OSError as error:
            raise WrongSetting("deepspeed", f"cannot read {file}: {error.strerror}") from None
        except ValueError as error:
            raise WrongSetting("deepspeed", f"{file} is no JSON: {error}") from None
        require(isinstance(values, dict), "deepspeed", f"{file} is not a JSON object")
        return values

    def _of_deepspeed(self) -> dict[str, tuple[str, Any]]:
        """DeepSpeed's settings that the recipe fills in: its own name for each, and the value."""
        o = self.optimisation
        return {
            "train_micro_batch_size_per_gpu": ("optimisation.batch_size", o.batch_size),
            "gradient_accumulation_steps": ("optimisation.accumulation", o.accumulation),
            "train_batch_size": ("batch_size x accumulation x processes", o.batch_size * o.accumulation * self.parallel.world),
            "gradient_clipping": ("optimisation.max_grad_norm", o.max_grad_norm),
            "bf16.enabled": ("model.dtype", self.model.dtype == "bfloat16"),
            "fp16.enabled": ("model.dtype", False),
        }

    @property
    def zero_stage(self) -> int:
        zero = self.deepspeed_settings.get("zero_optimization", {})
        stage = zero.get("stage", 0) if isinstance(zero, dict) else None
        if type(stage) is not int or not 0 <= stage <= 3:
            raise WrongSetting("deepspeed", f"zero_optimization must be a table with a stage from 0 to 3, got {shown(zero)}")
        return stage

    @property
    def rows_per_step(self) -> int:
        """Rows of `sequence_length` tokens that one optimiser step sees, over all devices."""
        o = self.optimisation
        return o.batch_size * o.accumulation * self.parallel.world // self.parallel.sequence_parallel

    @property
    def steps(self) -> int:
        o = self.optimisation
        return o.steps if o.steps is not None else -(-(o.tokens or 0) // (self.rows_per_step * self.data.sequence_length))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, every default written out."""
        values = dataclasses.asdict(self)
        del values["path"]
        return values


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `overrides` are `a.b=value` with a YAML value. Raises InPlaceTTTError naming line and key."""
    return read_settings(Recipe, Path(path), overrides, path=Path(path))
