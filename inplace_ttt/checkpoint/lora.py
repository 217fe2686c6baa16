"""Reads and writes the output of a run with `trainable: lora`, a PEFT adapter with LoRA, conv and P."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError, how_to_install, reported
from ..files.json_files import read_json, write_json
from ..files.schema import from_values
from .adapter import is_adapter, located
from .folder_fingerprint import base_fingerprint_in
from .reading import PEFT_CONFIG, Checkpoint

_BASE = "inplace_ttt_base.json"


@dataclass(frozen=True)
class _Base:
    """The base of a PEFT adapter, as the training run records it.

    Attributes:
        fingerprint: fingerprint of the weights that the adapter was trained on (`base_fingerprint_in`).
        ttt: TTT config with which the run converted these weights; None if they were already converted.
    """

    fingerprint: str
    ttt: InPlaceTTTConfig | None = None


def tie_to_base(folder: Path, fingerprint: str, surgery: InPlaceTTTConfig | None) -> None:
    """Records the fingerprint of a PEFT adapter's base in the adapter's folder.

    If the run converted the base, the TTT config is recorded too.

    Args:
        folder: the adapter.
        fingerprint: fingerprint of the base (`base_fingerprint_in`).
        surgery: TTT config of the conversion; None if the base was already converted.
    """
    write_json(
        folder / _BASE,
        {"fingerprint": fingerprint, **({} if surgery is None else {"ttt": surgery.to_dict()})},
    )


def base_of(path: str | os.PathLike[str], base: str | None = None) -> str:
    """Returns the folder of a PEFT adapter's base: `base` if given, else the folder that the adapter names.

    Raises:
        InPlaceTTTError: if the adapter names no base, or a folder that does not exist.
    """
    if base is not None:
        return base
    named = read_json(Path(path) / PEFT_CONFIG, f"{path} is not an adapter of PEFT").get(
        "base_model_name_or_path"
    )
    if not isinstance(named, str) or not named:
        raise InPlaceTTTError(
            f"{path}/{PEFT_CONFIG} names no base_model_name_or_path; set it to the base's folder."
        )
    return located(path, named)


def standing_on(path: str | os.PathLike[str], base: str | None = None) -> tuple[str, InPlaceTTTConfig | None]:
    """Returns the folder of a PEFT adapter's base, and the TTT config with which it must be converted.

    The config is None if the base is already converted. It is also None for an adapter from another program,
    which records neither a fingerprint nor a conversion.

    Raises:
        InPlaceTTTError: if the base's weights are not those that the adapter was trained on.
    """
    source, file = base_of(path, base), Path(path) / _BASE
    if not file.exists():
        return source, None
    known = from_values(
        _Base, read_json(file, f"{path} does not name the weights it was trained on"), str(file)
    )
    if (found := base_fingerprint_in(source)) != known.fingerprint:
        raise InPlaceTTTError(
            f"{path} was trained on other weights than {source} (fingerprint {known.fingerprint[:12]}…, "
            f"found {found[:12]}…); load it "
            "onto those weights."
        )
    converted = is_adapter(source) or Checkpoint.open(source).section is not None
    return source, None if converted else known.ttt


def merged(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """Returns the converted model with a PEFT adapter merged into it.

    LoRA is added to the weights. The adapter's conv and P replace the model's.

    Raises:
        InPlaceTTTError: if PEFT is not installed, the adapter lacks tensors of modules that it adapts, or it
            has tensors for modules that the model lacks.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.utils import load_peft_weights
    except ImportError:
        raise InPlaceTTTError(
            f"{path} is an adapter of PEFT, which is not installed; {how_to_install('train')}."
        ) from None
    with reported(f"cannot load {path}"):
        held = load_peft_weights(str(path), device="cpu").keys()
        adapted = PeftModel.from_pretrained(model, str(path))
        wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    for names, problem in (
        (wanted - held, "lacks {} tensors of the modules it adapts"),
        (held - wanted - adapted.state_dict().keys(), "has {} tensors without a place in its base"),
    ):
        if names:  # PEFT only warns about lacking tensors, and ignores tensors without a place
            raise InPlaceTTTError(
                f"{path} {problem.format(len(names))} ({min(names)}, …); copy the adapter again, or load it "
                "onto its own base."
            )
    return adapted.merge_and_unload().eval()
