"""The config of a converted model, with its own model_type on disk and the base's model_type in memory.

With the base's model_type on disk, transformers would silently load a folder as the base, without its TTT
tensors. So three settings of config.json differ from the base's:

- `model_type` is `inplace_ttt`, with a shim file that names the package to install.
- `architectures` names our classes.
- `layer_types`, which every model's config checks, holds a message in place of its value. A class of the
  base that loads the folder raises an error with this message.
- `num_hidden_layers` is in our section. A resuming Trainer reads the file as a plain config, which would
  check `layer_types` against it.

In memory the config has the base's model_type, since Liger, PEFT and others look models up by it. Importing
`inplace_ttt` registers one model_type. The classes for a base are made when the first config needs them
(`converted_class`). Existing model_types are unchanged.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .config import InPlaceTTTConfig
from .errors import InPlaceTTTError
from .files.schema import Open, from_values

MODEL_TYPE, ADAPTER_TYPE = "inplace_ttt", "inplace_ttt_adapter"
_PREFIX = "InPlaceTTT"
_SHIM_MODULE = "configuration_inplace_ttt"
SHIM_FILE = f"{_SHIM_MODULE}.py"
_SHIM = '''"""Loads this checkpoint's classes from inplace-ttt (its checkout: pip install -e .)."""

