"""What must hold at the first step, and the warnings that go into the report."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ...diagnostics.precision import states_in_training
from ...diagnostics.writes import WriteHealth
from ...errors import InPlaceTTTError, NotSoError
from ...files.text import begins_of
from ...surgery import fast_weights

logger = logging.getLogger(__name__)

_WRITE_RATIO, _GRAD_NORM, _FIRST_ROWS = 1.0, 100.0, 8
MOST_SKIPPED = 3
"""Steps in a row that DeepSpeed may skip before the run stops."""


class GradientTap:
    """The norm of the last gradient that reached conv, P and W0 of each TTT layer on this rank, before any
    averaging."""

    def __init__(self, model: nn.Module) -> None:
        self.norms: dict[int, dict[str, Tensor]] = {}
        self.handles: list[RemovableHandle] = []
        self._tapped: list[tuple[dict[str, Tensor], str, nn.Parameter]] = []
        for index, layer in fast_weights(model).items():
            norms = self.norms.setdefault(index, {})
            named = [(name.rpartition(".")[2], p) for name, p in layer.ttt.named_parameters()]
            for name, parameter in [*named, ("weight", getattr(layer, "weight", None))]:
                if parameter is not None and parameter.requires_grad:
                    self.handles.append(parameter.register_hook(_keeper(norms, name)))
                    self._tapped.append((norms, name, parameter))
        self._past_hooks: set[int] | None = None

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def look(self) -> None:
        """Before a step: what a sharding framework put into `.grad` past the hooks, as FSDP2 does; of its
        shard on this rank."""
        if self._past_hooks is None:
            self._past_hooks = {i for i, (norms, name, _) in enumerate(self._tapped) if name not in norms}
        for i in self._past_hooks:
            norms, name, parameter = self._tapped[i]
            if parameter.grad is not None:
                gradient = parameter.grad
                _keeper(norms, name)(gradient.to_local() if hasattr(gradient, "to_local") else gradient)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it a backward that is not the run's leaves the norms as they are."""
        before = {index: dict(norms) for index, norms in self.norms.items()}
        try:
            yield
        finally:
            for index, norms in before.items():
                self.norms[index].clear()
                self.norms[index].update(norms)

    def read(self) -> dict[int, dict[str, float]]:
        return {
            index: {name: float(norm) for name, norm in norms.items()} for index, norms in self.norms.items()
        }


def _keeper(norms: dict[str, Tensor], name: str) -> Any:
    def keep(gradient: Tensor) -> None:
        norms[name] = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)

    return keep


class FirstStep(TrainerCallback):
    """After the first optimiser step: every TTT parameter is in the optimiser and got a gradient; states are
    float32."""

    def __init__(self, gradients: GradientTap, warnings: list[str]) -> None:
        self.gradients, self.warnings = gradients, warnings

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.gradients is None or state.global_step == 0:
            return
        gradients, self.gradients = self.gradients, None  # type: ignore[assignment]
        model = kwargs["model"]
        check_state_precision(model)
        for index, norms in gradients.read().items():
            layer = fast_weights(model)[index]
            eta, names = (
                layer.fast.eta,
                [name for name in ("conv", "proj") if getattr(layer.ttt, name) is not None],
            )
            for name in names:
                if name not in norms:
                    raise InPlaceTTTError(
                        f"layer {index}'s {name} got no gradient at all: it is frozen, or the loss does "
                        "not reach it."
                    )
            if names and not any(norms[name] for name in names) and eta > 0:
                self.warnings.append(
                    f"layer {index}: conv and P got a zero gradient at the first step; was no row longer "
                    "than a chunk, or are both zero?"
                )
                logger.warning(self.warnings[-1])


class FiniteGradients(TrainerCallback):
    """Stops before a step whose loss was no number: then no gradient is one, that of conv, P and W0 neither.

    Where nothing reaches those (rows no longer than a chunk), the norm of all gradients says so, where it is
    logged. In float16 the gradient scaler leaves such steps out itself.
    """

    def __init__(self, gradients: GradientTap) -> None:
        self.gradients = gradients

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.fp16:
            return
        self.gradients.look()
        found = [norm for norms in self.gradients.norms.values() for norm in norms.values()]
        total = (
            torch.stack([norm.to(args.device) for norm in found]).sum()
            if found
            else torch.zeros((), device=args.device)
        )
        if dist.is_initialized():
            dist.all_reduce(total)
        _require_finite(float(total), state.global_step + 1)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for name in ("loss", "grad_norm"):
            if not args.fp16 and logs and name in logs:
                _require_finite(float(logs[name]), state.global_step)


