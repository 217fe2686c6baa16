"""Probes of the state, its precision and place, and of the gradient through the scan."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..adapters import AuditedModule
from ..outcome import NotChecked, Outcome, judged, within
from .bench import Bench, error

_WRITES = 64
_SMALL = 3e-4
_LOST = 1e-3
_ARRIVED = 0.1
"""Tolerance on the fraction of small writes that arrives in half precision. Rounding alone is smaller."""
_GRADIENT = 0.05
_DIRECTIONS = 3


def state_precision(bench: Bench, expected: Any) -> Outcome:
    """Measures the share that arrives of many equal writes, each of 0.03 % of ‖W0‖, in float32 arithmetic.

    A state or a running weight in half precision fails this test. Under least squares, scattered keys must
    also read the right values. A G in half precision fails this test.

    A layer that is used in half precision is also measured in that precision.
    """
    bench.refuse_unlawful()
    with bench.module.single_precision() as module, module.unclipped():
        single = _again(bench, module)
        share, dtype = _arrived(single), _state_dtype(single)
        losses = {f"lost of {_WRITES} writes of {_SMALL} ‖W0‖": abs(share - 1)}
        if module.ridge is not None:
            losses["lost of the least-squares map"] = single.law_error
    worst = max(1.0 if math.isnan(loss) else loss for loss in losses.values())
    numbers: dict[str, Any] = {**losses, "state": dtype}
    with suppress(NotChecked), bench.module.deployed() as module, module.unclipped():
        own = module.fast_weight.dtype
        if torch.finfo(own).bits <= 16 and module.ridge is None:
            name = f"of {_WRITES} writes of {_SMALL} ‖W0‖ arrive in {str(own).removeprefix('torch.')}"
            numbers[name] = share = _arrived(_again(bench, module))
            if not abs(share - 1) < _ARRIVED:
                return judged(False, f"{share:.0%} {name}", numbers, _ARRIVED)
    kept = f"a {dtype} state" if dtype else "the state"
    if worst >= _LOST:
        return judged(False, f"{kept} loses {worst:.1%} of an update", numbers, _LOST)
    return Outcome("unspecified", f"{kept} loses {worst:.0e} of an update", numbers, _LOST)


def _again(bench: Bench, module: AuditedModule) -> Bench:
    """Returns a bench with the same inputs for the module in another precision."""
    other = Bench(module, 0)
    other.bank, other.scale, other.chunk = bench.bank, bench.scale, bench.chunk
    return other


def _arrived(bench: Bench) -> float:
    """Returns the share that is read of many equal writes, each small compared with W0."""
    chunk = bench.chunk
    x, one = bench.tiled((_WRITES + 1) * chunk), bench.middle(2 * chunk, 0)
    large = bench.response(bench.tiled(2 * chunk), one)[chunk:]
    delta = torch.linalg.lstsq(bench.keys_of(bench.tiled(chunk)), large).solution
    size = float(torch.linalg.vector_norm(delta))
    factor = 1.0
    with suppress(NotChecked):  # without W0, no write is small
        w0 = float(torch.linalg.vector_norm(bench.module.fast_weight.detach().double()))
        factor = _SMALL * w0 / size or factor
    target = factor * bench.middle(len(x), *range(0, _WRITES * chunk, chunk))
    read = bench.response(x, target)[-chunk:] / (_WRITES * factor * bench.diluted(_WRITES))
    return float((read * large).sum() / (large * large).sum())


def _state_dtype(bench: Bench) -> str | None:
    """Returns the dtype of a stream's state, or None if it cannot be read."""
    try:
        stream = bench.module.stream()
    except NotChecked:
        return None
    with torch.no_grad(), bench.module.guarded():
        stream(bench.tiled(bench.chunk)[None], bench.middle(bench.chunk, 0)[None])
    state = getattr(stream, "state", None)
    return str(state.dtype).removeprefix("torch.") if isinstance(state, Tensor) else None


def state_place(bench: Bench, expected: Any) -> Outcome:
    """Compares W0 and every buffer before and after reading three chunks."""
    return _unchanged(bench, True, "the state is in no parameter and no buffer")


def slow_weights(bench: Bench, expected: Any) -> Outcome:
    """Compares every parameter except W0 before and after reading three chunks."""
    return _unchanged(bench, False, "reading changes no slow weight")


def _unchanged(bench: Bench, fast: bool, good: str) -> Outcome:
    changed = [name for name in _changed(bench) if bench.module.is_fast(name) == fast]
    found = f"reading changes {', '.join(changed)}" if changed else good
    return judged(not changed, found, {"changed": changed}, 0)


