"""What of a recipe may change between two starts of one run: the table, and the refusal of all that is not in
it."""

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
    "output",  # checkpoints lie in it, wherever it has been moved
    "parallel.launcher",
    "parallel.hostfile",
    "parallel.rdzv_endpoint",
    "parallel.timeout_minutes",
    "deepspeed.checkpoint*",  # how a checkpoint is read and written
    "data.processes",
    "data.cache",
    "data.validation",  # a document that it takes out of training shows in DOCUMENTS
    "monitor.*",  # all of it takes effect, none of it on the weights
    "audit.*",
)
"""Settings that have no effect on what is trained."""

TAKES_EFFECT = (
    "training.steps",  # the schedule is then that of a run of the new length, from the next step on
    "training.tokens",
    # read anew at each start, as all of these: what is lowered after a loss that blew up
    "training.*learning_rate",
    "training.*weight_decay",
    "training.*warmup_steps",
    "training.lr_scheduler",
    "training.min_lr_ratio",
    "training.betas",
    "training.epsilon",
    "training.max_grad_norm",
    "training.gradient_checkpointing",  # these three: how the same is computed
    "training.liger",
    "model.attn_implementation",
    "ttt.eta",
    "ttt.clip*",
)
"""Settings that may change from one start to the next. All others would be ignored (the seed of weights that
are there already), do not fit the checkpoint (processes, dtype, ZeRO stage, what is trained), or change which
rows come next (batch, row length, data)."""

_RESHARDED = (
    "parallel.nproc_per_node x nnodes",
    "training.gradient_accumulation_steps",
    "training.batch_size",
    "deepspeed.zero_optimization*",
)
"""What may change besides, with as many rows a step, where a run goes on from a checkpoint that DeepSpeed
made universal."""

_BY_CONTENT = ("model.path", "model.tokenizer", "model.config*", "model.overrides*")
_BY_TOKENS = ("data.train", "data.format", "data.text_field", "data.split", "data.validation_documents")
"""Names whose place may change as long as what is found there is the same: an architecture, token ids."""
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
"""Of a model's config: where it was read, how, and what `surgery` says already. (A converted model's layer
types are a note.)"""

_FORMER_DEFAULTS = {"data.text_field": "text"}
"""Of settings that are none now where they are not given, with the same meaning."""

DOCUMENTS = "data.train.sha256"
"""The key of what the documents are known by."""

WEIGHTS = "model.path.sha256"
"""The key of what weights are known by that LoRA stands on and no checkpoint holds."""

Facts = dict[str, Any]
"""A recipe, plain and flat by `section.key`, with what stands behind the names in it."""


def facts_of(recipe: Recipe, model: PreTrainedModel) -> Facts:
    """What a run is made by, but for `DOCUMENTS`, which comes with the data. `model`: the recipe's, on any
    device."""
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
    """Settings that differ and take effect, as {"setting", "from", "to"}. `where`: what was made by `old`.
    Documents that are not known yet pass, and weights that were not known then. Raises InPlaceTTTError naming
    the settings that cannot change within a run.
    """
    old, new = {WEIGHTS: new.get(WEIGHTS), **old}, {DOCUMENTS: old.get(DOCUMENTS), **new}
    # of a stream only the start is known
    by_content = _BY_CONTENT if new.get("data.streaming") else (*_BY_CONTENT, *_BY_TOKENS)
    different = list(_differing(old, new, (*NO_EFFECT, *by_content)))
    resharded = new.get("deepspeed.checkpoint.load_universal") and _rows_a_step(old) == _rows_a_step(new)
    may = (*TAKES_EFFECT, *_RESHARDED) if resharded else TAKES_EFFECT
    if fixed := [change for change in different if not _matches(change["setting"], may)]:
        raise InPlaceTTTError(
            f"{where} was trained with {_said(fixed)}: that cannot change within a run; put it back, name "
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
    """Refuse a recipe that would have trained something else than a finished run's, by its report's
    `recipe`."""
    before, now = (dict(_flat(json.loads(json.dumps(values)))) for values in (old, recipe.to_dict()))
    length = ("training.steps", "training.tokens")  # said in steps by the caller
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
