"""The module paths of layers, attention and MLP in each model family.

To support a new family, add a row to `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from .errors import InPlaceTTTError

logger = logging.getLogger(__name__)

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of a model's argument and output field for the cache. It is `cache` from transformers 5.24 on."""

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""All names of the argument for a cache.

The first is used from transformers 5.24 on. The second is the name before, which is still accepted. The third
occurs in the attention of some families.
"""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among the keyword arguments of a model or an attention module, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


@dataclass(frozen=True)
class Family:
    """Module paths of a model family.

    Attributes:
        layers: path from the text decoder to its list of layers. The other paths start at a layer.
        attention: the attention module.
        mlp: the module whose first argument is the MLP's input.
        down_proj: the last linear map of the MLP.
    """

    layers: str = "layers"
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
    "gpt2": Family("h", "attn", "mlp", "mlp.c_proj"),
    "gpt_neox": Family("layers", "attention", "mlp", "mlp.dense_4h_to_h"),
    "moshi": Family(down_proj="mlp.fc2"),
    "starcoder2": Family(down_proj="mlp.c_proj"),
}


@dataclass(frozen=True)
class DecoderLayer:
    """The modules of one decoder layer that a conversion needs.

    Attributes:
        block: the decoder layer.
        attention: its attention module.
        mlp: its dense MLP, or its shared expert.
        down_proj: the last linear map of `mlp`.
        down_proj_path: the path of `down_proj` from the model.
    """

    block: nn.Module
    attention: nn.Module
    mlp: nn.Module
    down_proj: nn.Module
    down_proj_path: str


@dataclass(frozen=True)
class Decoder:
    """The parts of a model's text decoder.

    Attributes:
        base: the text decoder.
        blocks: all decoder layers.
        attentions: the attention module of each decoder layer.
        layers: by index, the parts of the layers that have a dense MLP or a shared expert.
        by_structure: the detected paths, for a model whose family is not in the table.
    """

    base: PreTrainedModel
    blocks: Sequence[nn.Module]
    attentions: Sequence[nn.Module]
    layers: Mapping[int, DecoderLayer]
    by_structure: Sequence[Family] = ()

    def say_how_found(self) -> None:
        """Logs a warning with the detected paths if the family is not in the table."""
        if self.by_structure:
            name, found = self.base.config.model_type, " and ".join(map(str, self.by_structure))
            logger.warning("%s is not in the table of families; found by its structure: %s", name, found)

    def check_dense(self, indices: Iterable[int]) -> None:
        """Raises InPlaceTTTError for layers that have only routed experts."""
        if refused := [index for index in indices if index not in self.layers]:
            others = ", ".join(map(str, self.layers))
            raise InPlaceTTTError(
                f"layers {refused} of {type(self.base).__name__} have routed experts alone, whose "
                "down-projections see only some of the tokens; choose from the layers with a dense MLP or a "
                f"shared expert: {others or 'none'}."
            )


def locate(model: PreTrainedModel) -> Decoder:
    """Finds the text decoder of a model, its layers, and their attention, MLP and down-projection.

    A vision-language model has its text decoder inside its language model. In a mixture of experts, the MLP
    is that of a dense layer, or the shared expert.

    Args:
        model: a model of transformers.

    Returns:
        The parts of the text decoder.

    Raises:
        InPlaceTTTError: if the model is not a decoder-only LM, keeps its past outside a transformers cache,
            or its family is neither in the table nor recognizable by its structure.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InPlaceTTTError(
            f"{name} has an encoder, whose tokens see later ones; In-Place TTT needs a decoder-only LM."
        )
    base = _text_decoder(model)
    _check_past(base)
    listed = FAMILIES.get(base.config.model_type)
    path, attention = (listed.layers, listed.attention) if listed else _detect(base)
    prefix = next(path for path, module in model.named_modules() if module is base)
    where = f"{prefix}.{path}".lstrip(".")
    layers, found = {}, []
    try:
        blocks = list(base.get_submodule(path))
        attentions = [block.get_submodule(attention) for block in blocks]
        for index, block in enumerate(blocks):
            family = listed or _detect_mlp(base, block, f"{where}.{index}", Family(where, attention))
            if family is not None:
                mlp, down = block.get_submodule(family.mlp), block.get_submodule(family.down_proj)
                layers[index] = DecoderLayer(
                    block, attentions[index], mlp, down, f"{where}.{index}.{family.down_proj}"
                )
                found.append(family)
    except (AttributeError, TypeError) as error:
        raise InPlaceTTTError(
            f"{name} does not look like {listed or attention}: {error}; is it a causal LM?"
        ) from None
    return Decoder(base, blocks, attentions, layers, () if listed else list(dict.fromkeys(found)))


def is_listed(base: PreTrainedModel) -> bool:
    """Returns True if a text decoder's family is in the table. The tests of all laws cover such families."""
    return base.config.model_type in FAMILIES


