"""The audit of one third-party layer, and the audit of a converted model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import InPlaceTTTError, one_line
from ..families import features
from ..layer.overrides import seeded
from ..surgery import config_of, fast_weights
from .adapters import AuditedModule
from .borrowing import borrowed, refuse_unreachable
from .catalog import METHOD
from .item import Item, Probe
from .outcome import NotChecked, Outcome
from .probes import loss_gradient
from .probes.bench import Bench
from .report import Declaration, Report
from .verdicts import Auditor, Progress
from .whole_model import WholeModel


def audit_module(
    module: AuditedModule,
    *,
    profile: str = "paper",
    declared: Sequence[Declaration] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Compares one third-party TTT layer with the paper, by running it through its adapter.

    Each item of the report names its section of the paper (§3.1, §3.2, §3.4, Algorithm 1, appendix C).

    Args:
        module: the adapter of the layer.
        profile: "paper", "reference" or "ttt_ntp", the method to compare with.
        declared: known deviations, each with its reason.
        seed: seed of the probes' random inputs.
        progress: called before each item with the items done, all items, and the item's title.

    Returns:
        The report, with one result per item of `METHOD`.

    Raises:
        InPlaceTTTError: if the module itself raises an error; the message names the item. Also if the profile
            does not exist, or a declaration names an unknown item or lacks its reason.

    Examples:
        >>> import torch
        >>> from inplace_ttt.audit import AuditedModule, audit_module
        >>> class Frozen(AuditedModule):
        ...     name, input_size, d, h, chunk_size, eta = "a plain linear map", 48, 16, 48, 12, 1.0
        ...     fast_weight, proj = torch.randn(16, 48).double(), torch.eye(16).double()
        ...     conv = torch.ones(16, 1, 1).double()
        ...     def keys(self, x):
        ...         return x
        ...     def forward(self, x, target, *, documents=None, padding=None):
        ...         return x @ self.fast_weight.mT
        >>> report = audit_module(Frozen())
        >>> report["writes"].verdict, report["writes"].item.paper_ref
        ('deviates', '§3.1')
    """
    auditor = Auditor(module.name, profile, declared, METHOD, progress)
    bench = _bench(module, seed)
    for item in METHOD:
        auditor.decide(item, _on_layer(item), bench)
    size, chunk = f"{module.d} x {module.h}", f"{module.chunk_size} tokens"
    return auditor.report({"module": module.name, "fast weight": size, "chunk": chunk})


def audit_model(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    profile: str = "paper",
    declared: Sequence[Declaration] = (),
    seed: int = 0,
    progress: Progress | None = None,
    extra: Sequence[tuple[Item, Any]] = (),
) -> Report:
    """Compares a converted model with the paper, by running it, and restores it.

    Each item of the report names its section of the paper (§3.1, §3.2, §3.4, §4.3, Algorithm 1, appendix C).
    Afterwards the weights, modes, settings and random generators have the same bits as before.

    Args:
        model: a converted model.
        tokenizer: encodes a real text for the probes. If None, they read random token ids.
        profile: "paper", "reference" or "ttt_ntp", the method to compare with.
        declared: known deviations, each with its reason.
        seed: seed of the probes' random inputs.
        progress: called before each item with the items done, all items, and the item's title.
        extra: further items, such as those of a recipe, each with the object that its probe measures.

    Returns:
        The report, with one result per item of `METHOD` and `extra`.

    Raises:
        InPlaceTTTError: if the model is not converted or not calibrated, or its weights are not in this
            process. Also if the profile does not exist, or a declaration names an unknown item or lacks its
            reason.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.audit import Declaration, audit_model
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> report = audit_model(model, declared=[Declaration("chunk-size", "short texts")])
        >>> report.undeclared
        []
    """
    with seeded(model, seed):  # dropout in training mode draws random numbers
        return _audit_model(WholeModel(model, tokenizer, seed), profile, declared, progress, extra)


