"""Lets transformers' Auto classes and pipelines load an adapter folder by its path.

The folder's config.json has a model_type of its own. The class registered for it loads the adapter onto its
base, and returns the converted model. So no object of this class is ever made.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .converted_config import ADAPTER_TYPE


class AdapterConfig(PreTrainedConfig):
    """The config class registered for `model_type: inplace_ttt_adapter`."""

    model_type = ADAPTER_TYPE


class AdapterModel(PreTrainedModel):
    """The model class registered for adapters. `from_pretrained` returns a model of the base's class."""

    config_class: ClassVar[type[PreTrainedConfig]] = AdapterConfig

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any
    ) -> PreTrainedModel:
        """Loads an adapter onto its base, as `inplace_ttt.load` does.

        Args:
            path: adapter folder.
            args: not used.
            config: the adapter's config, which the Auto classes read; its attention is used.
            kwargs: arguments for the base's `from_pretrained`.

        Returns:
            The converted model.

        Raises:
            InPlaceTTTError: as `inplace_ttt.load`.

        Examples:
            >>> from transformers import AutoModelForCausalLM, LlamaConfig
            >>> from inplace_ttt import convert, save_adapter
            >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
            >>> AutoModelForCausalLM.from_config(small).save_pretrained("small-base")
            >>> save_adapter(convert(AutoModelForCausalLM.from_pretrained("small-base")), "small-adapter")
            >>> AutoModelForCausalLM.from_pretrained("small-adapter").config.model_type
            'llama'
        """
        from .checkpoint.opened import load

        attention = getattr(config, "_attn_implementation_internal", None)
        if attention is not None:
            kwargs.setdefault("attn_implementation", attention)
        return load(path, **kwargs)


AutoConfig.register(ADAPTER_TYPE, AdapterConfig, exist_ok=True)
AutoModelForCausalLM.register(AdapterConfig, AdapterModel, exist_ok=True)
