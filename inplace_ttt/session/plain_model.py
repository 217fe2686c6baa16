"""Plain models made from a converted model: without its fast weights, or with a session's writes in W0."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import InPlaceTTTError
from ..families import locate
from ..surgery import causal_lm, fast_weights, revert
from .weight_change import WeightChange


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of the model without TTT. The copy shares all tensors with `model`."""
    lm = causal_lm(model)
    return revert(copy.deepcopy(lm, {id(tensor): tensor for tensor in (*lm.parameters(), *lm.buffers())}))


@torch.no_grad()
def bake(model: PreTrainedModel, changes: Mapping[int, WeightChange]) -> PreTrainedModel:
    """Returns a copy of the model without TTT, with the changes added to its down-projections.

    W0 plus the change is computed in the change's dtype and rounded once. All other tensors are shared with
    `model`.

    Args:
        model: a converted model.
        changes: the changes by layer.

    Raises:
        InPlaceTTTError: if reads are not linear in z, or a down-projection is quantized or wrapped.
    """
    for index, layer in fast_weights(model).items():
        if layer.matrix() is None:
            raise InPlaceTTTError(
                f"layer {index}'s down-projection is quantized or wrapped, so its weight cannot be changed; "
                "export the session as a LoRA, or load the model unquantized."
            )
    plain = plain_copy(model)
    layers = locate(plain).layers
    for index, change in changes.items():
        down = layers[index].down_proj
        added = change.matrix().mT if isinstance(down, Conv1D) else change.matrix()
        weight = down.weight
        assert isinstance(weight, torch.Tensor)
        down.weight = nn.Parameter((weight + added).to(weight.dtype), requires_grad=weight.requires_grad)
    return plain
