"""The audits: of a foreign module, of a converted model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import InPlaceTTTError, one_line
from ..families import features
from ..surgery import config_of, fast_weights
from .adapters import AuditedModule
from .bench import Bench
from .catalogue import Item, Profile, catalogue, known
from .catalogue_method import METHOD
from .converted import borrowed, refuse_unreachable
from .findings import Finding, NotChecked
from .probes_model import Subject
from .report import Declaration, Report, Result

Progress = Callable[[int, int, str], None]
"""Called before each item: how many are done, of how many, and the item's title."""

_WITHOUT_WRITES = ("writes", "slow-weights", "state-place")
_NEEDS_MODEL = "it takes a whole converted model to see"


def audit_module(
    module: AuditedModule,
    *,
    profile: str = "paper",
    declared: Sequence[Declaration] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Audit one TTT layer of anybody's through its adapter.

    Raises InPlaceTTTError, naming the item, when the module itself raises.
    """
    auditor = _Auditor(known(profile), declared, progress, len(METHOD))
    bench = _bench(module, seed)
    results = [auditor.result(item, partial(_on_module, item, bench, auditor.profile), module.name) for item in METHOD]
    facts = {"module": module.name, "fast weight": f"{module.d} x {module.h}", "chunk": f"{module.chunk_size} tokens"}
    return auditor.report(module.name, results, facts)


def audit_model(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    profile: str = "paper",
    declared: Sequence[Declaration] = (),
    seed: int = 0,
    progress: Progress | None = None,
    extra: Sequence[tuple[Item, Callable[[Profile], Finding]]] = (),
) -> Report:
    """Audit a converted model in memory. Its weights, modes and settings are the same bits afterwards.

    tokenizer: to read real text; random ids without one. declared: deviations that are known and stood by.
    seed: of the probes' inputs. extra: further items and what decides them, as a recipe's.
    Raises InPlaceTTTError for a model that is not converted, or whose weights are not in this process.
    """
    subject = Subject(model, tokenizer, seed)
    config = config_of(subject.lm)
    refuse_unreachable(subject.lm)
    auditor = _Auditor(known(profile), declared, progress, len(METHOD) + len(extra))
    name = subject.lm.config.name_or_path or type(subject.lm).__name__
    first = next(iter(fast_weights(subject.lm)))
    results = []
    with borrowed(model, first) as module:
        bench = _bench(module, seed)
        for item in METHOD:
            if item.on_model is None:
                results.append(auditor.result(item, partial(_on_module, item, bench, auditor.profile), name))
    for item in METHOD:
        if item.on_model is not None:
            results.append(auditor.result(item, partial(_call, item.on_model, subject, item, auditor.profile), name))
    results.extend(auditor.result(item, partial(decide, auditor.profile), name) for item, decide in extra)
    d_h = features(fast_weights(subject.lm)[first])
    facts = {
        "model": f"{type(subject.lm).__name__}, {subject.depth} layers, {str(subject.lm.dtype).removeprefix('torch.')}",
        "TTT layers": ", ".join(map(str, config.layers)),
        "fast weight": f"{d_h[1]} x {d_h[0]}",
        "settings": f"chunks of {config.chunk_size} tokens, η {config.eta}, target {config.target}, {config.conv} convolution of "
        f"{config.kernel_size}, {'no clip' if config.clip is None else f'clip {config.clip.tau:g}'}",
        "closely probed": f"layer {first} (float64, seed {seed}); the other TTT layers against it",
    }
    order = {item.id: place for place, item in enumerate([*METHOD, *(item for item, _ in extra)])}
    return auditor.report(name, sorted(results, key=lambda r: order[r.item.id]), facts)


class _Auditor:
    """What the items of one audit share."""

    def __init__(self, profile: Profile, declared: Sequence[Declaration], progress: Progress | None, total: int) -> None:
        self.profile, self.declared, self.progress, self.total = profile, tuple(declared), progress, total
        self.done = 0
        self.whys = {declaration.id: declaration.why for declaration in declared}
        if unknown := sorted(set(self.whys) - set(catalogue())):
            raise InPlaceTTTError(
                f"a deviation {unknown[0]!r} is declared, which is no item of the audit; see docs/audit.md for their ids."
            )
        if empty := [id for id, why in self.whys.items() if not str(why).strip()]:
            raise InPlaceTTTError(f"the declared deviation {empty[0]!r} says no reason; give `why` one.")

    def result(self, item: Item, decide: Callable[[], Finding], where: str) -> Result:
        """Decide one item; what the module has against it becomes one sentence."""
        if self.progress is not None:
            self.progress(self.done, self.total, item.title)
        self.done += 1
        try:
            finding = decide()
        except NotChecked as reason:
            finding = Finding("not checked", str(reason))
        except InPlaceTTTError as error:
            raise InPlaceTTTError(f"{where} refuses while the audit measures {item.id!r}: {error}") from error
        except Exception as error:
            raise InPlaceTTTError(
                f"{where} raises {type(error).__name__} while the audit measures {item.id!r}: {one_line(error)}; "
                "see to it that it runs on short random sequences."
            ) from error
        if self.profile == "official" and item.absent:
            finding = _against_absence(finding)
        declared = self.whys.get(item.id) if finding.verdict == "deviates" else None
        return Result(item, finding, item.expects(self.profile), declared)

    def report(self, subject: str, results: Sequence[Result], facts: Mapping[str, str]) -> Report:
        return Report(subject, self.profile, list(results), self.declared, dict(facts))


def _against_absence(finding: Finding) -> Finding:
    """A finding on what the public code does not have: having it goes beyond that code."""
    verdict = {"conforms": "extension", "deviates": "conforms", "unspecified": "conforms"}.get(finding.verdict, finding.verdict)
    return Finding(verdict, finding.found, finding.numbers, finding.tolerance, finding.chart)  # type: ignore[arg-type]


def _bench(module: AuditedModule, seed: int) -> Bench:
    """The bench, with one plain forward before it: a module that does not run is refused here."""
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
            f"{module.name} raises {type(error).__name__} on {len(x)} random tokens: {one_line(error)}; the audit needs it to run."
        ) from error
    if tuple(out.shape) != (1, len(x), module.d) or not bool(out.isfinite().all()):
        raise InPlaceTTTError(
            f"{module.name} gives {list(out.shape)} for {len(x)} tokens of width {module.d}"
            f"{'' if bool(out.isfinite().all()) else ', not all finite'}; an audited module must give [1, T, d]."
        )
    return Bench(module, seed)


def _on_module(item: Item, bench: Bench, profile: Profile) -> Finding:
    """Decide an item on one layer: without the module's clip, unless the item is about it."""
    if item.probe is None:
        raise NotChecked(_NEEDS_MODEL)
    if item.probe.startswith("probes_clip"):
        return _call(item.probe, bench, item, profile)
    with bench.module.unclipped():
        if item.id not in _WITHOUT_WRITES:
            bench.unit  # noqa: B018 - without a write there is nothing to measure
        return _call(item.probe, bench, item, profile)


def decide(item: Item, subject: Any, profile: Profile) -> Finding:
    """Decide an item by its `probe`."""
    return _call(item.probe, subject, item, profile)


def _call(probe: str | None, subject: Any, item: Item, profile: Profile) -> Finding:
    assert probe is not None
    module, _, name = probe.partition(".")
    function = getattr(importlib.import_module(f".{module}", __package__), name)
    return function(subject, item.expected.get(profile))


def as_declarations(values: Iterable[Any], where: str) -> tuple[Declaration, ...]:
    """Declarations from the plain values of a checkpoint's or recipe's list."""
    found = []
    for value in values:
        if isinstance(value, Mapping) and set(value) == {"id", "why"}:
            found.append(Declaration(str(value["id"]), str(value["why"])))
        elif hasattr(value, "id") and hasattr(value, "why"):
            found.append(Declaration(value.id, value.why))
        else:
            raise InPlaceTTTError(f"{where} declares {value!r}; a declared deviation is {{id, why}}.")
    return tuple(found)
