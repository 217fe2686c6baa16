"""The class of a converted model: its base's, which converts itself when it is made, before weights are
loaded.

It imports surgery where it is used: transformers, which surgery imports, brings this file in
(`registration`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import transformers

from .config import InPlaceTTTConfig
from .converted_config import auto_classes, carrying_class, followers
from .errors import InPlaceTTTError

_loading: ContextVar[bool] = ContextVar("whether from_pretrained is making the model", default=False)


@functools.cache
def _converted_class(base: Any, config_class: Any) -> type:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        # A quantiser that is at work in from_pretrained replaces linear maps first, which must not be fast
        # weights yet.
        if not (_loading.get() and getattr(config, "quantization_config", None)):
            _convert(self)

    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        token = _loading.set(True)
        try:
            model, info = base.from_pretrained.__func__(cls, *args, output_loading_info=True, **kwargs)
        finally:
            _loading.reset(token)
        # not a new head
        refuse_lack(model, [name for name in info["missing_keys"] if ".ttt." in name or model.can_generate()])
        if dropped := sorted(name for name in info["unexpected_keys"] if ".ttt." in name):
            raise InPlaceTTTError(
                f"{_source(model)} has {len(dropped)} tensors of fast weights that its config names no "
                f"layer for ({dropped[0]}, …); take "
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
        # The base's code on the base's weights: transformers must rename old checkpoints' tensors as it does
        # for the base.
        "is_custom_code": classmethod(lambda cls: False),
    }
    # the base's name, by which transformers chooses losses and label shifts
    return type(base.__name__, (base,), body)


def refuse_lack(model: Any, missing: Iterable[str]) -> None:
    """Raises InPlaceTTTError where a checkpoint lacks tensors of the model that it was loaded into, which
    have random numbers now."""
    if lacking := sorted(missing):
        raise InPlaceTTTError(
            f"{_source(model)} lacks {len(lacking)} tensors of a {type(model).__name__} ({lacking[0]}, …): "
            "half a checkpoint, or another "
            "class's; load it by the class that its config.json names, or download the base, or convert "
            "it, again."
        )


def _source(model: Any) -> str:
    return "the state dict" if model.name_or_path in ("", "None") else model.name_or_path


def _convert(model: Any) -> None:
    from .surgery import convert, is_converted

    if not is_converted(model):  # else the model inside it has done so
        convert(model, InPlaceTTTConfig.from_dict(model.config.inplace_ttt["config"]))


def _start(model: Any) -> None:
    """Start the new parameters that the meta device could not hold and no checkpoint has filled, as
    transformers does the base's."""
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


def _register(base: Any, carrying: Any) -> None:
    """Under every Auto class that has a model class for `base`."""
    for auto in auto_classes():
        if base in auto._model_mapping and isinstance(auto._model_mapping[base], type):
            auto.register(carrying, _converted_class(auto._model_mapping[base], carrying), exist_ok=True)


followers.append(_register)


def __getattr__(name: str) -> type:
    """The classes made for a base, by its class's name, so that a pickled model can be read."""
    base: Any = getattr(transformers, name, None) if not name.startswith("_") else None
    kinds = base.__mro__ if isinstance(base, type) else ()
    if transformers.PreTrainedModel in kinds and base.config_class is not None:
        carrying: Any = carrying_class(base.config_class)
        return _converted_class(base, carrying)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
