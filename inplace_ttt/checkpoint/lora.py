"""What a run with `train: lora` leaves: a PEFT adapter, which holds LoRA, conv and P, of a converted checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import InPlaceTTTError, reported
from ..files.json_files import read_json, write_json
from ..files.schema import from_values
from .adapter import located
from .folder_fingerprint import base_fingerprint_in
from .reading import PEFT_CONFIG

_BASE = "inplace_ttt_base.json"


@dataclass(frozen=True)
class _Base:
    """What a run writes beside its adapter: the fingerprint of the weights that it was trained on, as `base_fingerprint_in` gives it."""

    fingerprint: str


def tie_to_base(folder: Path, fingerprint: str) -> None:
    """Write beside an adapter of PEFT which weights it belongs to."""
    write_json(folder / _BASE, {"fingerprint": fingerprint})


def refuse_other_base(path: str | os.PathLike[str], base: str) -> None:
    """Refuse a base with other weights than an adapter of PEFT was trained on; one that no run wrote does not say which."""
    file = Path(path) / _BASE
    if not file.exists():
        return
    known = from_values(_Base, read_json(file, f"{path} does not say what it was trained on"), str(file)).fingerprint
    if (found := base_fingerprint_in(base)) != known:
        raise InPlaceTTTError(
            f"{path} was trained on other weights than {base} (fingerprint {known[:12]}…, found {found[:12]}…); load it onto those."
        )


def base_of(path: str | os.PathLike[str]) -> str:
    """The converted checkpoint that a PEFT adapter names as its base."""
    base = read_json(Path(path) / PEFT_CONFIG, f"{path} is not an adapter of PEFT").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InPlaceTTTError(f"{path}/{PEFT_CONFIG} names no base_model_name_or_path; put the converted checkpoint's folder there.")
    return located(path, base)


def merged(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """The converted model with a PEFT adapter's LoRA added to its weights, and the adapter's conv and P in place of its own."""
    try:
        from peft import PeftModel
    except ImportError:
        raise InPlaceTTTError(f"{path} is an adapter of PEFT, which is not installed; pip install 'inplace-ttt[train]'.") from None
    with reported(f"cannot load {path}"):
        return PeftModel.from_pretrained(model, str(path)).merge_and_unload().eval()
