"""What a run with `trainable: lora` leaves: a PEFT adapter, which holds LoRA, conv and P."""

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
    """What a run writes beside its adapter. fingerprint: of the weights that it was trained on, as
    `base_fingerprint_in` gives it; ttt: the conversion that the run made of them, none where they were
    converted already."""

    fingerprint: str
    ttt: InPlaceTTTConfig | None = None


def tie_to_base(folder: Path, fingerprint: str, surgery: InPlaceTTTConfig | None) -> None:
    """Write beside an adapter of PEFT which weights it belongs to, and how the run converted them, if it
    did."""
    write_json(
        folder / _BASE,
        {"fingerprint": fingerprint, **({} if surgery is None else {"ttt": surgery.to_dict()})},
    )


def base_of(path: str | os.PathLike[str], base: str | None = None) -> str:
    """The folder that a PEFT adapter stands on: `base`, or the one that it names."""
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
    """`base_of`, and the conversion that it still needs. Raises InPlaceTTTError for other weights than the
    adapter was trained on.

    An adapter that no run of ours wrote says neither of its weights nor of a conversion.
    """
    source, file = base_of(path, base), Path(path) / _BASE
    if not file.exists():
        return source, None
    known = from_values(_Base, read_json(file, f"{path} does not say what it was trained on"), str(file))
    if (found := base_fingerprint_in(source)) != known.fingerprint:
        raise InPlaceTTTError(
            f"{path} was trained on other weights than {source} (fingerprint {known.fingerprint[:12]}…, "
            f"found {found[:12]}…); load it "
            "onto those."
        )
    converted = is_adapter(source) or Checkpoint.open(source).section is not None
    return source, None if converted else known.ttt


def merged(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """The converted model with a PEFT adapter's LoRA added to its weights, and the adapter's conv and P in
    place of its own.

    Raises InPlaceTTTError for an adapter that lacks tensors of what its config adapts, or has others that the
    model has no place for.
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
        (wanted - held, "lacks {} tensors of what it adapts"),
        (held - wanted - adapted.state_dict().keys(), "has {} tensors that its base has no place for"),
    ):
        if names:  # PEFT warns of the first, and passes over the second
            raise InPlaceTTTError(
                f"{path} {problem.format(len(names))} ({min(names)}, …); copy it again, or load it onto "
                "its own base."
            )
    return adapted.merge_and_unload().eval()
