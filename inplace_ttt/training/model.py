"""Builds the model of a recipe: a base, a converted model or a new one, with the parameters to train."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..attention_window import set_attention_window
from ..checkpoint.adapter import located
from ..checkpoint.loading import load_base
from ..checkpoint.opened import Adapter, open_model
from ..config import InPlaceTTTConfig
from ..converted_config import MODEL_TYPE
from ..errors import InPlaceTTTError, how_to_install, one_line
from ..families import auto_class
from ..files.json_files import read_json
from ..files.memory import require_memory
from ..surgery import config_of, convert, fast_weights
from .quantization import quantization
from .recipe.recipe import Recipe
from .recipe.training_section import Lora

_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"}
_EXTENDS_ROPE = ("yarn", "longrope", "llama3")
_EXTENSION = {"factor", "original_max_position_embeddings"}


def build_model(recipe: Recipe) -> PreTrainedModel:
    """Builds the model to train: converted, with `requires_grad` set, in a `PeftModel` for lora.

    It seeds torch with the recipe's seed, so that all ranks draw the same weights. It works under
    transformers' `HfDeepSpeedConfig`: with ZeRO-3, parameters are partitioned while they load.

    Args:
        recipe: the run's recipe.

    Raises:
        InPlaceTTTError: if the model cannot be built.
    """
    model, path = recipe.model, recipe.model.path
    torch.manual_seed(recipe.training.seed)
    config, ttt = _architecture(recipe)
    settings: dict[str, Any] = {
        "dtype": getattr(torch, model.dtype),
        "attn_implementation": model.attn_implementation,
    }
    if model.load_in is not None:
        settings["quantization_config"] = quantization(model)
    try:
        if path is None:
            if not is_deepspeed_zero3_enabled():  # with ZeRO-3 each rank holds only its part
                with torch.device("meta"):
                    parameters = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
                require_memory(parameters * settings["dtype"].itemsize, "a model of this config")
            built = auto_class(config).from_config(config, **settings)
        elif isinstance(found := open_model(path), Adapter) or ttt is None:
            built = found.load(config=config, **settings)
        else:
            built = load_base(path, config=config, **settings)
    except InPlaceTTTError:
        raise
    except Exception as error:
        _refuse(recipe, "model", one_line(error).rstrip("."))
    _convert(built, ttt, recipe)
    if model.window is not None:
        set_attention_window(built, model.window.size, model.window.sinks)
    return _choose_trained(built, recipe)


def _convert(built: PreTrainedModel, ttt: InPlaceTTTConfig | None, recipe: Recipe) -> None:
    """Converts a model that is not converted yet.

    Refuses a recipe that is incompatible with target='gradient'.
    """
    if not fast_weights(built):
        convert(built, ttt)
    if config_of(built).target == "gradient":
        if recipe.parallel.sequence_parallel_size > 1:
            _refuse(
                recipe, "parallel.sequence_parallel_size", "target='gradient' reads whole rows; set it to 1"
            )
        if recipe.deepspeed_settings.get("zero_optimization", {}).get("stage") == 3:
            _refuse(
                recipe,
                "deepspeed",
                "with target='gradient' ranks read unequal numbers of chunks, which ZeRO-3 does not allow; "
                "set stage 2",
            )
        if recipe.training.trainable == "ttt" and not config_of(built).write_gate:
            _refuse(
                recipe,
                "training.trainable",
                "a model with target='gradient' lacks TTT parameters; choose all or lora",
            )


def meta_model(recipe: Recipe) -> PreTrainedModel:
    """Builds the model of a recipe on the meta device: shapes, names and `requires_grad`.

    It reads the config as `planned_architecture` does, but no weights.

    Args:
        recipe: the run's recipe.

    Raises:
        InPlaceTTTError: if the model cannot be built.
    """
    config, ttt = planned_architecture(recipe)
    try:
        with torch.device("meta"):
            built = auto_class(config).from_config(config, dtype=getattr(torch, recipe.model.dtype))
    except InPlaceTTTError:
        raise
    except Exception as error:
        _refuse(recipe, "model", one_line(error).rstrip("."))
    _convert(built, ttt, recipe)
    with torch.device("meta"):
        return _choose_trained(built, recipe)


def planned_architecture(recipe: Recipe) -> tuple[PreTrainedConfig, InPlaceTTTConfig | None]:
    """Returns the model's config with the recipe's overrides, and the TTT config of the conversion.

    The TTT config is None for a full converted checkpoint. The config of a hub model is first looked for
    beside the recipe, as configs/OWNER--NAME.json, so that no network is needed.

    Args:
        recipe: the run's recipe.

    Raises:
        InPlaceTTTError: if the config cannot be read, or the recipe's `ttt` does not fit the model.
    """
    return _architecture(recipe, configs=recipe.path.parent / "configs" if recipe.path else None)


def _architecture(
    recipe: Recipe, configs: Path | None = None
) -> tuple[PreTrainedConfig, InPlaceTTTConfig | None]:
    model, path, surgery = recipe.model, recipe.model.path, recipe.ttt
    adapter = None
    if path is None:
        values = dict(model.config or {})
    elif isinstance(found := open_model(path), Adapter):
        adapter, base, _ = found.read
        remedy = (
            f"put both together by `inplace-ttt export {path} OUT --format full --base B`, and give "
            "OUT as model.path"
        )
        values = _read_config(recipe, located(path, base["name_or_path"], remedy), configs)
    else:
        values = _read_config(recipe, path, configs)
    converted = adapter is not None or values.get("model_type") == MODEL_TYPE
    if converted and surgery is not None:
        _refuse(
            recipe,
            "ttt",
            f"{path} is converted already, so ttt does nothing; remove the section or give the base",
        )
    if not converted and surgery is not None and surgery.needs_calibration:
        _refuse(
            recipe,
            "ttt",
            f"these settings need measurements on a text; run `inplace-ttt convert {path or 'MODEL'} OUT "
            "--calibrate TEXT` with them, and "
            "give OUT as model.path",
        )
    if not converted and surgery is None:
        _refuse(
            recipe,
            "ttt",
            f"{path or 'a model from scratch'} is not converted and the section ttt is missing; add it",
        )
    config = _build_config(recipe, values, "path" if path else "config")
    if path is None:
        _refuse_unknown(recipe, config, {key for key in values if key != "model_type"}, "config")
    return _override(recipe, config), adapter or surgery


def _read_config(recipe: Recipe, source: str, configs: Path | None) -> dict[str, Any]:
    """Returns config.json of a folder or hub id.

    For a hub id, the folder `configs` is searched first.
    """
    if (
        configs is not None
        and not Path(source).exists()
        and (known := configs / f"{source.replace('/', '--')}.json").exists()
    ):
        return read_json(known, "the model's config")
    if not Path(source).exists() and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        _refuse(recipe, "model.path", f"{source} does not exist; give a model folder or a hub id")
    try:
        values, _ = PreTrainedConfig.get_config_dict(source)
    except Exception as error:
        _refuse(
            recipe,
            "model.path",
            f"cannot read the config of {source} ({one_line(error).rstrip('.')}); give a local model folder",
        )
    if not values:
        _refuse(recipe, "model.path", f"{source} lacks a config.json; give a model folder or a hub id")
    return values


def _build_config(recipe: Recipe, values: Mapping[str, Any], key: str) -> PreTrainedConfig:
    name = values.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        _refuse(recipe, f"model.{key}", f"model_type {name!r} is not one of transformers' model types")
    try:
        return CONFIG_MAPPING[name].from_dict(copy.deepcopy(dict(values)))
    except InPlaceTTTError:
        raise
    except Exception as error:
        _refuse(recipe, f"model.{key}", one_line(error).rstrip("."))


def _override(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config with the recipe's overrides.

    A table, such as the RoPE parameters, is completed from the model's own.
    """
    overrides = recipe.model.overrides
    if not overrides:
        return config
    own = config.to_dict()
    _refuse_unknown(recipe, config, set(overrides), "overrides")
    values = dict(own)
    if overrides.keys() & _WINDOW and "layer_types" not in overrides:
        values.pop("layer_types", None)  # derived from the window, unless given
    for key, value in overrides.items():
        values[key] = (
            {**own[key], **value} if isinstance(own[key], dict) and isinstance(value, dict) else value
        )
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type") in _EXTENDS_ROPE and "original_max_position_embeddings" not in rope:
        _refuse(
            recipe,
            "model.overrides.rope_parameters",
            "add original_max_position_embeddings, the context before the extension",
        )
    if rope.get("rope_type") == "default" and _EXTENSION & (overrides.get("rope_parameters") or {}).keys():
        _refuse(
            recipe,
            "model.overrides.rope_parameters",
            "plain RoPE reads no factor; add the rope_type, such as yarn",
        )
    changed = _build_config(recipe, values, "overrides")
    slides = "sliding_attention" in (getattr(changed, "layer_types", None) or ["sliding_attention"])
    if overrides.get("sliding_window") and not (slides and changed.sliding_window):
        _refuse(
            recipe,
            "model.overrides.sliding_window",
            "no layer would use the window; set use_sliding_window: true and max_window_layers: 0 as well, "
            "or layer_types",
        )
    return changed


