"""A converted model or checkpoint as an adapter, which is the same model only where training left its base as
it was."""

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
    """Save a converted model's TTT tensors alone, to load onto its base, whose weights must not have been
    trained.

    base: folder or hub id of the base; where the model was loaded from, without one. Where its safetensors
        are here, in a folder or the
    hub's cache, every weight is compared; if not, a warning says so. Raises InPlaceTTTError where one
    differs.
    """
    layers = fast_weights(model)
    if any(module.matrix() is None for module in layers.values()):
        raise InPlaceTTTError(
            "the base is quantised or wrapped, so that the adapter could not be tied to its weights; save "
            "the state dict."
        )
    known = getattr(model.config, MODEL_TYPE, {}).get("base", {})
    name = base or known.get("name_or_path") or model.config.name_or_path
    if not name:
        raise InPlaceTTTError(
            "the model does not know where its base came from; say it with save_adapter(…, base=…)."
        )
    found = fingerprint(module.weight for module in layers.values())  # type: ignore[misc]
    if known.get("fingerprint") not in (None, found):
        raise InPlaceTTTError(
            "training has changed the down-projections, which an adapter would lose; use save_pretrained."
        )
    revision = known.get("revision") if name == known.get("name_or_path") else None
    saved = revert_weight_conversion(model, dict(model.named_parameters()))
    _refuse_trained(model, saved, saved.__getitem__, "the model", name, revision, "use save_pretrained")
    tensors = {
        index: {kind: tensor.cpu() for kind, tensor in layer.ttt.state_dict().items()}
        for index, layer in layers.items()
    }
    with new_folder(path, CHECKPOINT, overwrite=overwrite, sources=[name]) as folder:
        write_adapter(
            folder,
            config_of(model),
            tensors,
            {"name_or_path": name, "revision": revision, "fingerprint": found},
        )


def base_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The base that a full checkpoint's TTT tensors can be an adapter for. Raises InPlaceTTTError where
    training changed its weights."""
    base = checkpoint.section and checkpoint.section.get("base")
    if not base or not base.get("fingerprint"):
        raise InPlaceTTTError(
            f"{checkpoint.name} does not say which base it stands on, so an adapter of it could not be "
            "loaded."
        )
    if checkpoint.fingerprint(checkpoint.down_projections().values()) != base["fingerprint"]:
        raise InPlaceTTTError(
            f"{checkpoint.name} has other down-projections than {base['name_or_path']}, which an adapter "
            "would lose; keep it full."
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
    """Refuse a weight that the base has otherwise, rounded as fingerprints are, where its safetensors are
    here."""
    known = Checkpoint.here(base, revision)
    if known is None:
        logger.warning(
            "only the down-projections of %s were compared with %s, of which no safetensors are here",
            whose,
            base,
        )
        return
    theirs = known.names(model)
    for name, parameter in parameters(names, model).items():
        there = theirs.get(parameter)
        if there and not torch.equal(rounded(weight(name)), rounded(known.tensor(there))):
            raise InPlaceTTTError(
                f"{whose} has another {name} than {base}, which an adapter would lose; {remedy}."
            )