def _text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the innermost model that contains the text decoder's layers."""
    base = model
    while (
        isinstance(inner := base.get_decoder(), PreTrainedModel)
        and inner is not base
        and any(_layer_lists(inner))
    ):
        base = inner
    inner = base.base_model
    return (
        inner
        if isinstance(inner, PreTrainedModel) and inner is not base and any(_layer_lists(inner))
        else base
    )


def _layer_lists(base: PreTrainedModel) -> Iterator[tuple[str, nn.ModuleList]]:
    count = base.config.get_text_config().num_hidden_layers
    return ((path, m) for path, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count)


def _check_past(base: PreTrainedModel) -> None:
    taken = inspect.signature(base.forward).parameters
    if "use_cache" in taken and CACHE not in taken:
        raise InPlaceTTTError(
            f"{type(base).__name__} keeps its past in a state of its own and not in {CACHE}, which would "
            "also store the fast weight; In-Place TTT needs a transformer with a cache."
        )


def _detect(base: PreTrainedModel) -> tuple[str, str]:
    """Finds the path of a decoder's list of layers, and the path of a layer's attention, by structure."""
    name, text = type(base).__name__, base.config.get_text_config()
    layers, blocks = next(_layer_lists(base), (None, None))
    if layers is None or blocks is None:
        raise InPlaceTTTError(
            f"{name} lacks a list of {text.num_hidden_layers} decoder layers; is it a decoder-only LM?"
        )
    children = [child for child, _ in blocks[0].named_children()]
    attentions = [child for child in children if _is_attention(child)]
    if not attentions:
        raise InPlaceTTTError(
            f"{layers}.0 of {name} lacks an attention module; children: {', '.join(children)}."
        )
    return layers, attentions[0]


def _is_attention(child: str) -> bool:
    return "att" in child and "norm" not in child


def _detect_mlp(base: PreTrainedModel, block: nn.Module, where: str, family: Family) -> Family | None:
    """Finds a layer's dense MLP or shared expert. Its last linear map leads to the hidden size.

    Args:
        base: the text decoder.
        block: the layer.
        where: the layer's path, for errors.
        family: the paths that are already known.

    Returns:
        The paths of the layer's parts, or None if it has only routed experts.
    """
    name, hidden = type(base).__name__, base.config.get_text_config().hidden_size
    rest = {
        f"{child}.{path}".rstrip("."): module
        for child, part in block.named_children()
        if not _is_attention(child)
        for path, module in part.named_modules()
    }
    linears = {
        path: features(module)
        for path, module in rest.items()
        if isinstance(module, (nn.Linear, Conv1D)) and "experts" not in path.split(".")
    }
    down = [path for path, (width, out) in linears.items() if out == hidden != width]
    if not down and any(path.split(".")[-1] in ("experts", "router") for path in rest):
        return None
    if len(down) != 1:
        raise InPlaceTTTError(
            f"{where} of {name} lacks a single map to the hidden size outside attention; its linear maps "
            f"are: {', '.join(linears) or 'none'}."
        )
    width = linears[down[0]][0]
    up = [
        path for path, (entering, out) in linears.items() if entering == hidden and out in (width, 2 * width)
    ]
    if not up:
        raise InPlaceTTTError(
            f"{where} of {name} lacks a map from the hidden size to the {width} inputs of {down[0]}; is its "
            "MLP dense?"
        )
    parent = down[0].rpartition(".")[0]
    mlp = parent if parent and up[0].startswith(f"{parent}.") else up[0]
    return dataclasses.replace(family, mlp=mlp, down_proj=down[0])


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns the Auto class that builds a config's language model.

    The language model has a vision tower if the config's `architectures` names a vision-language model.
    """
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    built = {kind: kind._model_mapping[type(config)] for kind in kinds if type(config) in kind._model_mapping}
    named = [
        kind
        for kind, model in built.items()
        if getattr(model, "__name__", None) in (config.architectures or ())
    ]
    return next(iter([*named, *built]), AutoModelForCausalLM)


def attention_kinds(text: PreTrainedConfig) -> list[str]:
    """Returns the kind of attention of each layer, such as "full_attention"."""
    every = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    return getattr(text, "layer_types", None) or [every] * text.num_hidden_layers


def features(module: nn.Module) -> tuple[int, int]:
    """Returns the input and output features (h, d) of a linear map.

    It may be quantized, wrapped or partitioned by ZeRO.

    Raises:
        InPlaceTTTError: if the module is not a linear map.
    """
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    try:
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    except AttributeError:
        raise InPlaceTTTError(
            f"{type(module).__name__} is not a linear map with in_features and out_features."
        ) from None


def causal_lm(model: nn.Module) -> Any:
    """Returns the transformers model inside PEFT's wrapper, or the model itself."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None else model
