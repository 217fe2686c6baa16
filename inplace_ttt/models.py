"""How a converted model looks to transformers: an own model_type on disk, the base's own type in memory.

On disk a stock model_type would load silently as the base model, its TTT tensors dropped. So the folder says `model_type:
inplace_ttt`, with a shim that names the package to install; `architectures` names our classes; and for a class of the base
that is told to load the folder all the same, a setting that every config of a model checks holds a sentence instead of a
value. (A Trainer that resumes reads the file as a config of no model, which checks that setting only beside the number of
layers; so this is in our section.) In memory the config keeps the base's model_type, since Liger, PEFT and others look
models up by it. Importing `inplace_ttt` registers one model_type; the classes for each base are made when a config asks
for them. No existing model_type is touched.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .config import InPlaceTTTConfig
from .errors import InPlaceTTTError

MODEL_TYPE = "inplace_ttt"
_PREFIX = "InPlaceTTT"
_SHIM_MODULE = "configuration_inplace_ttt"
SHIM_FILE = f"{_SHIM_MODULE}.py"
_SHIM = '''"""Loads this checkpoint's classes from the package `inplace-ttt` (pip install inplace-ttt)."""

from inplace_ttt.models import InPlaceTTTModelConfig  # noqa: F401
'''
_GUARD, _COUNT = "layer_types", "num_hidden_layers"
_NOT_THE_BASE = [
    "this is an In-Place TTT checkpoint, which a class of its base would load without its fast weights: import inplace_ttt "
    "(pip install inplace-ttt) and load it with inplace_ttt.load or an Auto class of transformers"
]

_loading: ContextVar[bool] = ContextVar("whether from_pretrained is making the model", default=False)


class InPlaceTTTModelConfig(PreTrainedConfig):
    """The entry for `model_type: inplace_ttt`: gives a config of the base's kind that carries the TTT config."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        section = config_dict.get(MODEL_TYPE)
        if not isinstance(section, Mapping) or "base_model_type" not in section or "config" not in section:
            raise InPlaceTTTError(
                f"config.json says model_type {MODEL_TYPE} but has no {MODEL_TYPE} section; convert the base model again."
            )
        if section["base_model_type"] not in CONFIG_MAPPING:
            raise InPlaceTTTError(
                f"the base is a {section['base_model_type']}, which this transformers does not know; upgrade transformers."
            )
        return carrying_class(CONFIG_MAPPING[section["base_model_type"]]).from_dict(config_dict, **kwargs)


class _CarriesTTT:
    """Mixin over a base's config class: the base's model_type in memory, ours on disk."""

    base_class: type[PreTrainedConfig]
    inplace_ttt: dict[str, Any]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        _publish(cls)
        return super().from_dict(in_memory(config_dict, cls.base_class), **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()  # type: ignore[misc]
        return on_disk(values) | {name: count for name, count in values.items() if name == _COUNT}

    def to_diff_dict(self) -> dict[str, Any]:
        return on_disk(super().to_diff_dict())  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        write_shim(save_directory)


def on_disk(values: dict[str, Any]) -> dict[str, Any]:
    """A converted model's config.json from its config's values."""
    known = {name: values[name] for name in (_GUARD, _COUNT) if values.get(name) is not None}
    if _is_guarded(values):
        del known[_GUARD]
    return {
        **{name: value for name, value in _with_our_names(values).items() if name != _COUNT},
        "model_type": MODEL_TYPE,
        "auto_map": {"AutoConfig": f"{_SHIM_MODULE}.{InPlaceTTTModelConfig.__name__}"},
        _GUARD: _NOT_THE_BASE,
        MODEL_TYPE: {**values.get(MODEL_TYPE, {}), **known},
    }


def in_memory(values: Mapping[str, Any], base: type[PreTrainedConfig]) -> dict[str, Any]:
    """The config's values from a converted model's config.json, the inverse of `on_disk`; those of a base stay as they are."""
    if MODEL_TYPE not in values:
        return dict(values)
    section = dict(values[MODEL_TYPE])
    kept, count, plain = section.pop(_GUARD, None), section.pop(_COUNT, None), _with_our_names(values)
    if count is not None:
        plain.setdefault(_COUNT, count)
    if _is_guarded(values):  # else somebody took the guard out or set layer types of his own
        del plain[_GUARD]
        plain |= {} if kept is None else {_GUARD: kept}
    plain.pop("auto_map", None)
    return {
        **plain,
        "model_type": base.model_type,
        MODEL_TYPE: section,
    }


def of_the_base(values: Mapping[str, Any]) -> dict[str, Any]:
    """The base's config.json from a converted model's; a base's own as it is."""
    if MODEL_TYPE not in values:
        return dict(values)
    plain = in_memory(values, CONFIG_MAPPING[values[MODEL_TYPE]["base_model_type"]])
    del plain[MODEL_TYPE]
    return {**plain, "architectures": [name.removeprefix(_PREFIX) for name in plain.get("architectures") or ()]}


def _is_guarded(values: Mapping[str, Any]) -> bool:
    guard = values.get(_GUARD)
    return isinstance(guard, list) and len(guard) == 1 and str(guard[0]).startswith(_NOT_THE_BASE[0][:33])


def _with_our_names(values: Mapping[str, Any]) -> dict[str, Any]:
    names = values.get("architectures")
    return {**values, "architectures": [_converted_name(name) for name in names]} if names else dict(values)


def _converted_name(architecture: str) -> str:
    return architecture if architecture.startswith(_PREFIX) else f"{_PREFIX}{architecture}"


def section(base_model_type: str, config: InPlaceTTTConfig) -> dict[str, Any]:
    """The `inplace_ttt` section of config.json."""
    return {"base_model_type": base_model_type, "config": config.to_dict()}


def write_shim(folder: str | os.PathLike[str]) -> None:
    (Path(folder) / SHIM_FILE).write_text(_SHIM, encoding="utf-8")


@functools.cache
def carrying_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of converted models over `base`, registered with its model classes under every Auto class that has one."""

    def __init__(self: Any, **values: Any) -> None:
        base.__init__(self, **(in_memory(values, base) if values.get("model_type") == MODEL_TYPE else values))

    body = {"__init__": __init__, "base_class": base, "__module__": __name__}
    carrying = type(f"{_PREFIX}{base.__name__}", (_CarriesTTT, base), body)
    for auto in _auto_classes():
        if base in auto._model_mapping and isinstance(auto._model_mapping[base], type):
            auto.register(carrying, _converted_class(auto._model_mapping[base], carrying), exist_ok=True)
    return carrying


def _auto_classes() -> list[Any]:
    named = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel")]
    return [auto for auto in named if getattr(auto, "_model_mapping", None) is not None]


def _publish(carrying: Any) -> None:
    """Let the model classes be found as `transformers.InPlaceTTT<name>`, for who looks an architecture up by its name.

    transformers may be imported twice in a process; both modules show them.
    """
    for made in {auto._model_mapping[carrying] for auto in _auto_classes() if carrying in auto._model_mapping}:
        for module in (transformers, sys.modules["transformers"]):
            setattr(module, _converted_name(made.__name__), made)


@functools.cache
def _converted_class(base: Any, config_class: Any) -> type:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        # A quantiser that is at work in from_pretrained replaces linear maps first, which must not be fast weights yet.
        if not (_loading.get() and getattr(config, "quantization_config", None)):
            _convert(self)

    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        token = _loading.set(True)
        try:
            model, info = base.from_pretrained.__func__(cls, *args, output_loading_info=True, **kwargs)
        finally:
            _loading.reset(token)
        refuse_lack(model, [name for name in info["missing_keys"] if ".ttt." in name or model.can_generate()])  # not a new head
        if dropped := sorted(name for name in info["unexpected_keys"] if ".ttt." in name):
            raise InPlaceTTTError(
                f"{_source(model)} has {len(dropped)} tensors of fast weights that its config names no layer for ({dropped[0]}, …); take "
                "config and weights of one checkpoint."
            )
        _check_split(model)
        return (model, info) if output_loading_info else model

    def initialize_weights(self: Any) -> None:
        _start(self)
        base.initialize_weights(self)

    def _load_pretrained_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(model.config, "quantization_config", None):
            _convert(model)
        return base._load_pretrained_model(model, *args, **kwargs)

    body = {
        "__init__": __init__,
        "__module__": __name__,
        "config_class": config_class,
        "from_pretrained": classmethod(from_pretrained),
        "initialize_weights": initialize_weights,
        "_load_pretrained_model": staticmethod(_load_pretrained_model),
        # The base's code on the base's weights: transformers must rename old checkpoints' tensors as it does for the base.
        "is_custom_code": classmethod(lambda cls: False),
    }
    return type(base.__name__, (base,), body)  # the base's name, by which transformers chooses losses and label shifts


def refuse_lack(model: Any, missing: Iterable[str]) -> None:
    """Raises InPlaceTTTError where a checkpoint lacks tensors of the model that it was loaded into, which have random numbers now."""
    if lacking := sorted(missing):
        raise InPlaceTTTError(
            f"{_source(model)} lacks {len(lacking)} tensors of a {type(model).__name__} ({lacking[0]}, …): half a checkpoint, or another "
            "class's; load it by the class that its config.json names, or download the base, or convert it, again."
        )


def _source(model: Any) -> str:
    return "the state dict" if model.name_or_path in ("", "None") else model.name_or_path


def mark(config: PreTrainedConfig, ttt: InPlaceTTTConfig) -> None:
    """Make a base's config that of a converted model, in place: saving it then writes our model_type."""
    if not isinstance(config, _CarriesTTT):
        config.__class__ = carrying_class(type(config))  # type: ignore[arg-type]
    config.inplace_ttt = {**getattr(config, MODEL_TYPE, {}), **section(config.model_type, ttt)}


def unmark(config: PreTrainedConfig) -> None:
    """Undo `mark`."""
    if isinstance(config, _CarriesTTT):
        del config.inplace_ttt
        config.__class__ = config.base_class


def _convert(model: Any) -> None:
    from .surgery import convert, is_converted  # surgery marks configs through this module

    if not is_converted(model):  # else the model inside it has done so
        convert(model, InPlaceTTTConfig.from_dict(model.config.inplace_ttt["config"]))


def _start(model: Any) -> None:
    """Start the new parameters that the meta device could not hold and no checkpoint has filled, as transformers does the base's."""
    from .surgery import SEED, fast_weights, initial_std

    for index, layer in fast_weights(model).items():
        marked = (layer.ttt, *layer.ttt.parameters(), *layer.ttt.buffers())
        if not any(getattr(each, "_is_hf_initialized", False) for each in marked):
            layer.ttt.reset_parameters(initial_std(model.config), SEED + index)


def _check_split(model: Any) -> None:
    from torch.distributed.tensor import DTensor

    from .surgery import fast_weights

    for layer in fast_weights(model).values():
        if any(isinstance(p, DTensor) for p in layer.parameters()):
            layer.check_split()


def __getattr__(name: str) -> type:
    """The classes made for a base by name, so that a pickled config or model can be read: InPlaceTTT<config>, <model>."""
    base: Any = getattr(transformers, name.removeprefix(_PREFIX), None) if not name.startswith("_") else None
    kinds = base.__mro__ if isinstance(base, type) else ()
    if PreTrainedConfig in kinds and name.startswith(_PREFIX):
        return carrying_class(base)
    if kinds and transformers.PreTrainedModel in kinds and base.config_class is not None:
        carrying: Any = carrying_class(base.config_class)
        return _converted_class(base, carrying)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register(MODEL_TYPE, InPlaceTTTModelConfig)
