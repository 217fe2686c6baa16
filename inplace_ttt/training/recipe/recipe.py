"""A training run as one YAML file: its sections, and the checks across them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import InPlaceTTTConfig
from ...errors import shown
from ...files.json_files import parse_json
from ...files.paths import name_problem, require_regular
from ...files.schema import WrongSetting, require
from ...files.settings import read_settings
from .data_section import Data
from .deepspeed import check_deepspeed
from .sections import Audit, Model, Monitor, Parallel
from .training_section import Training


@dataclass(frozen=True)
class Recipe:
    """The settings of one training run.

    Relative paths start at the current folder. Those of `deepspeed` and `hostfile` start at the recipe's
    folder.

    Attributes:
        model: the model to train.
        data: the documents.
        training: parameters to train, length of the run, optimizer.
        output: folder of the run.
        ttt: settings of the conversion. A `preset` gives the settings that are left out. None if
            `model.path` is converted already.
        parallel: processes and nodes.
        deepspeed: a ZeRO stage, a DeepSpeed JSON file, or its contents. Values that the recipe sets itself
            are filled in.
        monitor: logging, evaluation and checkpoints.
        audit: the audit before the first step.
        path: the recipe's file.
    """

    model: Model
    data: Data
    training: Training
    output: str
    ttt: InPlaceTTTConfig | None = None
    parallel: Parallel = field(default_factory=Parallel)
    deepspeed: int | str | dict[str, Any] = 1
    monitor: Monitor = field(default_factory=Monitor)
    audit: Audit = field(default_factory=Audit)
    path: Path | None = field(default=None, metadata={"internal": True})

    def __post_init__(self) -> None:
        require((problem := name_problem(self.output)) is None, "output", f"{shown(self.output)} {problem}")
        if isinstance(self.deepspeed, int):
            require(
                0 <= self.deepspeed <= 3,
                "deepspeed",
                f"ZeRO stage {self.deepspeed} does not exist; use 0 to 3, a file, or settings",
            )
        require(
            bool(self.model.tokenizer_path) or self.data.recall is not None,
            "model",
            "a model from scratch needs a tokenizer to read text",
        )
        shared, stage = self.parallel.sequence_parallel_size, self.zero_stage
        if self.model.load_in is not None:
            require(
                self.training.trainable == "lora",
                "model",
                "load_in keeps the base's weights frozen and packed: set trainable: lora",
            )
            require(
                stage <= 2,
                "model",
                "load_in packs weights in a way that ZeRO-3 cannot shard: set deepspeed: 2",
            )
        require(
            self.data.sequence_length % shared == 0,
            "data",
            f"sequence_length {self.data.sequence_length} is not divisible by {shared} ranks",
        )
        require(
            self.monitor.save_steps * self.training.gradient_accumulation_steps % shared == 0,
            "monitor",
            f"save_steps x gradient_accumulation_steps must be a multiple of sequence_parallel_size "
            f"{shared}, so that a resumed run reads the same rows",
        )
        for name in ("diagnose_steps", "compare_steps"):
            require(
                not getattr(self.monitor, name) or (stage <= 2 and shared == 1),
                "monitor",
                f"{name} needs whole weights and whole rows on a process: ZeRO stage 0 to 2, and "
                "parallel.sequence_parallel_size 1",
            )
        for name in ("eval_steps", "compare_steps"):
            held_out = bool(self.data.validation or self.data.validation_documents)
            require(
                held_out or not getattr(self.monitor, name),
                "monitor",
                f"{name} needs held-out documents; set data.validation",
            )
        checkpoint = self.deepspeed_settings.get("checkpoint")
        universal = isinstance(checkpoint, dict) and bool(checkpoint.get("load_universal"))
        require(
            not universal or stage in (1, 2),
            "deepspeed",
            "checkpoint.load_universal is exact only under ZeRO 1 and 2; continue with the number of "
            "processes that the run had",
        )
        if not isinstance(self.deepspeed, int):
            check_deepspeed(self.deepspeed_settings, self._of_deepspeed())
        require(
            shared == 1 or stage >= 1,
            "deepspeed",
            "sequence_parallel_size above 1 needs ZeRO stage 1, 2 or 3",
        )
        require(
            shared == 1 or self.model.window is None,
            "model",
            "window does not work with sequence_parallel_size above 1",
        )

    def beside(self, name: str) -> Path:
        """Returns the path of a file that the recipe names, relative to the recipe's folder."""
        here = Path(name)
        return here if here.is_absolute() or self.path is None else self.path.parent / here

    @functools.cached_property
    def deepspeed_settings(self) -> dict[str, Any]:
        """The DeepSpeed config as written, with transformers' "auto" values still open."""
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
            raise WrongSetting("deepspeed", f"{file} is not JSON: {error}") from None
        require(isinstance(values, dict), "deepspeed", f"{file} is not a JSON object")
        return values

    def _of_deepspeed(self) -> dict[str, tuple[str, Any]]:
        """Maps each DeepSpeed setting that the recipe fills in to the recipe's name for it and the value."""
        o = self.training
        return {
            "train_micro_batch_size_per_gpu": ("training.batch_size", o.batch_size),
            "gradient_accumulation_steps": (
                "training.gradient_accumulation_steps",
                o.gradient_accumulation_steps,
            ),
            "train_batch_size": (
                "batch_size x gradient_accumulation_steps x processes",
                o.batch_size * o.gradient_accumulation_steps * self.parallel.world,
            ),
            "gradient_clipping": ("training.max_grad_norm", o.max_grad_norm),
            "bf16.enabled": ("model.dtype", self.model.dtype == "bfloat16"),
            "fp16.enabled": ("model.dtype", False),
        }

    @property
    def zero_stage(self) -> int:
        zero = self.deepspeed_settings.get("zero_optimization", {})
        stage = zero.get("stage", 0) if isinstance(zero, dict) else None
        if type(stage) is not int or not 0 <= stage <= 3:
            raise WrongSetting(
                "deepspeed", f"zero_optimization must be a table with a stage from 0 to 3, got {shown(zero)}"
            )
        return stage

    @property
    def rows_per_step(self) -> int:
        """Rows of `sequence_length` tokens per optimizer step, over all devices."""
        o = self.training
        return (
            o.batch_size
            * o.gradient_accumulation_steps
            * self.parallel.world
            // self.parallel.sequence_parallel_size
        )

    @property
    def steps(self) -> int:
        o = self.training
        return (
            o.steps
            if o.steps is not None
            else -(-(o.tokens or 0) // (self.rows_per_step * self.data.sequence_length))
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, with all defaults."""
        values = dataclasses.asdict(self)
        del values["path"]
        return values


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: the YAML file.
        overrides: settings as `a.b=value`, with a YAML value.

    Returns:
        The recipe, with its defaults.

    Raises:
        InPlaceTTTError: if the file cannot be read, or a key or value is invalid (with its line and key).

    Examples:
        >>> import json
        >>> from pathlib import Path
        >>> from inplace_ttt.training.recipe import load_recipe
        >>> recipe = {
        ...     "model": {"path": "./smollm2-135m"},
        ...     "ttt": {"layers": [12, 18, 24], "chunk_size": 64},
        ...     "data": {"train": "book.txt", "sequence_length": 512},
        ...     "training": {"steps": 20, "learning_rate": 1e-3},
        ...     "output": "runs/mine",
        ... }
        >>> _ = Path("mine.yaml").write_text(json.dumps(recipe))  # JSON is YAML too
        >>> load_recipe("mine.yaml", ["ttt.chunk_size=128"]).ttt.chunk_size
        128
    """
    return read_settings(Recipe, Path(path), overrides, path=Path(path))
