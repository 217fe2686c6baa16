"""What verbs load: models on this machine's device, and the tokenizer that belongs to them."""

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
from ..layer.quantised import readable_parameters
from ..ops.precision import note_on_emulation
from .messages import warn


def refuse_not_finite(model: PreTrainedModel, path: str) -> None:
    """Refuse weights that hold NaN or infinity: whatever such a model says is no answer."""
    for name, parameter in readable_parameters(model):
        if not torch.stack(parameter.detach().aminmax()).isfinite().all():
            raise InPlaceTTTError(
                f"{path}: {name} holds numbers that are not finite; the run that wrote it diverged, or the "
                "file is damaged."
            )


def note_on_positions(model: PreTrainedModel, tokens: int, remedy: str) -> str | None:
    """What to know where a text is longer than the model's config names. Raises InPlaceTTTError where
    positions are learnt one by one."""
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
    """Refuse a base whose tokenizer reads a text otherwise: their losses and prompts would be of different
    tokens."""
    if other(text, verbose=False).input_ids != tokenizer(text, verbose=False).input_ids:
        raise InPlaceTTTError(
            f"{base} has another tokenizer than the converted checkpoint, so that they would read "
            "different tokens."
        )


def open_full(path: str) -> Full:
    """A converted checkpoint for vLLM, which loads no adapter onto its base."""
    found = open_model(path)
    if not isinstance(found, Full):
        raise InPlaceTTTError(
            f"{path} is an adapter, and vLLM serves full checkpoints; export it as full first."
        )
    found.checkpoint.ttt_config  # noqa: B018 - refuses what is not converted
    return found


def load_converted(path: str, base: str | None, dtype: str) -> PreTrainedModel:
    """A converted model; base: where an adapter's base is, if not where it was."""
    return _to_device(load(path, base=base, dtype=_dtype(dtype)))


def load_plain(path: str, dtype: str | torch.dtype) -> PreTrainedModel:
    """A model without TTT."""
    return _to_device(load_base(path, dtype=_dtype(dtype) if isinstance(dtype, str) else dtype))


def tokenizer_of(
    path: str, base: str | None = None, model: PreTrainedModel | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint, or beside an adapter's base; of no other model than `model`."""
    source = open_model(path, base).tokenizer_source
    with reported(f"{source} has no usable tokenizer", "save the base's tokenizer into it"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        # its settings are looked at when it is used
        tokenizer.decode(tokenizer("a text", return_tensors="pt").input_ids[0])
    if model is not None:
        require_known_ids(tokenizer, model, source)
    return tokenizer


def load_with_tokenizer(
    path: str, base: str | None, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A converted model, and its tokenizer."""
    model = load_converted(path, base, dtype)
    return model, tokenizer_of(path, base, model)


def require_vllm() -> None:
    """It is there, and says what it has to say on stderr, in every process."""
    if find_spec("vllm") is None:
        raise InPlaceTTTError(f"serving needs vLLM, which is not installed; {how_to_install('vllm')}.")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)


def _to_device(model: PreTrainedModel) -> PreTrainedModel:
    if note := note_on_emulation(model.dtype, model.num_parameters(), "give --dtype float32"):
        warn(note)
    return model.to(default_device())


def default_device() -> str:
    """Returns where verbs run a model: on the GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(name: str) -> None:
    """Raises InPlaceTTTError if `--device` names a GPU that this machine does not have."""
    if name.startswith("cuda") and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise InPlaceTTTError(f"--device {name} is not on this machine.")
