"""Probes of a fresh conversion's conv and P, and of its equality with the base."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import surgery
from ...families import locate
from ..borrowing import small_chunks
from ..limits import limits
from ..outcome import Outcome, judged, within
from ..whole_model import WholeModel
from .bench import largest_difference
from .twin import TWIN_RANGE, base_of_twin, twin, twin_on_disk


@dataclass
class Fresh:
    """The state of a small model right after its conversions, in memory and as a folder.

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
            layers = [layer.ttt for layer in surgery.fast_weights(model).values()]
            for t in layers:
                conv = Tensor() if t.conv is None else t.conv.detach().clone()
                found.generators.append((conv, t.proj.detach().clone()))
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


def start_conv(whole: WholeModel, expected: Any) -> Outcome:
    """Measures the convolutions of a fresh conversion with these settings.

    The report adds the largest entry of this model's own convolutions.
    """
    if whole.config.conv == "next":
        return Outcome("extension", "the next token's source replaces the convolution", {"conv": "next"})
    fresh = max(float(conv.abs().max()) for conv, _ in whole.once(after_conversion).generators)
    here = max(float(layer.ttt.conv.detach().abs().max()) for layer in whole.layers.values())
    found = f"a conversion starts with conv {'= 0' if fresh == 0 else f'up to {fresh:.2g}'}"
    found += "; this model's is 0 still" if here == 0 else "; this model's has been trained since"
    return judged(fresh == 0, found, {"largest entry, fresh": fresh, "largest entry, this model": here}, 0)


def start_projection(whole: WholeModel, expected: Any) -> Outcome:
    """Measures P of a fresh conversion, and of this model if it was never trained.

    Entries off the diagonal must be 0. The spread of the diagonal is compared with the model's initializer
    range.
    """
    if whole.config.proj_init != "random_diagonal":
        init = whole.config.proj_init
        measured = "map to the next token that is measured on a text"
        start = measured if init == "calibrated" else init.replace("_", " ")
        return Outcome("extension", f"P starts as the {start}", {"proj_init": init})
    fresh = [proj for _, proj in whole.once(after_conversion).generators]
    drawn = [(p, TWIN_RANGE) for p in fresh]
    groups = [fresh[: len(fresh) // 2], fresh[len(fresh) // 2 :]]
    if untrained(whole):
        own = [layer.ttt.proj.detach().float().cpu() for layer in whole.layers.values()]
        drawn += [(p, surgery.initial_std(whole.lm.config)) for p in own]
        groups.append(own)
    off = max(float((p - p.diagonal().diag()).abs().max()) for p, _ in drawn)
    strange = [why for p, wanted in drawn if (why := _unlike_normal(p.diagonal() / wanted))]
    alike = any(torch.equal(a, b) for group in groups for a, b in itertools.combinations(group, 2))
    found = strange[0] if strange else "P is diagonal, N(0, σ²) with the initializer range"
    found = f"P has entries up to {off:.2g} off its diagonal" if off else found
    found += "; the same in two layers" if alike else ""
    spread = [float(p.diagonal().std()) / wanted for p, wanted in drawn]
    numbers = {"largest off the diagonal": off, "spread on the diagonal, over the initializer range": spread}
    return judged(off == 0 and not strange and not alike, found, numbers, 0.25)


def _unlike_normal(x: Tensor) -> str:
    """Returns a property of the numbers [n] that n draws from N(0, 1) would lack, or "" if there is none."""
    n, mean, std, largest = len(x), float(x.mean()), float(x.std()), float(x.abs().max())
    if abs(std - 1) > max(0.25, 4 / (2 * n) ** 0.5):
        return f"P's diagonal has {std:.2f} of the initializer range"
    if abs(mean) > max(0.35, 4 / n**0.5):
        return f"P's diagonal has a mean of {mean:.2f} of its range"
    if n >= 100 and largest < 1.9 * std:
        return f"P's diagonal is nowhere above {largest / std:.2f} of its spread, as no normal draw is"
    return ""


def start_identity(whole: WholeModel, expected: Any) -> Outcome:
    """Compares the base's weights before and after a conversion, and logits with conv = 0.

    The logits are those of a small model before and after conversion, and of this model with TTT on and off.
    """
    small = whole.once(after_conversion)
    for found, names in (
        ("a conversion changes the base's", small.changed),
        ("a conversion freezes", small.frozen),
        ("while the rest of their MLP is trained, frozen are", frozen_beside_trained(whole)),
    ):
        if names:
            return judged(False, f"{found} {', '.join(names[:3])}", {"named": names}, 0)
    if not whole.config.starts_as_base:
        found = "a fresh conversion writes at once, so it does not equal its base"
        return Outcome("extension", found, {"conv": whole.config.conv})
    ids = torch.randint(64, (1, 3 * whole.chunk), generator=torch.Generator().manual_seed(whole.seed))
    settings = dataclasses.replace(whole.config, chunk_size=whole.chunk)
    numbers = {}
    with torch.no_grad():
        wanted = base_of_twin()(ids, use_cache=False).logits
        ways: dict[str, Any] = {"a small model": twin}
        if not settings.needs_calibration:  # a folder is converted without calibration
            ways["a small folder"] = twin_on_disk
        for name, converted in ways.items():
            with converted(settings, layers=(0, 1)) as model:
                for layer in surgery.fast_weights(model).values():
                    layer.ttt.conv.zero_()
                numbers[f"logits of {name} against its base"] = largest_difference(
                    model(ids, use_cache=False).logits, wanted
                )
    if untrained(whole):
        with small_chunks(whole.model, whole.chunk, seed=None), torch.no_grad():
            on = whole.lm(whole.ids, use_cache=False).logits
            with surgery.disable_ttt(whole.lm):
                off = whole.lm(whole.ids, use_cache=False).logits
        numbers["logits of this model, on against off"] = largest_difference(on, off)
    worst = max(numbers, key=lambda name: numbers[name])
    limit = limits(whole.lm.dtype if "this model" in worst else torch.float32).start
    bad = "the logits of the fresh model differ from its base's by {off:.2g}"
    return within(numbers, "the model starts as its base", bad, limit)


def untrained(whole: WholeModel) -> bool:
    return whole.config.starts_as_base and not any(
        bool(layer.ttt.conv.detach().any()) for layer in whole.layers.values()
    )
