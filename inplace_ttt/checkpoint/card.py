"""The model card (README.md) of a converted checkpoint: origin, settings, measurements and use.

The card's front matter holds the facts from which its text is rendered. If another checkpoint is made from
this one, its card inherits these facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..config import InPlaceTTTConfig
from ..converted_config import MODEL_TYPE
from ..errors import InPlaceTTTError, reported
from ..files.folders import new_file
from ..files.manifest import update_manifest
from ..reports.page import render

CARD = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language")
"""Fields copied from the source checkpoint's card."""
_FACTS = ("calibration", "training", "evaluation", "audit")
_NUMBERS = {
    "on": "writes on",
    "off": "writes off",
    "base": "the base, or the same training without writes",
    "mismatched": "with the state that another document wrote",
    "difference": "on - off",
    "document_gain": "document gain: on - with another document's state",
}
"""Labels of an evaluation's figures, in the order in which a card lists them."""
SHOWN = tuple(_NUMBERS)
_NAMED = 4
"""Largest number of files that a card names."""


def write_card(
    folder: Path,
    source: Path | None,
    config: InPlaceTTTConfig,
    base: Mapping[str, Any],
    form: str,
    **facts: Mapping[str, Any] | None,
) -> None:
    """Writes the card of a checkpoint that is being made in `folder`.

    Args:
        folder: the new checkpoint.
        source: folder that the checkpoint is made from, if there is one.
        config: the TTT config.
        base: description of the base, as in config.json.
        form: "full", "adapter", "lora" (PEFT's folder, with conv and P) or "reference".
        facts: tables of plain values. `calibration` has files, tokens and sha256. `training` has steps,
            tokens_a_step, train, sources and sha256. `evaluation` has documents and the keys of
            `Comparison.to_dict`. `audit` has profile, undeclared and declared. Pass None for a fact that is
            not true of the new weights. A fact that is not passed is copied from the source's card.
    """
    known = {} if source is None else _front_matter(source / CARD)
    before = known.get(MODEL_TYPE) or {}
    name = str(base.get("name_or_path") or "")
    data = ModelCardData(
        **{key: known[key] for key in _CARRIED if known.get(key)},
        base_model=name if _on_hub(name) else known.get("base_model"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["inplace-ttt", "test-time-training", "fast-weights"],
    )
    given = {key: value for key, value in facts.items() if value is not None}
    handed_on = {key: before[key] for key in _FACTS if key in before and key not in facts}
    kept = {
        "base": Path(name).name or "a model from scratch",
        "form": form,
        "config": config.to_dict(),
        **handed_on,
        **given,
    }
    _write(folder / CARD, _card(data, kept, folder))


def write_export_card(
    folder: Path, source: Path, base: Mapping[str, Any], form: str, about: Mapping[str, Any]
) -> None:
    """Writes the card of a session that was exported as a model or adapter without fast weights.

    Args:
        folder: the new checkpoint.
        source: folder of the session's model.
        base: description of that model's base.
        form: "plain" or "lora".
        about: facts of the export and its measurements, by the names that the template uses.
    """
    known, name = _front_matter(source / CARD), str(base.get("name_or_path") or "")
    data = ModelCardData(
        **{key: known[key] for key in _CARRIED if known.get(key)},
        base_model=name if _on_hub(name) else known.get("base_model"),
        library_name="peft" if form == "lora" else "transformers",
        pipeline_tag="text-generation",
        tags=["test-time-training", *(["lora"] if form == "lora" else [])],
    )
    text = render(
        "export_card.md.j2",
        name=_name(folder),
        base=data.base_model or Path(name).name or "a model",
        license=data.license,
        form=form,
        about=about,
    )
    _write(folder / CARD, f"---\n{data.to_yaml()}\n---\n{text}")


def add_to_card(folder: str | os.PathLike[str], **facts: Mapping[str, Any]) -> None:
    """Adds facts to the card of a finished checkpoint, in one step.

    Raises:
        InPlaceTTTError: if the folder lacks a card that this package wrote.
    """
    file = require_card(folder)
    known = _front_matter(file)
    data = ModelCardData(**{key: value for key, value in known.items() if key != MODEL_TYPE})
    with new_file(file, ours=True) as partial:
        _write(partial, _card(data, {**known[MODEL_TYPE], **facts}, Path(folder)))
    update_manifest(file)


def require_card(folder: str | os.PathLike[str]) -> Path:
    """Returns the path of a folder's card.

    Raises:
        InPlaceTTTError: if the folder lacks a card that this package wrote.
    """
    file = Path(folder) / CARD
    if not is_card(file):
        raise InPlaceTTTError(
            f"{folder} lacks a model card of inplace-ttt; convert, train and export write one."
        )
    return file


def is_card(file: Path) -> bool:
    """Returns True if a README.md is a card that this package wrote."""
    facts = _front_matter(file).get(MODEL_TYPE)
    return isinstance(facts, dict) and {"base", "form", "config"} <= facts.keys()


def _front_matter(file: Path) -> dict[str, Any]:
    """Returns a card's metadata; empty if there is none or it cannot be read."""
    if not file.is_file():
        return {}
    try:
        with reported(f"cannot read {file}"):
            return dict(ModelCard.load(file, ignore_metadata_errors=True).data.to_dict())
    except InPlaceTTTError:
        return {}


def _write(file: Path, card: str) -> None:
    # file names may contain bytes that are not UTF-8
    file.write_text(card, encoding="utf-8", errors="backslashreplace")


def _on_hub(name: str) -> bool:
    """Returns True if a base's name can be a hub id. A card names no other base."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not Path(name).exists()


def _card(data: ModelCardData, facts: dict[str, Any], folder: Path) -> str:
    setattr(data, MODEL_TYPE, facts)
    config = InPlaceTTTConfig.from_dict(facts["config"])
    text = render(
        "card.md.j2",
        name=_name(folder),
        base=data.base_model or facts["base"],
        license=data.license,
        form=facts["form"],
        config=config,
        layers=config.layers if isinstance(config.layers, str) else ", ".join(map(str, config.layers)),
        facts={key: facts.get(key) for key in _FACTS},
        named=_named,
        numbers=list(_numbers(facts.get("evaluation") or {})),
    )
    return f"---\n{data.to_yaml()}\n---\n{text}"


def _name(folder: Path) -> str:
    """Returns the final name of a folder that is still being written under a temporary name."""
    return folder.resolve().name.removeprefix(".").removesuffix(".partial")


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """Yields label, value and standard error of each figure of an evaluation."""
    for key, meaning in _NUMBERS.items():
        if (value := found.get(key)) is not None:
            yield (
                (meaning, value["mean"], value["stderr"])
                if isinstance(value, dict)
                else (meaning, value, None)
            )


def _named(files: list[str]) -> str:
    shown = ", ".join(f"`{file}`" for file in files[:_NAMED])
    return f"{shown} and {len(files) - _NAMED} more" if len(files) > _NAMED else shown