def _audit_model(
    whole: WholeModel,
    profile: str,
    declared: Sequence[Declaration],
    progress: Progress | None,
    extra: Sequence[tuple[Item, Any]],
) -> Report:
    model, seed = whole.model, whole.seed
    lm, config = whole.lm, config_of(whole.lm)
    refuse_unreachable(lm)
    for layer in fast_weights(lm).values():
        layer.ttt.check_measured()
    name, items = lm.config.name_or_path or type(lm).__name__, (*METHOD, *(item for item, _ in extra))
    auditor = Auditor(name, profile, declared, items, progress)
    first, layer = next(iter(fast_weights(lm).items()))
    on_layer = [item for item in METHOD if item.on_model is None]
    if config.target == "gradient":
        for item in METHOD:
            auditor.decide(item, loss_gradient.probe_of(item), whole)
    elif whole.undrivable:
        for item in on_layer:
            auditor.decide(item, item.by_settings or loss_gradient.not_checked, whole)
    else:
        with borrowed(model, first) as module:
            bench = _bench(module, seed)
            for item in on_layer:
                auditor.decide(item, _on_layer(item), bench)
    for item in METHOD:
        if item.id not in auditor.results and item.on_model is not None:
            auditor.decide(item, item.on_model, whole)
    for item, measured in extra:
        assert item.probe is not None
        auditor.decide(item, item.probe, measured)
    h, d = features(layer)
    conv = f"{config.conv} convolution of {config.kernel_size}"
    settings = [
        f"chunks of {config.chunk_size} tokens, η {config.eta}, target {config.target}",
        "the next token's source" if config.conv == "next" else conv,
        "no clip" if config.clip is None else f"clip {config.clip.max_norm:g}",
    ]
    probed = f"layer {first} (float64, seed {seed})"
    return auditor.report(
        {
            "model": f"{type(lm).__name__}, {whole.depth} layers, {str(lm.dtype).removeprefix('torch.')}",
            "TTT layers": ", ".join(map(str, config.layers)),
            "fast weight": f"{d} x {h}",
            "settings": ", ".join(settings),
            "closely probed": f"no layer: {whole.undrivable}" if whole.undrivable else probed,
        }
    )


def _bench(module: AuditedModule, seed: int) -> Bench:
    """Returns the bench of a module after one plain forward of random inputs.

    Raises:
        InPlaceTTTError: if that forward raises, or its outputs have a wrong shape or are not finite.
    """
    tokens = 2 * module.chunk_size + 1
    generator = torch.Generator().manual_seed(seed)
    x = module.inputs(min(tokens, module.h), generator)
    try:
        with torch.no_grad(), module.guarded():
            out = module.forward(x[None], torch.zeros(1, len(x), module.d, dtype=torch.float64))
    except InPlaceTTTError:
        raise
    except Exception as error:
        raise InPlaceTTTError(
            f"{module.name} raises {type(error).__name__} on {len(x)} random tokens: "
            f"{one_line(error, kind=False)}; "
            "the audit needs it to run on such input."
        ) from error
    if tuple(out.shape) != (1, len(x), module.d) or not bool(out.isfinite().all()):
        raise InPlaceTTTError(
            f"{module.name} returns {list(out.shape)} for {len(x)} tokens of width {module.d}"
            f"{'' if bool(out.isfinite().all()) else ', not all finite'}; an audited module must return [1, "
            "T, d]."
        )
    return Bench(module, seed)


def _on_layer(item: Item) -> Probe:
    """Returns the item's probe of one layer.

    The module's clip is off, except for items about the clip. Items that are not `silent` are not checked if
    the module writes nothing.
    """

    def probe(bench: Bench, expected: Any) -> Outcome:
        if item.probe is None:
            raise NotChecked("only a whole converted model can show it")
        with nullcontext() if item.own_clip else bench.module.unclipped():
            if not (item.own_clip or item.silent):
                bench.unit  # noqa: B018 - raises NotChecked if nothing is written
            return item.probe(bench, expected)

    return probe


def as_declarations(values: Iterable[Any], where: str) -> tuple[Declaration, ...]:
    """Returns the declarations in a checkpoint's or recipe's list of plain values.

    Args:
        values: mappings with `id` and `why`, or objects with these attributes.
        where: the name of the list, for the message.

    Raises:
        InPlaceTTTError: if a value has another form.
    """
    found = []
    for value in values:
        if isinstance(value, Mapping) and set(value) == {"id", "why"}:
            found.append(Declaration(str(value["id"]), str(value["why"])))
        elif hasattr(value, "id") and hasattr(value, "why"):
            found.append(Declaration(value.id, value.why))
        else:
            raise InPlaceTTTError(f"{where} declares {value!r}; a declared deviation is {{id, why}}.")
    return tuple(found)
