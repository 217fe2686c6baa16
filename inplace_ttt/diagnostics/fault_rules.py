"""Rules for faults in the layer itself, in its weights, gradient paths, own-chunk reads, signs and sizes."""

from __future__ import annotations

import math

from torch import nn

from ..layer.fast_linear import FastWeight
from ..layer.quantized import readable_parameters
from .diagnosed_model import DiagnosedModel
from .findings import Finding, Severity, named
from .measurements import Measurements
from .overrides import with_eta
from .targets import direction, points_away
from .write_effects import HARM, read
from .writes import longest_document

NO_EFFECT = 1e-4
"""Largest η‖S‖/‖W0‖ that changes no prediction."""
_LEAKS = 0.01
"""Largest change of first chunks' logits that is not a leak, as a fraction of the change in later chunks."""
_USUAL_CONV = 0.02
"""RMS entry of a trained conv: between the size of one Adam step and 1."""


def weights_not_finite(model: DiagnosedModel) -> list[Finding]:
    """Returns a finding for each parameter or calibrated buffer that holds NaN or infinity."""
    own: dict[int, tuple[int, str]] = {}
    for index, layer in model.layers.items():
        for name, tensor in (*layer.ttt.named_parameters(), *layer.ttt.named_buffers()):
            own[id(tensor)] = (index, {"proj": "P"}.get(name, name))
        own[id(layer.weight)] = (index, "W0")
    tensors = [*readable_parameters(model.module)]
    tensors += [
        (name, buffer) for layer in model.layers.values() for name, buffer in layer.ttt.named_buffers()
    ]
    found = []
    for name, tensor in tensors:
        if tensor.is_floating_point() and (bad := int((~tensor.detach().isfinite()).sum())):
            layers = (own[id(tensor)][0],) if id(tensor) in own else ()
            what = f"layer {layers[0]}: {own[id(tensor)][1]}" if layers else name
            message = f"{what} holds NaN or infinity in {bad} of {tensor.numel()} entries"
            found.append(
                Finding(
                    "weight-not-finite", "severe", message, layers, {"entries": bad, "of": tensor.numel()}
                )
            )
    return found


def not_finite(model: DiagnosedModel, m: Measurements) -> Finding:
    """Returns the finding for a loss that is NaN or infinite although all weights are finite.

    It names the layers whose writes alone cause it.
    """
    layers = []
    if math.isfinite(m.loss_off):
        for index in model.layers:
            if bool(read(model, with_eta(model.layers, {index: 0.0})).losses.isfinite().all()):
                layers.append(index)
    where = f", and with those of {named(layers)} alone" if layers else ""
    off = (
        f"{m.loss_off:.3f} with the writes off{where}, so they are the cause"
        if math.isfinite(m.loss_off)
        else "so it is with the writes off"
    )
    return Finding(
        "not-finite",
        "severe",
        f"the loss is {m.gradients.loss}; {off}",
        tuple(layers),
        {"loss_off": m.loss_off},
    )


