"""A small model right after its conversion, in memory and as a folder.

It shows the initial values of conv and P, and changes to the base.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...families import locate
from ...surgery import fast_weights
from ..whole_model import WholeModel
from .twin import base_of_twin, twin, twin_on_disk


@dataclass
class Fresh:
    """The state of fresh conversions.

    Attributes:
        generators: conv and P of three layers, first those of the conversion in memory.
        changed: names of the base's tensors whose bits changed.
        frozen: names of parameters that are excluded from training.
    """

    generators: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


def after_conversion(whole: WholeModel) -> Fresh:
    """Converts the small model with the settings of `whole`, in memory and as a folder."""
    found, base = Fresh(), dict(base_of_twin().named_parameters())
    for how, converted in (("in memory", twin), ("in a folder", twin_on_disk)):
        with converted(whole.config, layers=(0, 1, 2)) as model:
            layers = [layer.ttt for layer in fast_weights(model).values()]
            found.generators += [
                (t.conv.detach().clone() if t.conv is not None else Tensor(), t.proj.detach().clone())
                for t in layers
            ]
            for name, parameter in model.named_parameters():
                found.frozen += [f"{name}, {how}"] * (not parameter.requires_grad)
                found.changed += [f"{name}, {how}"] * (
                    name in base and not torch.equal(parameter, base[name])
                )
    return found


def frozen_beside_trained(whole: WholeModel) -> list[str]:
    """Returns the names of frozen TTT parameters and W0s, if every other weight of their MLP is trained."""
    found, decoder = [], locate(whole.lm)
    for index, layer in whole.layers.items():
        own = [(name, p) for name, p in layer.named_parameters() if p.is_floating_point()]
        beside = [
            p for p in decoder.layers[index].mlp.parameters() if all(p is not other for _, other in own)
        ]
        if beside and all(p.requires_grad for p in beside):
            found += [f"layer {index}'s {name}" for name, p in own if not p.requires_grad]
    return found