def _changed(bench: Bench) -> list[str]:
    """Returns names of tensors that a forward in evaluation mode changes, in one call or streamed."""
    module = bench.module
    x, target = bench.tiled(3 * bench.chunk), bench.middle(3 * bench.chunk, 0, bench.chunk)
    before = {name: tensor.detach().clone() for name, tensor in module.tensors().items()}
    with torch.no_grad(), module.guarded():
        module.forward(x[None], target[None])
        after = {name: tensor.detach().clone() for name, tensor in module.tensors().items()}
        changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
        try:
            stream = module.stream()
        except NotChecked:
            return changed
        stream(x[None], target[None])
        tensors = getattr(stream, "tensors", module.tensors)()
        return changed + [
            name
            for name, t in tensors.items()
            if name not in changed and not torch.equal(t.detach(), before[name])
        ]


def gradient(bench: Bench, expected: Any) -> Outcome:
    """Compares derivatives by autograd with differences of the module's own outputs, along random directions.

    Only the third chunk's outputs count, so the whole derivative comes through the sum of deltas.
    """
    errors = _gradient_errors(bench)
    del errors["targets"]
    bad = "the gradient by {name} misses {off:.0%} of the outputs' change"
    return within(errors, "the gradient is that of the whole scan", bad, _GRADIENT)


def target_gradient(bench: Bench, expected: Any) -> Outcome:
    """Measures the gradient that reaches the targets' source from later reads.

    The paper does not mention this gradient, so either result is a choice.
    """
    errors = _gradient_errors(bench)
    numbers = {"error of the derivative by targets": errors.pop("targets")}
    flows, meant = max(numbers.values()) < _GRADIENT, bench.module.detaches_target
    found = "the target is detached from its source"
    if flows:
        found = "the gradient flows through the target into its source"
    # If other gradients are wrong too, `gradient` reports them.
    if meant is not None and flows == meant and max(errors.values()) < _GRADIENT:
        return judged(False, f"{found}, which contradicts its settings", numbers, _GRADIENT)
    return Outcome("unspecified", found, numbers, _GRADIENT)


def _gradient_errors(bench: Bench) -> dict[str, float]:
    """Returns ‖autograd - differences‖ / ‖differences‖ over some directions, by tensor.

    The tensors are conv, P, the keys and the targets.
    """
    module, chunk = bench.module, bench.chunk
    x, target = bench.tiled(3 * chunk), bench.scale * bench.units(3 * chunk)
    weights = bench.random(chunk, module.d)

    def value() -> Tensor:
        out = module.forward(x[None], target[None])[0, 2 * chunk :]
        return (out * weights.to(out)).sum()

    leaves = {"conv": module.conv, "keys": x, "targets": target} | (
        {} if module.proj is None else {"P": module.proj}
    )
    flags = [(tensor, tensor.requires_grad) for tensor in leaves.values()]
    errors = {}
    try:
        for tensor, _ in flags:
            tensor.requires_grad_(True)
        with torch.enable_grad(), bench.mode(True), module.guarded():
            grads = torch.autograd.grad(value(), list(leaves.values()), allow_unused=True)
            for (name, tensor), grad in zip(leaves.items(), grads, strict=True):
                pairs = []
                for _ in range(_DIRECTIONS):
                    direction = bench.random(*tensor.shape) * float(tensor.detach().double().std() + 0.1)
                    if name == "keys":
                        # the reads of the last chunk are not part of the scan
                        direction[2 * chunk :] = 0
                    by_autograd = 0.0 if grad is None else float((grad.double().cpu() * direction).sum())
                    pairs.append((by_autograd, *_differences(value, tensor, direction)))
                a, short, twice, long = torch.tensor(pairs, dtype=torch.float64).T
                errors[name] = min(error(a, b) for b in (short, long))
                if errors[name] >= _GRADIENT <= error(short, twice):
                    raise NotChecked(
                        f"outputs move in steps with {name}, too coarse to take differences of; see "
                        "`state-precision`"
                    )
    finally:
        for tensor, flag in flags:
            tensor.requires_grad_(flag)
    return errors


@torch.no_grad()
def _differences(
    value: Callable[[], Tensor], tensor: Tensor, direction: Tensor
) -> tuple[float, float, float]:
    """Returns derivatives of `value` along `direction`, from short steps, steps twice as long, and long
    steps.

    The long steps are exact for polynomials up to the fourth degree, and rounding is negligible in them.
    """
    before = tensor.detach().clone()

    def at(step: float) -> float:
        tensor.copy_(before + step * direction.to(tensor))
        return float(value())

    short, twice, near, far = (at(step) - at(-step) for step in (1e-4, 2e-4, 0.5, 1.0))
    tensor.copy_(before)
    return short / 2e-4, twice / 4e-4, (8 * near - far) / 6
