"""Maps the tensors of a checkpoint to the parameters of a model.

transformers renames the tensors of many families when it loads them.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..errors import InPlaceTTTError


class TensorNames(dict[str, str]):
    """A dict from a model's parameter to the name of its tensor in a checkpoint.

    Raises:
        InPlaceTTTError: on access to a parameter without a tensor.
    """

    def __init__(self, names: Iterable[str], model: PreTrainedModel, checkpoint: str) -> None:
        super().__init__({parameter: name for name, parameter in parameters(names, model).items()})
        self._checkpoint = checkpoint

    def __missing__(self, parameter: str) -> str:
        raise InPlaceTTTError(
            f"{self._checkpoint} lacks a tensor for {parameter}; its weights do not match its config.json."
        )


def parameters(names: Iterable[str], model: PreTrainedModel) -> dict[str, str]:
    """Returns a dict from each tensor to the parameter that `from_pretrained` loads it into.

    It applies transformers' own rules in their order. If several tensors are merged into one parameter, as
    for routed experts, each is mapped to its own name.

    Args:
        names: tensors of a checkpoint.
        model: the model, on any device.
    """
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    held, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for name in sorted(names, key=dot_natural_key):  # some rules apply only after another one has
        parameter, _ = rename_source_key(name, renamings, [], prefix, held)
        if parameter not in held and name in held:
            parameter = name
        elif parameter not in held and not parameter.startswith(f"{prefix}."):
            parameter = f"{prefix}.{parameter}"
        found[name] = parameter
    return found


def is_computed(parameter: str, model: PreTrainedModel) -> bool:
    """Returns True if `from_pretrained` does not copy a parameter, but computes it from tensors.

    It may transpose, split or merge tensors.
    """
    rules = (rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightConverter))
    return any(rule.reverse_transform().rename_source_key(parameter)[1] is not None for rule in rules)
