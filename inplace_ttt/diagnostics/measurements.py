"""Makes all measurements of a model on its rows, once, before any rule evaluates them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layer.fast_linear import FastWeight
from ..layer.forward_context import ForwardContext
from ..layout import ChunkLayout
from ..surgery import causal_lm, config_of
from ..tasks import IGNORED
from .diagnosed_model import DiagnosedModel, Key
from .first_step import FirstStep, loss_slope, try_first_step
from .gradient_paths import Ways, gradient_ways
from .gradients import Gradients, Rates, first_step, gradients, norm_of
from .keys import KeyHealth, keys_of_all_layers
from .observing import observing
from .overrides import with_values
from .precision import states_in_reading, states_in_training
from .sweeps import Sweep, sweep_eta, sweep_init
from .targets import TargetHealth, observing_targets
from .write_effects import Change, Effect, Scored, effects, read, read_off
from .writes import Writes, longest_document, writes_by_chunk


@dataclass(frozen=True)
class Measurements:
    """All measurements, by layer index or by parameter.

    Attributes:
        layout: chunks of the rows.
        etas: η by layer.
        sizes: Frobenius norm of each diagnosed parameter.
        trained: requires_grad of each diagnosed parameter.
        gradients: gradients of one backward pass.
        after_step: gradients after Adam's first step, if conv starts at zero; else None.
        stepped: losses after that step; None if no diagnosed parameter is trained.
        slopes: slope of the loss with ‖P‖; None if no layer has nonzero conv and P.
        ways: gradient on each path through a layer.
        prompt_writers: layers with `prompt_write`, which write a prompt once, at its end.
        targets: sources and targets of a layer.
        writes: writes over the longest document.
        all_writes: loss with all writes minus loss without; None if no token reads a write.
        effects: effect of each layer's writes on the predictions.
        keys: keys of every decoder layer, converted or not.
        states: dtypes in which each layer's state is kept.
        sweeps: losses over η and over conv's initial size.
        loss_off: mean loss in eval mode with the writes off, in nats per token.
        chance: ln of the vocabulary size, the loss of a uniform guess. If a model's loss is higher, a change
            of the loss does not show that writes help.
    """

    layout: ChunkLayout
    etas: dict[int, float]
    sizes: dict[Key, float]
    trained: dict[Key, bool]
    gradients: Gradients
    after_step: Gradients | None
    stepped: FirstStep | None
    slopes: Slopes | None
    ways: dict[int, Ways]
    prompt_writers: frozenset[int]
    targets: dict[int, TargetHealth]
    writes: dict[int, Writes]
    all_writes: Change | None
    effects: dict[int, Effect]
    keys: dict[int, KeyHealth]
    states: dict[int, set[torch.dtype]]
    sweeps: tuple[Sweep, ...]
    loss_off: float
    chance: float


def measure(model: DiagnosedModel, rates: Rates, tick: Callable[[str], None]) -> Measurements:
    """Makes every measurement that does not depend on a finding.

    Args:
        model: the model and its rows.
        rates: learning rates of Adam's first step.
        tick: called with a title before each pass.
    """
    tick("gradients")
    baseline = gradients(model, rates, keep=("conv", "proj", "weight", "embeddings"))
    tick("the loss after Adam's first step")
    stepped = try_first_step(model, baseline.kept, rates)
    slopes = _slopes(model, baseline)
    tick("paths of the gradient")
    ways = gradient_ways(model) if math.isfinite(baseline.loss) else {}
    baseline = dataclasses.replace(
        baseline, kept={key: g for key, g in baseline.kept.items() if _is_asked_for(key, model)}
    )
    after_step = None
    if moved := first_step(model, baseline, rates):
        tick("gradients after Adam's first step")
        with with_values(moved):
            after_step = gradients(model, rates)
    writes: dict[int, Writes] = {}
    keys: dict[int, KeyHealth] = {}
    targets: dict[int, TargetHealth] = {}

    def observe(
        layer: FastWeight, z: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
    ) -> None:
        writes[layer.fast.layer] = writes_by_chunk(layer, z, v, gate, context)

    scored = Scored.of(model, baseline.layout)
    reads = bool(scored.mask.any())
    tick("writes")
    with observing(model.module, observe), observing_targets(model.module, targets):
        on = read(model, keep_logits=True)
    tick("keys")
    off = read_off(model, keys_of_all_layers(model.module, _real_tokens(baseline.layout, model), keys))
    writing = any(w.effective_rank > 0 for w in writes.values())
    by_layer = effects(model, scored, on, tick) if reads and writing else {}
    sweeps: list[Sweep] = []
    if reads:
        if writing:
            sweeps.append(
                sweep_eta(model, scored, (on, max(w.state_ratio for w in writes.values())), off, tick)
            )
        if config_of(model.module).starts_as_base:
            sweeps.append(sweep_init(model, scored, off, tick))
    return Measurements(
        layout=baseline.layout,
        etas={index: layer.eta for index, layer in model.layers.items()},
        sizes={key: float(norm_of(p.detach())) for key, p in model.parameters().items()},
        trained={key: p.requires_grad for key, p in model.parameters().items()},
        gradients=baseline,
        after_step=after_step,
        stepped=stepped,
        slopes=slopes,
        ways=ways,
        prompt_writers=frozenset(
            i for i, layer in model.layers.items() if layer.fast.config.prompt_write is not None
        ),
        targets=targets,
        writes=writes,
        all_writes=scored.change(on, off) if reads and writing else None,
        effects=by_layer,
        keys=keys,
        states=_states(model, baseline.layout),
        sweeps=tuple(sweeps),
        chance=math.log(causal_lm(model.module).config.get_text_config().vocab_size),
        loss_off=float(off.losses[model.next_tokens != IGNORED].mean()),
    )


@dataclass(frozen=True)
class Slopes:
    """Slope dL/d ln ‖P‖ of the layers whose conv and P are not zero, measured in two ways.

    Attributes:
        layers: these layers.
        autograd: slope from the gradient of P.
        differences: slope from losses at two values of ‖P‖.
        error: bound on the error of `differences`.
    """

    layers: tuple[int, ...]
    autograd: float
    differences: float
    error: float


def _slopes(model: DiagnosedModel, baseline: Gradients) -> Slopes | None:
    """Measures the slopes. Differences with steps of 0.1 and 0.2 determine the error."""
    known = model.parameters()
    layers = [i for i in model.layers if (i, "proj") in known and bool(known[i, "proj"].any())]
    layers = [i for i in layers if (i, "conv") not in known or bool(known[i, "conv"].any())]
    if not layers or not math.isfinite(baseline.loss):
        return None
    reached = [i for i in layers if (i, "proj") in baseline.kept]
    autograd = sum(
        float((baseline.kept[i, "proj"].double() * known[i, "proj"].detach().double()).sum()) for i in reached
    )
    short, long = (loss_slope(model, layers, step) for step in (0.1, 0.2))
    return Slopes(tuple(layers), autograd, short, abs(short - long))


def _is_asked_for(key: Key, model: DiagnosedModel) -> bool:
    """Returns True if a later step reads this parameter's gradient."""
    return key[1] == "conv" or (key[1] == "embeddings" and config_of(model.module).detach_target)


def _real_tokens(layout: ChunkLayout, model: DiagnosedModel) -> Tensor | None:
    """Returns bool [B, T], True for tokens of documents; None if all tokens belong to documents."""
    real = layout.chunk_ids(model.inputs["input_ids"].device) >= 0
    return None if bool(real.all()) else real


def _states(model: DiagnosedModel, layout: ChunkLayout) -> dict[int, set[torch.dtype]]:
    """Returns every dtype in which a layer's state is kept, in the op and in a session.

    The session reads one chunk and one token.
    """
    found = {index: {dtype} for index, dtype in states_in_training(model.layers).items()}
    row, (start, stop) = longest_document(layout)
    if stop - start > layout.chunk_size:
        with model.mode(training=False):
            ids = model.inputs["input_ids"][row : row + 1, start : start + layout.chunk_size + 1]
            for index, dtype in states_in_reading(model.module, ids).items():
                found[index].add(dtype)
    return found
