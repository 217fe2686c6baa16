"""Compares a training recipe with the paper's runs.

The trained parameters and the lengths of documents are measured, not taken from the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from ...audit.outcome import NotChecked, Outcome, judged
from ...errors import InPlaceTTTError
from ...layer.fast_linear import FastWeight
from ...surgery import fast_weights
from ..data.building import TrainingData
from ..loop import parameters
from ..loop.monitor import EtaWarmup
from ..recipe.recipe import Recipe
from .rows import read_rows

_NEAR = 0.2
"""Allowed relative difference from a token budget, since the paper states budgets as "about"."""
_GROUPS = ("conv", "proj", "gate", "matrices", "vectors")
_REACHED = 0.5
"""Least fraction of a rate or of η that a run must reach at some step.

Below it the run never uses the value that is set.
"""
_STILL = 0.02 * 2.0**-24
"""Half a unit in the last place of 0.02 in float32; P starts at about 0.02.

Adam's steps must add up to more, or the stored value does not change.
"""


@dataclass
class Run:
    """A recipe, its model, and its rows if they could be built.

    Attributes:
        why_no_data: the reason if `data` is None.
    """

    recipe: Recipe
    model: nn.Module
    data: TrainingData | None = None
    why_no_data: str = "the rows were not built"

    @property
    def from_scratch(self) -> bool:
        return self.recipe.model.path is None


def trained_parameters(run: Run, expected: Any) -> Outcome:
    """Counts the parameters that require a gradient."""
    counts = [(p.numel() or int(getattr(p, "ds_numel", 0)), p.requires_grad) for p in run.model.parameters()]
    total, trained = sum(n for n, _ in counts), sum(n for n, on in counts if on)
    generators = sum(p.numel() for layer in fast_weights(run.model).values() for p in layer.ttt.parameters())
    found = f"{trained / total:.2%} of the parameters ({run.recipe.training.trainable})"
    numbers = {"trained": trained, "of": total, "of them conv and P": generators}
    return judged(trained == total, "all parameters" if trained == total else found, numbers, 0)


def learning_rate(run: Run, expected: Any) -> Outcome:
    """Compares the recipe's rates with the paper's, and with the smallest change that float32 can store."""
    o, own = run.recipe.training, _declared_groups(run)
    continual, scratch = expected
    wanted = scratch if run.from_scratch else (continual,)
    rates = {"matrices": o.learning_rate, "conv": own["conv"][0], "P": own["proj"][0]}
    if o.gate_learning_rate is not None:
        rates["the gate"] = o.gate_learning_rate
    text = f"{o.learning_rate:g}" + "".join(f", {k} {r:g}" for k, r in rates.items() if r != o.learning_rate)
    paths = {kind: rate * run.recipe.steps for kind, rate in rates.items()}
    still = [kind for kind, path in paths.items() if path < _STILL]
    if still:
        kind, numbers = still[0], {**rates, "paths": paths}
        found = f"{rates[kind]:g} for {kind}: in {run.recipe.steps} steps an entry moves by {paths[kind]:.1g}"
        return judged(False, f"{found} at most, too little to change 0.02 in float32", numbers, _STILL)
    if not any(abs(o.learning_rate / w - 1) < 1e-6 for w in wanted):
        return judged(False, text, {**rates, "expected": list(wanted)}, 0)
    if len(set(rates.values())) > 1:
        return Outcome("extension", text + ": the target generator has rates of its own", rates, 0)
    return judged(True, text, rates, 0)


def training_loss(run: Run, expected: Any) -> Outcome:
    """Names soft targets beside the labels, which the paper does not have."""
    settings = run.recipe.training.distillation
    if settings is None:
        return judged(True, "cross-entropy of the next token", {}, 0)
    found = "compares with the model's own answers with full attention and without writes"
    numbers = {"weight": settings.weight, "temperature": settings.temperature}
    return Outcome("extension", f"{settings.weight:g} of it {found}", numbers, 0)


def weight_decay(run: Run, expected: Any) -> Outcome:
    """Compares the decay of matrices with the paper's; the decay of conv and P is a choice."""
    o = run.recipe.training
    numbers = {"matrices": o.weight_decay, "conv": o.conv_weight_decay, "P": o.proj_weight_decay}
    found = f"{o.weight_decay:g}; conv {o.conv_weight_decay:g}, P {o.proj_weight_decay:g}"
    return judged(o.weight_decay == expected, found, numbers, 0)


