"""Reads and writes the output of `trainable: lora`: a PEFT adapter with LoRA, conv and P."""

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
        fingerprint: of the weights that the adapter was trained on, as `base_fingerprint_in` computes it.
        ttt: the conversion that the run made of them; None if they were already converted.
    """

    fingerprint: str
    ttt: InPlaceTTTConfig | None = None


def tie_to_base(folder: Path, fingerprint: str, surgery: InPlaceTTTConfig | None) -> None:
    """Records beside a PEFT adapter the fingerprint of its base.

    If the run converted the base, the TTT config is recorded too.

    Args:
        folder: the adapter.
        fingerprint: of the base, as `base_fingerprint_in` computes it.
        surgery: TTT config of the conversion; None if the base was already converted.
    """
    write_json(
        folder / _BASE,
        {"fingerprint": fingerprint, **({} if surgery is None else {"ttt": surgery.to_dict()})},
    )


def base_of(path: str | os.PathLike[str], base: str | None = None) -> str:
    """Returns the folder of a PEFT adapter's base: `base` if given, else the one that the adapter names.

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
            f"{path}/{PEFT_CONFIG} names no base_model_name_or_path; put the base's folder there."
        )
    return located(path, named)


def standing_on(path: str | os.PathLike[str], base: str | None = None) -> tuple[str, InPlaceTTTConfig | None]:
    """Returns `base_of`, and the TTT config of the conversion that the base still needs (None: none).

    An adapter from another program records neither a fingerprint nor a conversion; then the config is None.

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
        if names:  # PEFT only warns of the first and ignores the second
            raise InPlaceTTTError(
                f"{path} {problem.format(len(names))} ({min(names)}, …); copy it again, or load it onto "
                "its own base."
            )
    return adapted.merge_and_unload().eval()
