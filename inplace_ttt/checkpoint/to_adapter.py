"""Saves a converted model or checkpoint as an adapter.

Base and adapter together are the same model only if training left the base's weights unchanged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..converted_config import MODEL_TYPE
from ..errors import InPlaceTTTError
from ..files.folders import new_folder
from ..files.manifest import CHECKPOINT
from ..surgery import config_of, fast_weights
from .adapter import write_adapter
from .fingerprint import fingerprint, rounded
from .names import parameters
from .reading import Checkpoint
from .writing import empty_model

logger = logging.getLogger(__name__)


def save_adapter(
    model: PreTrainedModel, path: str | os.PathLike[str], *, base: str | None = None, overwrite: bool = False
) -> None:
    """Saves only the TTT tensors of a converted model, as an adapter of its base.

    If the base's safetensors are in a local folder or the hub's cache, every weight of the model is compared
    with the base. If not, only the down-projections are compared, and a warning is logged.

    Args:
        model: a converted model, whose base weights were not trained.
        path: adapter folder to write.
        base: folder or hub id of the base (default: the place that the model was loaded from).
        overwrite: replace an earlier output.

    Raises:
        InPlaceTTTError: if a weight differs from the base's, or the base is quantized, wrapped or unknown.
            Also if `path` may not be replaced.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import convert, load, save_adapter
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> AutoModelForCausalLM.from_config(small).save_pretrained("small-base")
        >>> model = convert(AutoModelForCausalLM.from_pretrained("small-base"))
        >>> save_adapter(model, "small-adapter")
        >>> adapted = load("small-adapter")  # onto ./small-base
    """
    layers = fast_weights(model)
    known = unchanged_base(model, base, "use save_pretrained")
    tensors = {
        index: {kind: tensor.cpu() for kind, tensor in layer.ttt.state_dict().items()}
        for index, layer in layers.items()
    }
    with new_folder(path, CHECKPOINT, overwrite=overwrite, sources=[known["name_or_path"]]) as folder:
        write_adapter(folder, config_of(model), tensors, known)


def unchanged_base(model: PreTrainedModel, base: str | None, remedy: str) -> dict[str, Any]:
    """Returns the description of a converted model's base, if training left the base's weights unchanged.

    Args:
        model: the converted model.
        base: folder or hub id of the base (default: the place that the model was loaded from).
        remedy: end of the message about trained weights.

    Raises:
        InPlaceTTTError: if a weight differs from the base's, or the base is quantized, wrapped or unknown.
    """
    layers = fast_weights(model)
    if any(module.matrix() is None for module in layers.values()):
        raise InPlaceTTTError(
            "the base is quantized or wrapped, so an adapter could not be tied to its weights; save the "
            "state dict."
        )
    known = getattr(model.config, MODEL_TYPE, {}).get("base", {})
    name = base or known.get("name_or_path") or model.config.name_or_path
    if not name:
        raise InPlaceTTTError(
            "the model's config does not name its base, which an adapter needs; give base=…."
        )
    found = fingerprint(module.weight for module in layers.values())  # type: ignore[misc]
    if known.get("fingerprint") not in (None, found):
        raise InPlaceTTTError(
            f"training has changed the down-projections, which an adapter would lose; {remedy}."
        )
    revision = known.get("revision") if name == known.get("name_or_path") else None
    saved = revert_weight_conversion(model, dict(model.named_parameters()))
    _refuse_trained(model, saved, saved.__getitem__, "the model", name, revision, remedy)
    return {"name_or_path": name, "revision": revision, "fingerprint": found}


def base_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the description of the base onto which a full checkpoint's TTT tensors can be loaded.

    Raises:
        InPlaceTTTError: if the base is unknown, or training changed its weights.
    """
    base = checkpoint.section and checkpoint.section.get("base")
    if not base or not base.get("fingerprint"):
        raise InPlaceTTTError(
            f"{checkpoint.name} does not name the base that it was made from, so an adapter of it could "
            "not be loaded."
        )
    if checkpoint.fingerprint(checkpoint.down_projections().values()) != base["fingerprint"]:
        raise InPlaceTTTError(
            f"{checkpoint.name} has other down-projections than {base['name_or_path']}, which an adapter "
            "would lose; keep the full checkpoint."
        )
    (_, model), names, weight = empty_model(checkpoint), checkpoint.weight_map, checkpoint.tensor
    _refuse_trained(
        model, names, weight, checkpoint.name, base["name_or_path"], base.get("revision"), "keep it full"
    )
    return dict(base)


def _refuse_trained(
    model: PreTrainedModel,
    names: Iterable[str],
    weight: Callable[[str], Tensor],
    whose: str,
    base: str,
    revision: str | None,
    remedy: str,
) -> None:
    """Raises InPlaceTTTError if a weight, rounded as in fingerprints, differs from the base's.

    Without local safetensors of the base it logs a warning instead.
    """
    known = Checkpoint.here(base, revision)
    if known is None:
        logger.warning(
            "only the down-projections of %s were compared with %s, whose safetensors are not stored here",
            whose,
            base,
        )
        return
    theirs = known.names(model)
    for name, parameter in parameters(names, model).items():
        there = theirs.get(parameter)
        if there and not torch.equal(rounded(weight(name)), rounded(known.tensor(there))):
            raise InPlaceTTTError(
                f"{whose} has another {name} than {base}, and an adapter would lose the change; {remedy}."
            )