def _require_finite(value: float, step: int) -> None:
    if not math.isfinite(value):
        raise NotSoError(
            f"the loss or its gradient is not finite at step {step}; go on from the checkpoint before it, "
            "if there is one, with lower "
            "learning rates or eta, or look for bad rows in the data."
        )


def check_state_precision(model: nn.Module) -> None:
    """The state that a write goes into must be float32 at least, whatever the model's dtype."""
    for index, dtype in states_in_training(fast_weights(model)).items():
        if torch.finfo(dtype).bits < 32:
            raise InPlaceTTTError(
                f"layer {index} keeps its state in {dtype}, which loses small writes; use the package's "
                "own op."
            )


def check_beginnings(rows: Any, tokenizer: Any, warnings: list[str]) -> None:
    """Warn where the first of a dataset's rows begin without the special tokens that begin every text; of a
    stream nothing is read."""
    if (
        not isinstance(tokenizer, PreTrainedTokenizerBase)
        or not isinstance(rows, Sized)
        or isinstance(rows, IterableDataset)
    ):
        return
    if not (begins := begins_of(tokenizer)):
        return
    some = [rows[i] for i in range(min(len(rows), _FIRST_ROWS))]  # type: ignore[index]
    first = [
        torch.as_tensor(row["input_ids"]).tolist()
        for row in some
        if isinstance(row, Mapping) and "input_ids" in row
    ]
    padding = {tokenizer.pad_token_id} - {*begins}
    odd = sum([*itertools.dropwhile(padding.__contains__, ids)][: len(begins)] != begins for ids in first)
    if odd:
        said = tokenizer.decode(begins)
        note(
            warnings,
            f"{odd} of the first {len(first)} rows do not begin with {said!r}, as the tokenizer begins "
            "every text: a model that was "
            "trained with it reads much worse without, and writes learn to make up for that; put it before "
            "each part of a cut text",
        )


def check_writes(writes: dict[int, WriteHealth], limit: float, warnings: list[str]) -> None:
    """Warn where the update norm exceeds ‖W0‖; stop where it is above `limit` times ‖W0‖, or not a number."""
    check_ratios({index: health.state_ratio for index, health in writes.items()}, limit)
    for index, health in writes.items():
        if health.state_ratio > _WRITE_RATIO:
            note(
                warnings,
                f"layer {index}: writes move the weight by more than {_WRITE_RATIO:g} of its norm; "
                "consider a lower eta or a clip.",
            )
        if not health.chunks:
            note(warnings, f"layer {index}: a forward completed no chunk; its rows do not train conv and P.")


def check_ratios(ratios: dict[int, float], limit: float) -> None:
    """Stop where writes move a layer's weight by more than `limit` of its norm; not a number is not known."""
    for index, ratio in ratios.items():
        if ratio > limit or math.isinf(ratio):
            raise NotSoError(
                f"layer {index}: the writes of one document move the weight by {ratio:.3g} of its norm, "
                "above the limit of "
                f"{limit:g} (stop_write_ratio); lower eta, warm it up, or clip the writes (clip)."
            )


def check_gradient(norm: float, warnings: list[str]) -> None:
    if norm > _GRAD_NORM:
        note(
            warnings,
            f"the gradient's norm went above {_GRAD_NORM:g} before clipping; a lower learning rate or a "
            "longer warm-up may help.",
        )


class SkippedSteps:
    """Steps that DeepSpeed left out, which it does without a word where the gradient is not finite."""

    def __init__(self, before: int = 0) -> None:
        """before: those of the run that this one goes on from."""
        self.count, self.in_a_row = before, 0

    def record(self, step: int, skipped: bool) -> None:
        """After each optimiser step; raises NotSoError after `MOST_SKIPPED` in a row that were none."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        self.count += 1
        logger.warning("step %d was skipped, since its gradient is not finite: no weight was changed", step)
        if self.in_a_row == MOST_SKIPPED:
            raise NotSoError(
                f"the gradient was not finite in {MOST_SKIPPED} steps in a row, the last of them step "
                f"{step}, and DeepSpeed skipped them: "
                "the weights are as before; lower the learning rates or eta, or look for bad rows in the "
                "data."
            )

    def warnings(self) -> list[str]:
        """A sentence for the report."""
        return [f"{self.count} steps were skipped, since their gradient was not finite"] if self.count else []


def clip_finite(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clip gradients by their norm; where that is not finite, clipping would make all of them zero, or no
    numbers."""
    if not bool(torch.nn.utils.clip_grad_norm_(parameters, limit).isfinite()):
        raise NotSoError(
            "the gradient is not finite, and the weights are as before; lower the learning rates or eta, "
            "or look for bad rows in the data."
        )


def note(warnings: list[str], message: str) -> None:
    """Once each: into the log and the report."""
    if message not in warnings:
        warnings.append(message)
        logger.warning(message)