def schedule(run: Run, expected: Any) -> Outcome:
    """Checks the learning-rate factors, η's warm-up, and that a run reaches the values that are set."""
    o, steps = run.recipe.training, run.recipe.steps
    numbers: dict[str, Any] = {"warm-up steps": o.warmup_steps, "of": steps}
    numbers |= {"η warm-up steps": o.eta_warmup_steps, "end": o.min_lr_ratio}
    highest = {"η": min(1.0, steps / (o.eta_warmup_steps + 1))}
    for group in _GROUPS:
        factor = parameters.schedule(o, steps, group)
        values = [factor(step) for step in range(steps)]
        off = max(abs(value - _declared_factor(run, group, step)) for step, value in enumerate(values))
        if off > 1e-6:
            found = f"the rate of {group} differs from the {o.lr_scheduler} schedule by {off:.0%} of its peak"
            return judged(False, found, numbers, 1e-6)
        highest[group] = max(values)
    if wrong := _eta_warmup(run):
        return judged(False, wrong, numbers, 1e-6)
    low = min(highest, key=lambda group: highest[group])
    if highest[low] < _REACHED:
        found = f"in its {steps} steps {low} reaches {highest[low]:.2g} of its setting"
        return judged(False, found, {**numbers, "highest": highest}, _REACHED)
    text = f"{o.lr_scheduler} to {o.min_lr_ratio:g}, {o.warmup_steps} of {steps} steps of warm-up"
    text += f", η over {o.eta_warmup_steps}" if o.eta_warmup_steps else ""
    return Outcome("unspecified", text, numbers)


def _declared_factor(run: Run, group: str, step: int) -> float:
    """Returns the factor of a step: linear warm-up, then the recipe's decay."""
    o, warmup, kind = run.recipe.training, run.recipe.training.warmup_steps, run.recipe.training.lr_scheduler
    if group in ("conv", "proj", "gate") and o.ttt_warmup_steps is not None:
        warmup = o.ttt_warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, run.recipe.steps - warmup)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]
    low = 0.0 if kind == "constant" else o.min_lr_ratio
    return low + (1 - low) * left