from inplace_ttt.adapter_class import AdapterConfig  # noqa: F401
from inplace_ttt.converted_config import InPlaceTTTModelConfig  # noqa: F401
'''
_GUARD, _COUNT = "layer_types", "num_hidden_layers"
_SIGN = "this is an In-Place TTT checkpoint"
"""The beginning of the message in `layer_types`. It identifies the message if the rest differs."""
_NOT_THE_BASE = [
    f"{_SIGN}, which a class of its base would load without its fast weights: import inplace_ttt "
    "(in its checkout, pip install -e .) and load it with inplace_ttt.load or an Auto class of transformers"
]

followers: list[Callable[[type[PreTrainedConfig], type[PreTrainedConfig]], None]] = []
"""Functions called with a base's config class and the converted config class made for it.

`converted_class` adds a function that makes the model classes.
"""


@dataclass(frozen=True)
class BaseModel(Open):
    """The base of a conversion, with the fingerprint of its W0 (None if unknown)."""

    name_or_path: str
    revision: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class _Section:
    """The section `inplace_ttt` of config.json.

    `InPlaceTTTConfig.from_dict` checks `config`, and `Full.declared_deviations` checks `declared_deviations`.
    """

    base_model_type: str
    config: dict[str, Any]
    base: BaseModel | None = None
    declared_deviations: Any = None
    layer_types: Any = None
    num_hidden_layers: Any = None


def checked_section(values: Mapping[str, Any], where: Any) -> Mapping[str, Any]:
    """Returns the section `inplace_ttt` of a converted model's config.json.

    Args:
        values: contents of config.json.
        where: name of the file, for the message.

    Raises:
        InPlaceTTTError: if the section is missing, or a key in it is missing, unknown or of a wrong type.
    """
    if MODEL_TYPE not in values:
        raise InPlaceTTTError(
            f"{where} has model_type {MODEL_TYPE} but no {MODEL_TYPE} section; convert the base model again."
        )
    from_values(_Section, values[MODEL_TYPE], f"{where}, {MODEL_TYPE}")
    return values[MODEL_TYPE]


class InPlaceTTTModelConfig(PreTrainedConfig):
    """The config class registered for `model_type: inplace_ttt`.

    `from_dict` returns a config of the base's class, with the TTT config in its attribute `inplace_ttt`.
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        section = checked_section(config_dict, "config.json")
        if section["base_model_type"] not in CONFIG_MAPPING:
            raise InPlaceTTTError(
                f"the base is a {section['base_model_type']}, which this transformers does not support; "
                "upgrade transformers."
            )
        return carrying_class(CONFIG_MAPPING[section["base_model_type"]]).from_dict(config_dict, **kwargs)


class _CarriesTTT:
    """Mixin for a base's config class. It has the base's model_type in memory, and ours on disk."""

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
    """Returns a converted model's config.json, from the values of its config."""
    known = {name: values[name] for name in (_GUARD, _COUNT) if values.get(name) is not None}
    if _is_guarded(values):
        del known[_GUARD]
    return {
        **{name: value for name, value in _with_our_names(values).items() if name != _COUNT},
        "model_type": MODEL_TYPE,
        "auto_map": auto_map(InPlaceTTTModelConfig.__name__),
        _GUARD: _NOT_THE_BASE,
        MODEL_TYPE: {**values.get(MODEL_TYPE, {}), **known},
    }


def in_memory(values: Mapping[str, Any], base: type[PreTrainedConfig]) -> dict[str, Any]:
    """Returns the values of the config from a converted model's config.json. It is the inverse of `on_disk`.

    The values of a base's config.json are returned unchanged.
    """
    if MODEL_TYPE not in values:
        return dict(values)
    section = dict(values[MODEL_TYPE])
    kept, count, plain = section.pop(_GUARD, None), section.pop(_COUNT, None), _with_our_names(values)
    if count is not None:
        plain.setdefault(_COUNT, count)
    if _is_guarded(values):  # False if a user removed the guard, or set other layer types
        del plain[_GUARD]
        plain |= {} if kept is None else {_GUARD: kept}
    plain.pop("auto_map", None)
    return {
        **plain,
        "model_type": base.model_type,
        MODEL_TYPE: section,
    }


def of_the_base(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the base's config.json from a converted model's. A base's config.json is returned unchanged."""
    if MODEL_TYPE not in values:
        return dict(values)
    plain = in_memory(values, CONFIG_MAPPING[values[MODEL_TYPE]["base_model_type"]])
    del plain[MODEL_TYPE]
    return {
        **plain,
        "architectures": [name.removeprefix(_PREFIX) for name in plain.get("architectures") or ()],
    }


def _is_guarded(values: Mapping[str, Any]) -> bool:
    guard = values.get(_GUARD)
    return isinstance(guard, list) and len(guard) == 1 and str(guard[0]).startswith(_SIGN)


def _with_our_names(values: Mapping[str, Any]) -> dict[str, Any]:
    names = values.get("architectures")
    return {**values, "architectures": [_converted_name(name) for name in names]} if names else dict(values)


def _converted_name(architecture: str) -> str:
    return architecture if architecture.startswith(_PREFIX) else f"{_PREFIX}{architecture}"


def section(base_model_type: str, config: InPlaceTTTConfig) -> dict[str, Any]:
    """Returns the section `inplace_ttt` of config.json."""
    return {"base_model_type": base_model_type, "config": config.to_dict()}


def auto_map(config_class: str) -> dict[str, str]:
    """Returns config.json's `auto_map`, by which `trust_remote_code` finds a config class of this package."""
    return {"AutoConfig": f"{_SHIM_MODULE}.{config_class}"}


def write_shim(folder: str | os.PathLike[str]) -> None:
    """Writes the module from which transformers loads our classes with `trust_remote_code`."""
    (Path(folder) / SHIM_FILE).write_text(_SHIM, encoding="utf-8")


@functools.cache
def carrying_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Returns the config class of converted models with the base config class `base`."""

    def __init__(self: Any, **values: Any) -> None:
        base.__init__(self, **(in_memory(values, base) if values.get("model_type") == MODEL_TYPE else values))

    body = {"__init__": __init__, "base_class": base, "__module__": __name__}
    carrying = type(f"{_PREFIX}{base.__name__}", (_CarriesTTT, base), body)
    for follow in followers:
        follow(base, carrying)
    return carrying


def auto_classes() -> list[Any]:
    """Returns transformers' Auto classes for models."""
    named = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel")]
    return [auto for auto in named if getattr(auto, "_model_mapping", None) is not None]


def _publish(carrying: Any) -> None:
    """Makes the model classes attributes of transformers (`InPlaceTTT<name>`), for look-ups by architecture.

    transformers may be imported twice in a process. Both modules then receive the attributes.
    """
    for made in {auto._model_mapping[carrying] for auto in auto_classes() if carrying in auto._model_mapping}:
        for module in (transformers, sys.modules["transformers"]):
            setattr(module, _converted_name(made.__name__), made)


def marked(config: PreTrainedConfig, ttt: InPlaceTTTConfig) -> PreTrainedConfig:
    """Returns a converted model's config from its base's. Saving it writes our model_type."""
    made = copy.copy(config)
    if not isinstance(made, _CarriesTTT):
        made.__class__ = carrying_class(type(made))  # type: ignore[arg-type]
    made.inplace_ttt = {**getattr(made, MODEL_TYPE, {}), **section(made.model_type, ttt)}
    return made


def unmarked(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the base's config, the inverse of `marked`."""
    made = copy.copy(config)
    if isinstance(made, _CarriesTTT):
        del made.inplace_ttt
        made.__class__ = made.base_class
    return made


def __getattr__(name: str) -> type:
    """Returns the converted class `InPlaceTTT<config>` of a base. Unpickling a config needs it."""
    base: Any = getattr(transformers, name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return carrying_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register(MODEL_TYPE, InPlaceTTTModelConfig)
