"""How a converted model looks to transformers: an own model_type on disk, the base's own type in memory.

On disk a stock model_type would load silently as the base model, its TTT tensors dropped; so the folder says
`model_type: inplace_ttt`, with a shim that names the package to install. In memory the config keeps the base's
model_type, since Liger, PEFT and others look models up by it. Importing `inplace_ttt` registers one model_type; the
classes for each base are made when a config asks for them. No existing model_type is touched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .config import InPlaceTTTConfig
from .errors import InPlaceTTTError

MODEL_TYPE = "inplace_ttt"
_SHIM_MODULE = "configuration_inplace_ttt"
_SHIM = '''"""Loads this checkpoint's classes from the package `inplace-ttt` (pip install inplace-ttt)."""

from inplace_ttt.models import InPlaceTTTModelConfig  # noqa: F401
'''


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
        values = {key: value for key, value in config_dict.items() if key != "auto_map"}
        return super().from_dict({**values, "model_type": cls.base_class.model_type}, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        return on_disk(super().to_dict())  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        return on_disk(super().to_diff_dict())  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        write_shim(save_directory)


def on_disk(values: dict[str, Any]) -> dict[str, Any]:
    """A converted model's config.json from its config's values."""
    return {**values, "model_type": MODEL_TYPE, "auto_map": {"AutoConfig": f"{_SHIM_MODULE}.{InPlaceTTTModelConfig.__name__}"}}


def section(base_model_type: str, config: InPlaceTTTConfig) -> dict[str, Any]:
    """The `inplace_ttt` section of config.json."""
    return {"base_model_type": base_model_type, "config": config.to_dict()}


def write_shim(folder: str | os.PathLike[str]) -> None:
    (Path(folder) / f"{_SHIM_MODULE}.py").write_text(_SHIM, encoding="utf-8")


@functools.cache
def carrying_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of converted models over `base`, registered with its model class."""
    name = f"InPlaceTTT{base.__name__}"
    carrying = type(name, (_CarriesTTT, base), {"base_class": base, "__module__": __name__})
    if base in MODEL_FOR_CAUSAL_LM_MAPPING:
        AutoModelForCausalLM.register(carrying, _model_class(MODEL_FOR_CAUSAL_LM_MAPPING[base], carrying))
    return carrying


def _model_class(base: type, config_class: type[PreTrainedConfig]) -> type:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from .surgery import convert  # surgery marks configs through this module

        base.__init__(self, config, *args, **kwargs)  # type: ignore[misc]
        convert(self, InPlaceTTTConfig.from_dict(config.inplace_ttt["config"]))

    def from_pretrained(cls: Any, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        model, info = base.from_pretrained.__func__(cls, path, *args, output_loading_info=True, **kwargs)  # type: ignore[attr-defined]
        if missing := sorted(info["missing_keys"]):
            raise InPlaceTTTError(
                f"{path} lacks {len(missing)} tensors ({missing[0]}, …): half a checkpoint; convert the base model again."
            )
        return (model, info) if output_loading_info else model

    body = {
        "__init__": __init__,
        "__module__": __name__,
        "config_class": config_class,
        "from_pretrained": classmethod(from_pretrained),
        # The base's code on the base's weights: transformers must rename old checkpoints' tensors as it does for the base.
        "is_custom_code": classmethod(lambda cls: False),
    }
    return type(base.__name__, (base,), body)  # the base's name, which config.json keeps under "architectures"


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


def __getattr__(name: str) -> type[PreTrainedConfig]:
    """The carrying class of a base's config by name, so that a pickled config of a converted model can be read."""
    base = getattr(transformers, name.removeprefix("InPlaceTTT"), None) if name.startswith("InPlaceTTT") else None
    if not isinstance(base, type) or not issubclass(base, PreTrainedConfig):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return carrying_class(base)


AutoConfig.register(MODEL_TYPE, InPlaceTTTModelConfig)
