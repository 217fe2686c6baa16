"""Opens a model by the path that a user gives: a full checkpoint, an adapter, or a PEFT adapter."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError, reported
from ..surgery import convert, fast_weights
from .adapter import is_adapter, located, read_adapter
from .layer_tensors import LayerTensors
from .loading import fingerprint_of_base, load_base
from .lora import base_of, merged, standing_on
from .reading import Checkpoint, is_peft_adapter
from .writing import ConversionPlan, describe_base, empty_model, plan_conversion


@dataclass(frozen=True)
class Conversion:
    """The description of a converted model, read without the base's weights.

    Attributes:
        config: the TTT config.
        base: description of the model's base.
        tensors: the new tensors of each TTT layer.
        model: the converted model on the meta device.
    """

    config: InPlaceTTTConfig
    base: Any
    tensors: LayerTensors
    model: PreTrainedModel


@dataclass(frozen=True)
class Opened(ABC):
    """A model at `path`.

    Attributes:
        path: folder or hub id.
        given_base: current path of an adapter's base, if it was moved.
        form: "full", "adapter" or "lora".
    """

    path: str
    given_base: str | None = None

    form: ClassVar[str]

    @property
    def tokenizer_source(self) -> str:
        """The folder or hub id of the model's tokenizer."""
        return self.path

    @property
    def folder(self) -> Path:
        """The folder of the model's files on this machine."""
        return Path(self.path)

    @property
    def described_base(self) -> dict[str, Any]:
        """The description of a converted model's base; empty if the model does not name it."""
        return dict(self.conversion().base or {})

    @property
    def declared_deviations(self) -> Sequence[Any]:
        """The deviations that the folder declares for the audit.

        Raises:
            InPlaceTTTError: if the checkpoint is incomplete.
        """
        return ()

    @abstractmethod
    def conversion(self) -> Conversion:
        """Reads the config, the base's description and the new tensors, without the base's weights.

        Raises:
            InPlaceTTTError: if the model is not converted.
        """

    @abstractmethod
    def load(self, **kwargs: Any) -> PreTrainedModel:
        """Loads the converted model in eval mode.

        Args:
            kwargs: arguments for `AutoModelForCausalLM.from_pretrained`.
        """


class Full(Opened):
    """A full checkpoint: a base, a converted checkpoint, or one in the reference code's format."""

    form = "full"

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint's files, with their headers read."""
        return Checkpoint.open(self.path)

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def described_base(self) -> dict[str, Any]:
        return dict((self.checkpoint.section or {}).get("base") or {})

    @property
    def declared_deviations(self) -> Sequence[Any]:
        self.checkpoint.ttt_config  # noqa: B018 - raises if not converted
        self.checkpoint.ttt_tensors()
        declared = (self.checkpoint.section or {}).get("declared_deviations", ())
        if not isinstance(declared, (list, tuple)):
            raise InPlaceTTTError(
                f"{self.path} has declared_deviations {declared!r}; it must be a list of {{id, why}}."
            )
        return declared

    def conversion(self) -> Conversion:
        config, tensors = self.checkpoint.ttt_config, self.checkpoint.ttt_tensors()
        return Conversion(config, self.described_base or None, tensors, empty_model(self.checkpoint)[1])

    def load(self, **kwargs: Any) -> PreTrainedModel:
        self.checkpoint.ttt_config  # noqa: B018 - raises if not converted
        self.checkpoint.require_ttt_dtypes()
        return load_base(self.path, **kwargs)


