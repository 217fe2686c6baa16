"""The model card of a converted checkpoint, README.md: what the checkpoint is, how it was made, what was
measured, how to load it.

Its front matter keeps the facts that its text is made of, so that whoever makes another checkpoint of this
one hands them on.
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
"""Of the card of what a checkpoint was made from."""
_FACTS = ("calibration", "training", "evaluation", "audit")
_NUMBERS = {
    "on": "writes on",
    "off": "writes off",
    "base": "the base, or what was trained alike without writes",
    "mismatched": "with the state that another document wrote",
    "difference": "on - off",
    "document_gain": "document gain: on - with another document's state",
}
"""What a card says of an evaluation, in this order."""
SHOWN = tuple(_NUMBERS)
_NAMED = 4
"""Files that a card names."""


def write_card(
    folder: Path,
    source: Path | None,
    config: InPlaceTTTConfig,
    base: Mapping[str, Any],
    form: str,
    **facts: Mapping[str, Any] | None,
) -> None:
    """Write the card of a checkpoint that is being made in `folder` from the one in the folder `source`.

    base: as config.json has it. form: "full", "adapter", "lora" (PEFT's folder, with conv and P) or
        "official".
    facts: tables of plain values, `calibration` (files, tokens, sha256), `training` (steps, tokens_a_step,
        train, sources, sha256),
    `evaluation` (documents, and as `Comparison.to_dict`) and `audit` (profile, undeclared, declared). None is
    for what is not known of the new weights; what is not named the source's card hands on.
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


def add_to_card(folder: str | os.PathLike[str], **facts: Mapping[str, Any]) -> None:
    """Put facts into the card of a finished checkpoint, in one step. Raises InPlaceTTTError where it has none
    of ours."""
    file = require_card(folder)
    known = _front_matter(file)
    data = ModelCardData(**{key: value for key, value in known.items() if key != MODEL_TYPE})
    with new_file(file, ours=True) as partial:
        _write(partial, _card(data, {**known[MODEL_TYPE], **facts}, Path(folder)))
    update_manifest(file)


def require_card(folder: str | os.PathLike[str]) -> Path:
    """The card in a folder. Raises InPlaceTTTError where there is none that this package wrote."""
    file = Path(folder) / CARD
    if not is_card(file):
        raise InPlaceTTTError(
            f"{folder} has no model card of inplace-ttt; convert, train and export write one."
        )
    return file


def is_card(file: Path) -> bool:
    """Whether a README.md is a card that this package wrote."""
    facts = _front_matter(file).get(MODEL_TYPE)
    return isinstance(facts, dict) and {"base", "form", "config"} <= facts.keys()


def _front_matter(file: Path) -> dict[str, Any]:
    """A card's metadata; nothing where there is none that can be read."""
    if not file.is_file():
        return {}
    try:
        with reported(f"cannot read {file}"):
            return dict(ModelCard.load(file, ignore_metadata_errors=True).data.to_dict())
    except InPlaceTTTError:
        return {}


def _write(file: Path, card: str) -> None:
    # names of files may hold bytes that are no text
    file.write_text(card, encoding="utf-8", errors="backslashreplace")


def _on_hub(name: str) -> bool:
    """Whether a base's name can be one of a hub: cards name no other."""
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
        name=folder.resolve().name.removeprefix(".").removesuffix(".partial"),
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


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """Meaning, value and standard error of what was measured."""
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