def _eta_warmup(run: Run) -> str:
    """Returns a clause about a step at which η differs from its linear warm-up; "" if there is none."""
    warmup, layers = run.recipe.training.eta_warmup_steps, fast_weights(run.model)
    own = {index: layer.eta for index, layer in layers.items()}
    callback = EtaWarmup(warmup)
    try:
        for step in {0, warmup // 2, warmup, warmup + 1} if warmup else ():
            callback.on_step_begin(None, SimpleNamespace(global_step=step), None, model=run.model)
            for index, layer in layers.items():
                wanted = own[index] * min(1.0, (step + 1) / (warmup + 1))
                if abs(layer.eta - wanted) > 1e-6 * abs(own[index]):
                    found = f"layer {index} writes with η {layer.eta:g} instead of {wanted:g}"
                    return f"at step {step} of its warm-up {found}"
    finally:
        for index, layer in layers.items():
            layer.fast.eta = own[index]
    return ""


def optimizer(run: Run, expected: Any) -> Outcome:
    """Checks that AdamW has every trained parameter once, with the recipe's rate and decay."""
    o = run.recipe.training
    text = f"AdamW {tuple(o.betas)}, gradient clipping {o.max_grad_norm:g}"
    numbers = {"betas": o.betas, "epsilon": o.epsilon, "gradient clipping": o.max_grad_norm}
    if wrong := _wrongly_grouped(run):
        return judged(False, f"{wrong[0]}, one of {len(wrong)}", {**numbers, "parameters": wrong}, 0)
    return Outcome("unspecified", text, numbers)


def _declared_groups(run: Run) -> dict[str, tuple[float, float]]:
    """Returns the recipe's rate and decay of each kind of own parameter."""
    o = run.recipe.training
    proj = (o.proj_learning_rate or o.learning_rate, o.proj_weight_decay)
    conv = (o.conv_learning_rate or o.learning_rate, o.conv_weight_decay)
    return {"conv": conv, "proj": proj, "gate": (o.gate_learning_rate or proj[0], o.proj_weight_decay)}


def _wrongly_grouped(run: Run) -> list[str]:
    """Returns a clause for each parameter that is missing in the optimizer or has a wrong rate or decay."""
    o, model = run.recipe.training, run.model
    try:
        groups = parameters.parameter_groups(model, o)
    except InPlaceTTTError as error:
        return [str(error).rstrip(".")]
    known: dict[int, list[tuple[float, float]]] = {}
    for group in groups:
        for parameter in group["params"]:
            known.setdefault(id(parameter), []).append((group["lr"], group["weight_decay"]))
    own = {id(p): kind for layer in fast_weights(model).values() for kind, p in _generator(layer).items()}
    wanted, wrong = _declared_groups(run), []
    for name, parameter in model.named_parameters():
        kind = own.get(id(parameter), "")
        if kind or o.trainable == "all" or (o.trainable == "lora" and "lora_" in name):
            rest = (o.learning_rate, o.weight_decay if parameters.dimensions(parameter) > 1 else 0.0)
            found = known.get(id(parameter), [])
            if not parameter.requires_grad or not found:
                wrong.append(f"{name} is not optimized")
            elif found != [wanted.get(kind, rest)]:
                rates = ", ".join(f"{rate:g}, {decay:g}" for rate, decay in found)
                wrong.append(f"{name} has rate and decay {rates}")
    return wrong


def _generator(layer: FastWeight) -> dict[str, nn.Parameter]:
    return {
        name.rpartition(".")[2]: parameter
        for name, parameter in layer.ttt.named_parameters()
        if "original_module" not in name
    }


def token_budget(run: Run, expected: Any) -> Outcome:
    """Compares steps x rows per step x tokens per row with the paper's budget."""
    recipe = run.recipe
    length = recipe.data.sequence_length
    tokens = recipe.steps * recipe.rows_per_step * length
    budgets = expected.get(length, next(iter(expected.values())))
    if run.from_scratch:
        budgets += expected.get("scratch", ())
    wanted = min(budgets, key=lambda budget: abs(tokens / budget - 1))
    numbers = {"tokens": tokens, "expected": wanted}
    numbers |= {"steps": recipe.steps, "rows per step": recipe.rows_per_step}
    found = f"{_tokens(tokens)} tokens, {tokens / wanted:.2g} of {_tokens(wanted)}"
    return judged(abs(tokens / wanted - 1) <= _NEAR, found, numbers, _NEAR)


def stages(run: Run, expected: Any) -> Outcome:
    """Compares the length of the rows with the paper's stages."""
    length = run.recipe.data.sequence_length
    numbers = {"tokens per row": length, "expected": list(expected)}
    return judged(length in expected, f"{length:,} tokens per row", numbers, 0)


def yarn(run: Run, expected: Any) -> Outcome:
    """Compares the model's RoPE with the RoPE of this stage."""
    config = getattr(run.model, "config", None)
    text_config = config.get_text_config() if config is not None else None
    rope = dict(getattr(text_config, "rope_parameters", None) or {})
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    length = run.recipe.data.sequence_length
    wanted = expected is not None and length >= expected
    found = f"{kind}" + (f", factor {factor:g}" if factor else "") + f" at {length:,} tokens per row"
    numbers = {"rope_type": kind, "factor": factor, "yarn expected": wanted}
    return judged((kind == "yarn") == wanted, found, numbers, 0)


def long_documents(run: Run, expected: Any) -> Outcome:
    """Measures the share of the run's tokens in pieces of documents longer than a chunk."""
    if run.data is None:
        raise NotChecked(run.why_no_data)
    report = run.data.report
    share = report.long_share
    numbers = {"share of tokens": share, "tokens": report.tokens, "chunks per piece": report.chunks_per_piece}
    if share == 0:
        return judged(False, "no document is longer than a chunk: nothing can train conv and P", numbers, 0)
    return Outcome("unspecified", f"{share:.1%} of the tokens", numbers)


def data_rows(run: Run, expected: Any) -> Outcome:
    """Compares the first rows with their documents."""
    if run.data is None:
        raise NotChecked(run.why_no_data)
    return read_rows(run.recipe, run.data)


def _tokens(n: float) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{name}"
    return f"{n:.0f}"