class Adapter(Opened):
    """An adapter of this package: a conversion's new tensors and a description of their base."""

    form = "adapter"

    @cached_property
    def read(self) -> tuple[InPlaceTTTConfig, dict[str, Any], LayerTensors]:
        """The adapter's TTT config, the description of its base, and its tensors."""
        return read_adapter(self.path)

    @property
    def tokenizer_source(self) -> str:
        return self.given_base or self.read[1]["name_or_path"]

    @property
    def described_base(self) -> dict[str, Any]:
        return self.read[1]

    @property
    def base(self) -> str:
        """The folder or hub id of the adapter's base.

        Raises:
            InPlaceTTTError: if the base was a folder that no longer exists.
        """
        return self.given_base or located(self.path, self.read[1]["name_or_path"])

    def planned(self) -> tuple[Checkpoint, ConversionPlan]:
        """Returns the adapter's base, and the plan of the base's conversion."""
        checkpoint = Checkpoint.open(self.base)
        return checkpoint, plan_conversion(checkpoint, self.read[0])

    def conversion(self) -> Conversion:
        config, described, tensors = self.read
        return Conversion(config, described, tensors, self.planned()[1].model)

    def load(self, **kwargs: Any) -> PreTrainedModel:
        config, described, tensors = self.read
        if self.given_base is None and described["revision"] is not None:
            kwargs = {"revision": described["revision"], **kwargs}
        model = convert(load_base(self.base, **kwargs), config)
        layers = fast_weights(model)
        found = fingerprint_of_base(model, self.base, kwargs.get("revision"), config)
        if found not in (None, described["fingerprint"]):
            raise InPlaceTTTError(
                f"{self.path} was made for a base with other weights than {self.base} (fingerprint "
                f"{described['fingerprint'][:12]}…, "
                f"found {found[:12]}…); load it onto that base."
            )
        if sorted(tensors) != sorted(layers):
            raise InPlaceTTTError(
                f"{self.path} has tensors for layers {sorted(tensors)}, but its config names "
                f"{sorted(layers)}; write the adapter again."
            )
        with reported(f"cannot load {self.path}"):
            for index, layer in layers.items():
                layer.ttt.load_state_dict(tensors[index])
        model.config.inplace_ttt = {
            **model.config.inplace_ttt,
            "base": {**described, "name_or_path": self.base},
        }
        return model


class Lora(Opened):
    """A PEFT adapter, such as a run with `trainable: lora` writes."""

    form = "lora"

    @property
    def tokenizer_source(self) -> str:
        return base_of(self.path, self.given_base)

    @property
    def declared_deviations(self) -> Sequence[Any]:
        source, still_to_make = standing_on(self.path, self.given_base)
        return open_model(source).declared_deviations if still_to_make is None else ()

    def conversion(self) -> Conversion:
        source, still_to_make = standing_on(self.path, self.given_base)
        if still_to_make is None:
            return open_model(source).conversion()
        checkpoint = Checkpoint.open(source)
        plan = plan_conversion(checkpoint, still_to_make)
        new = {index: dict(layer.ttt.state_dict()) for index, layer in fast_weights(plan.model).items()}
        return Conversion(plan.config, describe_base(checkpoint, plan), new, plan.model)

    def load(self, **kwargs: Any) -> PreTrainedModel:
        source, still_to_make = standing_on(self.path, self.given_base)
        below = (
            load(source, **kwargs)
            if still_to_make is None
            else convert(load_base(source, **kwargs), still_to_make)
        )
        return merged(below, self.path)


def open_model(path: str | os.PathLike[str], base: str | None = None) -> Full | Adapter | Lora:
    """Returns the model at a path. The files there determine its kind.

    Args:
        path: model folder, adapter folder or hub id.
        base: current path of an adapter's base, if it was moved.

    Raises:
        InPlaceTTTError: if a base is given for a full checkpoint.
    """
    if is_peft_adapter(path):
        return Lora(str(path), base)
    if is_adapter(path):
        return Adapter(str(path), base)
    if base is not None:
        raise InPlaceTTTError(f"{path} is not an adapter folder, so it needs no base; leave the base out.")
    return Full(str(path))


def load(path: str | os.PathLike[str], *, base: str | None = None, **kwargs: Any) -> PreTrainedModel:
    """Loads a converted model in eval mode, from a full checkpoint or from an adapter and its base.

    The adapter may also be one of PEFT. Its LoRA is merged into the weights. A vision-language checkpoint is
    loaded with its vision tower.

    Args:
        path: converted checkpoint or adapter folder.
        base: current path of an adapter's base, if it was moved.
        kwargs: arguments for `AutoModelForCausalLM.from_pretrained` (dtype, device_map, …).

    Returns:
        The converted model.

    Raises:
        InPlaceTTTError: if the folder is not converted or is incomplete. Also if the base is missing, if its
            weights are not those that the adapter was made for, or if `base` is given for a full checkpoint.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import convert, load
        >>> from inplace_ttt.surgery import config_of
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> convert(AutoModelForCausalLM.from_config(small)).save_pretrained("small-ttt")
        >>> config_of(load("small-ttt")).layers
        (0,)
    """
    return open_model(path, base).load(**kwargs)
