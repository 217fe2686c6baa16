"""Lists the settings that may change between two starts of one run, and refuses all other changes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from transformers import PreTrainedModel

from ...checkpoint.folder_fingerprint import base_fingerprint_in
from ...errors import InPlaceTTTError, shown
from ...surgery import config_of
from .recipe import Recipe

NO_EFFECT = (
    "output",  # it holds the checkpoints, and may have been moved
    "parallel.launcher",
    "parallel.hostfile",
    "parallel.rdzv_endpoint",
    "parallel.timeout_minutes",
    "deepspeed.checkpoint*",  # concerns reading and writing of checkpoints alone
    "data.processes",
    "data.cache",
    "data.validation",  # a document that it removes from training changes DOCUMENTS
    "monitor.*",  # these take effect, but not on the weights
    "audit.*",
)
"""Settings that leave the trained weights unchanged."""

TAKES_EFFECT = (
    "training.steps",  # from the next step on, the schedule is that of a run of the new length
    "training.tokens",
    # read at each start, like all of these; lowering them helps after a loss that diverged
    "training.*learning_rate",
    "training.*weight_decay",
    "training.*warmup_steps",
    "training.lr_scheduler",
    "training.min_lr_ratio",
    "training.betas",
    "training.epsilon",
    "training.max_grad_norm",
    "training.distillation*",
    "training.gradient_checkpointing",  # this and the next two: other ways to compute the same
    "training.liger",
    "model.attn_implementation",
    "ttt.eta",
    "ttt.clip*",
)
"""Settings that may change from one start to the next.

The others are of three kinds. Some would be ignored (the seed of weights that exist already). Some do not fit
the checkpoint (processes, dtype, ZeRO stage, trained parameters). Some change the next rows (batch size, row
length, data).
"""

_RESHARDED = (
    "parallel.nproc_per_node x nnodes",
    "training.gradient_accumulation_steps",
    "training.batch_size",
    "deepspeed.zero_optimization*",
)
"""Settings that may change too, if a run resumes from a universal DeepSpeed checkpoint.

The number of rows per step must stay the same.
"""

_BY_CONTENT = ("model.path", "model.tokenizer", "model.config*", "model.overrides*")
_BY_TOKENS = ("data.train", "data.format", "data.text_field", "data.split", "data.validation_documents")
"""Names that may change as long as their content stays the same: an architecture, or token ids."""
_PASSING = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "architectures",
    "use_cache",
    "auto_map",
    "inplace_ttt",
    "layer_types",
)
"""Keys of a model's config that are not compared.

They record its source and its form, or repeat the section `ttt`. The `layer_types` of a converted model
have no effect.
"""

_FORMER_DEFAULTS = {"data.text_field": "text"}
"""Earlier defaults of settings whose default is None now, with the same meaning."""

DOCUMENTS = "data.train.sha256"
"""Key of the hash of the training documents."""

WEIGHTS = "model.path.sha256"
"""Key of the fingerprint of LoRA's base, whose weights are missing in the checkpoints."""

Facts = dict[str, Any]
"""Plain values of a recipe by `section.key`, with hashes of the files and models that it names."""


def facts_of(recipe: Recipe, model: PreTrainedModel) -> Facts:
    """Returns the settings and content that determine a run, without `DOCUMENTS`.

    The hash of the documents is known only once the data is built.

    Args:
        recipe: the run's recipe.
        model: the recipe's model, on any device.
    """
    values = recipe.to_dict()
    values["ttt"] = config_of(model).to_dict()
    values["architecture"] = {
        key: value for key, value in model.config.to_dict().items() if key not in _PASSING
    }
    values["deepspeed"] = recipe.deepspeed_settings
    values["parallel"] = {
        **values["parallel"],
        "nproc_per_node x nnodes": recipe.parallel.world,
        "nproc_per_node": None,
        "nnodes": None,
    }
    facts = dict(_flat(json.loads(json.dumps(values, default=str))))
    if recipe.training.trainable == "lora" and recipe.model.path is not None:
        facts[WEIGHTS] = base_fingerprint_in(recipe.model.path)
    return facts


def changes(old: Facts, new: Facts, where: str) -> list[dict[str, Any]]:
    """Returns the settings that differ and take effect, as {"setting", "from", "to"}.

    If `new` lacks the hash of the documents, or `old` that of the weights, it is not compared.

    Args:
        old: facts of the previous start.
        new: facts of this start.
        where: the checkpoint that was made with `old`, for the error.

    Raises:
        InPlaceTTTError: if settings differ that cannot change within a run; the message has them.
    """
    old, new = {WEIGHTS: new.get(WEIGHTS), **old}, {DOCUMENTS: old.get(DOCUMENTS), **new}
    # the hash of a stream covers only its start
    by_content = _BY_CONTENT if new.get("data.streaming") else (*_BY_CONTENT, *_BY_TOKENS)
    different = list(_differing(old, new, (*NO_EFFECT, *by_content)))
    resharded = new.get("deepspeed.checkpoint.load_universal") and _rows_a_step(old) == _rows_a_step(new)
    may = (*TAKES_EFFECT, *_RESHARDED) if resharded else TAKES_EFFECT
    if fixed := [change for change in different if not _matches(change["setting"], may)]:
        raise InPlaceTTTError(
            f"{where} was trained with {_said(fixed)}, which cannot change within a run; put it back, name "
            "another output, or start anew "
            "with --from-scratch."
        )
    return different


def _rows_a_step(facts: Facts) -> int:
    return math.prod(
        facts[key]
        for key in (
            "parallel.nproc_per_node x nnodes",
            "training.gradient_accumulation_steps",
            "training.batch_size",
        )
    )


def refuse_other_results(old: Mapping[str, Any], recipe: Recipe, where: str) -> None:
    """Refuses a recipe with which a finished run would have trained other weights.

    Args:
        old: `recipe` of the finished run's report.
        recipe: the recipe of this start.
        where: the run's output, for the error.

    Raises:
        InPlaceTTTError: if settings differ; the message has them.
    """
    before, now = (dict(_flat(json.loads(json.dumps(values)))) for values in (old, recipe.to_dict()))
    length = ("training.steps", "training.tokens")  # the caller compares the number of steps
    if different := list(_differing(before, now, (*NO_EFFECT, *length))):
        raise InPlaceTTTError(
            f"{where} holds a finished run with {_said(different)}; name another output, or start anew "
            "with --from-scratch."
        )


def _differing(old: Facts, new: Facts, passed_over: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        if now is None and before == _FORMER_DEFAULTS.get(key):
            continue
        if before != now and not _matches(key, passed_over):
            yield {"setting": key, "from": before, "to": now}


def _said(different: list[dict[str, Any]]) -> str:
    said = ", ".join(
        f"{change['setting']} {shown(change['from'])}, not {shown(change['to'])}" for change in different[:3]
    )
    return said + (f", and {len(different) - 3} more" if len(different) > 3 else "")


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _flat(values: Any, keys: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _flat(value, f"{keys}.{key}" if keys else key)
    elif values not in (None, {}):
        yield keys, values
