"""Where each model family keeps what the surgery needs. A new family is a new row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .errors import InPlaceTTTError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """Module paths: `base` and `layers` from the causal LM, the rest from a decoder layer.

    mlp: the module whose first argument is the MLP's input. down_proj: the last linear map of the MLP.
    """

    base: str = "model"
    layers: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    down_proj: str = "mlp.down_proj"


_GATED = Family()

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "cohere2",
            "gemma2",
            "gemma3_text",
            "granite",
            "llama",
            "mistral",
            "olmo2",
            "olmo3",
            "phi3",
            "qwen2",
            "qwen3",
            "smollm3",
            "stablelm",
        ),
        _GATED,
    ),
    "gpt2": Family("transformer", "transformer.h", "attn", "mlp", "mlp.c_proj"),
    "gpt_neox": Family("gpt_neox", "gpt_neox.layers", "attention", "mlp", "mlp.dense_4h_to_h"),
    "moshi": Family(down_proj="mlp.fc2"),
    "starcoder2": Family(down_proj="mlp.c_proj"),
}


@dataclass(frozen=True)
class DecoderLayer:
    """The modules of one decoder layer that the surgery touches."""

    block: nn.Module
    attention: nn.Module
    mlp: nn.Module
    down_proj: nn.Module
    down_proj_path: str  # from the causal LM


@dataclass(frozen=True)
class Decoder:
    """A causal LM taken apart: its base model and the decoder layers."""

    base: nn.Module
    layers: Sequence[DecoderLayer]


def locate(model: PreTrainedModel) -> Decoder:
    """Find base model, layers, attention, MLP and down-projections of a causal LM.

    Raises InPlaceTTTError when the family is neither in the table nor recognisable, or when its MLPs are experts.
    """
    model_type = model.config.model_type
    family = FAMILIES.get(model_type)
    if family is None:
        family = _detect(model)
        logger.warning("%s is not in the table of families; found by its structure: %s", model_type, family)
    try:
        base = model.get_submodule(family.base)
        blocks = list(model.get_submodule(family.layers))
        layers = []
        for index, block in enumerate(blocks):
            attention, mlp = block.get_submodule(family.attention), block.get_submodule(family.mlp)
            path = f"{family.layers}.{index}.{family.down_proj}"
            _refuse_experts(mlp, f"{family.layers}.{index}.{family.mlp}")
            layers.append(DecoderLayer(block, attention, mlp, block.get_submodule(family.down_proj), path))
    except AttributeError as error:
        raise InPlaceTTTError(f"{type(model).__name__} does not look like {family}: {error}; is it a dense causal LM?") from None
    return Decoder(base, layers)


def _refuse_experts(mlp: nn.Module, where: str) -> None:
    if any(name.split(".")[-1] in ("experts", "router") for name, _ in mlp.named_modules()):
        raise InPlaceTTTError(
            f"{where} is a mixture of experts, whose down-projections see only some of the tokens; In-Place TTT needs dense MLPs."
        )


def _detect(model: PreTrainedModel) -> Family:
    """Recognise a dense decoder by its structure: a list of layers, each with an attention and a map back to hidden size."""
    text = model.config.get_text_config()
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == text.num_hidden_layers]
    if not lists:
        raise InPlaceTTTError(f"{type(model).__name__} has no list of {text.num_hidden_layers} decoder layers; is it a decoder-only LM?")
    layers, blocks = lists[0]
    block = blocks[0]
    attention = next((n for n, _ in block.named_children() if ("attn" in n or "attention" in n) and "norm" not in n), None)
    if attention is None:
        raise InPlaceTTTError(f"{layers}.0 of {type(model).__name__} has no attention module; children: {_children(block)}.")
    for name, child in block.named_children():
        if name != attention:
            _refuse_experts(child, f"{layers}.0.{name}")
    linears = [(n, m) for n, m in block.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and not n.startswith(attention + ".")]
    down = [n for n, m in linears if features(m)[1] == text.hidden_size and features(m)[0] != text.hidden_size]
    if len(down) != 1:
        found = ", ".join(n for n, _ in linears) or "none"
        raise InPlaceTTTError(
            f"{layers}.0 of {type(model).__name__} has no single map to the hidden size outside attention; linear maps: {found}."
        )
    mlp = down[0].rpartition(".")[0] or linears[0][0]
    return Family(layers.rpartition(".")[0], layers, attention, mlp, down[0])


def features(module: nn.Module) -> tuple[int, int]:
    """(h, d): input and output features of a linear map, also of a quantised, wrapped or ZeRO-partitioned one."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    try:
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    except AttributeError:
        raise InPlaceTTTError(f"{type(module).__name__} is not a linear map with in_features and out_features.") from None


def _children(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children())
