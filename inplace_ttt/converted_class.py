"""The class of a converted model, a subclass of its base's class that converts itself in `__init__`.

The model is therefore converted before its weights are loaded. `surgery` imports transformers, and this
module is loaded while transformers is being imported (`registration`). So each function here imports
`surgery` itself.
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
        # In from_pretrained, a quantizer must replace the linear maps before they become fast weights.
        if not (_loading.get() and getattr(config, "quantization_config", None)):
            _convert(self)

    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        token = _loading.set(True)
        try:
            model, info = base.from_pretrained.__func__(cls, *args, output_loading_info=True, **kwargs)
        finally:
            _loading.reset(token)
        # a class that cannot generate, such as a classifier, may have a new head that is in no checkpoint
        refuse_lack(model, [name for name in info["missing_keys"] if ".ttt." in name or model.can_generate()])
        if dropped := sorted(name for name in info["unexpected_keys"] if ".ttt." in name):
            raise InPlaceTTTError(
                f"{_source(model)} has {len(dropped)} tensors of fast weights in layers that its config "
                f"does not name ({dropped[0]}, …); use the config and the weights of one checkpoint."
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
        # transformers renames old checkpoints' tensors only for its own classes, and this class is derived
        # from one
        "is_custom_code": classmethod(lambda cls: False),
    }
    # transformers chooses losses and label shifts by the class name, so it must be the base's
    return type(base.__name__, (base,), body)


def refuse_lack(model: Any, missing: Iterable[str]) -> None:
    """Raises InPlaceTTTError if a checkpoint lacks tensors of its model.

    transformers gives such tensors random values.

    Args:
        model: the model that the checkpoint was loaded into.
        missing: names of the missing tensors.
    """
    if lacking := sorted(missing):
        raise InPlaceTTTError(
            f"{_source(model)} lacks {len(lacking)} tensors of a {type(model).__name__} ({lacking[0]}, …): "
            "it is half a checkpoint, or one of another class; load it with the class in its config.json, or "
            "download or convert the base again."
        )


def _source(model: Any) -> str:
    return "the state dict" if model.name_or_path in ("", "None") else model.name_or_path


def _convert(model: Any) -> None:
    from .surgery import convert, is_converted

    if not is_converted(model):  # an inner model may have converted itself already
        convert(model, InPlaceTTTConfig.from_dict(model.config.inplace_ttt["config"]))


def _start(model: Any) -> None:
    """Initializes new parameters that were on the meta device and are in no checkpoint.

    transformers does the same with the base's parameters.
    """
    from .surgery import SEED, fast_weights, initial_std

    for index, layer in fast_weights(model).items():
        marked = (layer.ttt, *layer.ttt.parameters(), *layer.ttt.buffers())
        if not any(getattr(each, "_is_hf_initialized", False) for each in marked):
            layer.ttt.reset_parameters(initial_std(model.config), SEED + index)


def _check_split(model: Any) -> None:
    from torch.distributed.tensor import DTensor

    from .layer.settings import check_split
    from .surgery import fast_weights

    for layer in fast_weights(model).values():
        if any(isinstance(p, DTensor) for p in layer.parameters()):
            check_split(layer.fast.config)


def _register(base: Any, carrying: Any) -> None:
    """Registers the converted model's class with every Auto class that has a model class for `base`."""
    for auto in auto_classes():
        if base in auto._model_mapping and isinstance(auto._model_mapping[base], type):
            auto.register(carrying, _converted_class(auto._model_mapping[base], carrying), exist_ok=True)


followers.append(_register)


def __getattr__(name: str) -> type:
    """Returns the converted class of the base class `name`. Unpickling a converted model needs it."""
    base: Any = getattr(transformers, name, None) if not name.startswith("_") else None
    kinds = base.__mro__ if isinstance(base, type) else ()
    if transformers.PreTrainedModel in kinds and base.config_class is not None:
        carrying: Any = carrying_class(base.config_class)
        return _converted_class(base, carrying)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