def faults(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    """Returns the findings on the layer itself."""
    own = _own_chunk(m)  # if a chunk reads its own targets, the loss does not show the sign of the writes
    return [*_cut_ways(m), *_frozen_weight(model, m), *(own or _away(model, m)), *_small_conv(model, m)]


def _cut_ways(m: Measurements) -> list[Finding]:
    found = []
    for index, ways in m.ways.items():
        cut = {
            name: way
            for name, way in (("writes under", ways.writing), ("reads with", ways.reading))
            if way is not None and way.cut
        }
        if cut:
            had, due = (
                " and ".join(f"{number:.2g}" for number in numbers)
                for numbers in zip(*((w.found, w.expected) for w in cut.values()), strict=True)
            )
            message = (
                f"layer {index}: the keys that it {' and '.join(cut)} get a gradient of {had} where "
                f"{due} is expected"
            )
            numbers = {name: {"found": way.found, "expected": way.expected} for name, way in cut.items()}
            found.append(Finding("keys-detached", "severe", message, (index,), numbers))
        if ways.weight is not None and ways.weight.cut:
            message = (
                f"layer {index}: W0 gets a gradient of {ways.weight.found:.2g} where its input and "
                f"output give {ways.weight.expected:.2g}"
            )
            found.append(
                Finding(
                    "weight-detached",
                    "severe",
                    message,
                    (index,),
                    {"found": ways.weight.found, "expected": ways.weight.expected},
                )
            )
    return found


def _frozen_weight(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    """Returns a finding for each W0 that does not train although most of its MLP does.

    LoRA and a frozen base are not faults, since the rest of the MLP does not train either.
    """
    found = []
    paths = {id(module): path for path, module in model.module.named_modules()}
    for index, layer in model.layers.items():
        parent = model.module.get_submodule(paths[id(layer)].rpartition(".")[0])
        if m.trained.get((index, "weight"), True) or not _mostly_trains(parent, layer):
            continue
        norm = m.gradients.norms.get((index, "weight"), 0.0)
        message = (
            f"layer {index}: W0 requires no gradient while the rest of its MLP trains; unfrozen, it "
            f"would get {norm:.2g}"
        )
        found.append(Finding("weight-frozen", "severe", message, (index,), {"gradient_thawed": norm}))
    return found


def _mostly_trains(parent: nn.Module, layer: FastWeight) -> bool:
    own = {id(p) for p in layer.parameters()}
    others = [(p.numel(), p.requires_grad) for p in parent.parameters() if id(p) not in own]
    return sum(n for n, trains in others if trains) > sum(n for n, trains in others if not trains)


def _own_chunk(m: Measurements) -> list[Finding]:
    found = []
    _, (start, stop) = longest_document(m.layout)
    # the last chunk that predicts a token; no prediction reads its targets
    predicting = max(0, stop - start - 2) // m.layout.chunk_size
    for index, chunks in m.gradients.by_chunk.items():
        effect, last = m.effects.get(index), chunks[predicting] if chunks else 0.0
        leaks = effect is not None and effect.leaked > _LEAKS * effect.logits
        reached = last > _LEAKS * max(chunks) if chunks and index not in m.prompt_writers else False
        if not leaks and not reached:
            continue
        said = []
        if leaks and effect is not None:
            said.append(
                f"its writes move the logits of first chunks, which read no write, by {effect.leaked:.2g} "
                f"(RMS; later ones by {effect.logits:.2g})"
            )
        if reached:
            said.append(
                f"a gradient of {last:.2g} reaches the targets of the last chunk, which nothing may read"
            )
        numbers = {"first_chunks": effect.leaked if effect else None, "last_targets": last}
        found.append(
            Finding("own-chunk-read", "severe", f"layer {index}: {'; '.join(said)}", (index,), numbers)
        )
    return found


def _away(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    found = []
    for index, layer in model.layers.items():
        if not points_away(layer):
            continue
        effect, cosine = m.effects.get(index), direction(layer)
        turned = None if effect is None else effect.turned
        hurts = (
            effect is not None
            and turned is not None
            and effect.loss.exceeds(HARM)
            and (-turned).exceeds(HARM)
        )
        said = f"the cosine of P with the identity is {cosine:.2f}"
        if effect is not None and turned is not None:
            said += f"; its writes change the loss by {effect.loss}, with the opposite sign by {turned}"
        numbers = {
            "cosine": cosine,
            "loss_change": effect and effect.loss.loss,
            "turned": turned and turned.loss,
        }
        severity: Severity = "severe" if hurts else "warning"
        found.append(Finding("writes-turned-round", severity, f"layer {index}: {said}", (index,), numbers))
    return found


def _small_conv(model: DiagnosedModel, m: Measurements) -> list[Finding]:
    """Returns a finding for writes that lack an effect but would have one with a usual conv."""
    found = []
    for index, writes in m.writes.items():
        conv = model.parameters().get((index, "conv"))
        size = 0.0 if conv is None else float(conv.detach().float().square().mean().sqrt())
        if (
            0 < size < _USUAL_CONV
            and 0 < writes.state_ratio < NO_EFFECT <= writes.state_ratio * _USUAL_CONV / size
        ):
            usual = writes.state_ratio * _USUAL_CONV / size
            message = (
                f"layer {index}: conv's entries are {size:.1e} (RMS), so a document moves the weight by "
                f"{writes.state_ratio:.1e} of its norm; with entries of {_USUAL_CONV} it would be "
                f"{usual:.1e}"
            )
            found.append(
                Finding(
                    "conv-too-small",
                    "warning",
                    message,
                    (index,),
                    {"conv": size, "state_ratio": writes.state_ratio},
                )
            )
    return found