def _refuse_unknown(recipe: Recipe, config: PreTrainedConfig, keys: set[str], section: str) -> None:
    known = type(config)().to_dict() if section == "config" else config.to_dict()
    aliases = (
        set(config.attribute_map) | {"rope_theta", "rope_scaling"}
        if section == "config"
        else set(config.attribute_map)
    )
    if unknown := sorted(keys - set(known) - aliases):
        _refuse(
            recipe, f"model.{section}.{unknown[0]}", f"the config of a {config.model_type} lacks this value"
        )


def _choose_trained(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """Sets `requires_grad` as `training.trainable` asks, and adds LoRA if it asks for that."""
    trained = recipe.training.trainable
    if trained == "all":
        return model
    model.requires_grad_(False)
    if trained == "lora":
        return _add_lora(model, recipe)
    for layer in fast_weights(model).values():
        layer.ttt.requires_grad_(True)
    return model


def _add_lora(model: PreTrainedModel, recipe: Recipe) -> Any:
    """Adds LoRA to the frozen model. The TTT parameters are trained and saved with it."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import check_target_module_exists
    except ImportError:
        _refuse(recipe, "training.trainable", f"lora needs peft; {how_to_install('train')}")

    lora = recipe.training.lora or Lora()
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        modules_to_save=["ttt"],
        task_type="CAUSAL_LM",
    )
    names = {module: name for name, module in model.named_modules()}
    for index, layer in fast_weights(model).items():
        # PEFT does not save a module inside an adapted one, so the TTT parameters would be lost.
        if lora.targets == "all-linear" or check_target_module_exists(config, names[layer]):
            _refuse(
                recipe,
                "training.lora.targets",
                f"{names[layer]} is the fast weight of layer {index}, which LoRA cannot adapt as well; leave "
                f"{names[layer].rpartition('.')[2]} out, or name the targets by a pattern that leaves out "
                f"layers {sorted(fast_weights(model))}",
            )
    for target in [lora.targets] if isinstance(lora.targets, str) else [[one] for one in lora.targets]:
        pattern = LoraConfig(target_modules=target)
        if not any(check_target_module_exists(pattern, name) for name in names.values()):
            _refuse(
                recipe,
                "training.lora.targets",
                f"no module of the {model.config.model_type} is called {target}",
            )
    # One dtype for all: DeepSpeed keeps float32 master weights, and ZeRO-3 refuses mixed dtypes.
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # PEFT makes them float32 if the weights have eight bits
            parameter.data = parameter.data.to(getattr(torch, recipe.model.dtype))
    return adapted


def _refuse(recipe: Recipe, key: str, message: str) -> NoReturn:
    raise InPlaceTTTError(f"{recipe.path or 'the recipe'}, {key}: {message}.")
