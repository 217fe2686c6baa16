"""Loads models onto this machine's device, and their tokenizers, for the verbs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.loading import load_base
from ..checkpoint.opened import Full, load, open_model
from ..errors import InPlaceTTTError, how_to_install, reported
from ..files.text import require_known_ids
from ..layer.quantized import readable_parameters
from ..ops.precision import note_on_emulation
from .messages import warn


def refuse_not_finite(model: PreTrainedModel, path: str) -> None:
    """Raises InPlaceTTTError for weights that hold NaN or infinities, which make every output meaningless."""
    for name, parameter in readable_parameters(model):
        if not torch.stack(parameter.detach().aminmax()).isfinite().all():
            raise InPlaceTTTError(
                f"{path}: {name} holds numbers that are not finite; the run that wrote it diverged, or the "
                "file is damaged."
            )


def note_on_positions(model: PreTrainedModel, tokens: int, remedy: str) -> str | None:
    """Returns a warning if a text is longer than the model's config allows for, else None.

    Args:
        model: the model that reads the text.
        tokens: number of tokens of the text.
        remedy: end of the error message.

    Raises:
        InPlaceTTTError: if the model cannot read further, because it has a learned embedding per position.
    """
    text = model.config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    if known is None or tokens <= known:
        return None
    if getattr(text, "rope_parameters", None) is None:
        raise InPlaceTTTError(
            f"{tokens:,} tokens exceed the {known:,} positions that this model has; {remedy}."
        )
    return (
        f"{tokens:,} tokens exceed the {known:,} positions that the model's config names; nothing is cut off."
    )


def refuse_other_tokenizer(
    other: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, base: str, text: str
) -> None:
    """Raises InPlaceTTTError for a base whose tokenizer encodes a text differently.

    Losses and prompts of the two models would not be comparable.

    Args:
        other: the base's tokenizer.
        tokenizer: the converted model's tokenizer.
        base: its name, for the message.
        text: a text to encode with both.
    """
    if other(text, verbose=False).input_ids != tokenizer(text, verbose=False).input_ids:
        raise InPlaceTTTError(
            f"{base} has another tokenizer than the converted checkpoint, so the two would read "
            "different tokens."
        )


def open_full(path: str) -> Full:
    """Opens a full converted checkpoint for vLLM, which does not load adapters of this package.

    Raises:
        InPlaceTTTError: if it is an adapter or not converted.
    """
    found = open_model(path)
    if not isinstance(found, Full):
        raise InPlaceTTTError(
            f"{path} is an adapter, and vLLM serves full checkpoints; export it as full first."
        )
    found.checkpoint.ttt_config  # noqa: B018 - raises if not converted
    return found


def load_converted(path: str, base: str | None, dtype: str) -> PreTrainedModel:
    """Loads a converted model onto this machine's device.

    Args:
        path: converted checkpoint or adapter folder.
        base: current path of an adapter's base, if it was moved.
        dtype: name of a torch dtype, or "auto".
    """
    return _to_device(load(path, base=base, dtype=_dtype(dtype)))


def load_plain(path: str, dtype: str | torch.dtype) -> PreTrainedModel:
    """Loads a model without TTT onto this machine's device."""
    return _to_device(load_base(path, dtype=_dtype(dtype) if isinstance(dtype, str) else dtype))


def tokenizer_of(
    path: str, base: str | None = None, model: PreTrainedModel | None = None
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer saved with a checkpoint, or with an adapter's base.

    Args:
        path: checkpoint or adapter folder.
        base: current path of an adapter's base, if it was moved.
        model: if given, the tokenizer's ids are checked against its embeddings.

    Raises:
        InPlaceTTTError: if a usable tokenizer is missing, or it belongs to another model.
    """
    source = open_model(path, base).tokenizer_source
    with reported(f"{source} lacks a usable tokenizer", "save the base's tokenizer into it"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        # a tokenizer checks its settings only when it is used
        tokenizer.decode(tokenizer("a text", return_tensors="pt").input_ids[0])
    if model is not None:
        require_known_ids(tokenizer, model, source)
    return tokenizer


def load_with_tokenizer(
    path: str, base: str | None, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a converted model and its tokenizer."""
    model = load_converted(path, base, dtype)
    return model, tokenizer_of(path, base, model)


def require_vllm() -> None:
    """Raises InPlaceTTTError unless vLLM is installed.

    Also sends the logs of all vLLM processes to stderr.
    """
    if find_spec("vllm") is None:
        raise InPlaceTTTError(f"serving needs vLLM, which is not installed; {how_to_install('vllm')}.")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)


def _to_device(model: PreTrainedModel) -> PreTrainedModel:
    if note := note_on_emulation(model.dtype, model.num_parameters(), "give --dtype float32"):
        warn(note)
    return model.to(chosen_device())


def chosen_device(name: str | None = None) -> str:
    """Returns the device of `--device`; without it, a GPU if there is one, else the CPU.

    Raises:
        InPlaceTTTError: if this machine lacks that GPU.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise InPlaceTTTError(f"--device {name} is not on this machine.")
    return name
