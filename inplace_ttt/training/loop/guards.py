"""Guards that stop a run or add warnings to its report, and the gradient norms that they read."""

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
    """Keeps the norm of the last gradient that reached conv, P and W0 of each TTT layer.

    The norm is that of this rank's gradient, before averaging over ranks.

    Args:
        model: a converted model.
    """

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
        """Reads the gradients that never passed the hooks. Call it before an optimizer step.

        A sharding framework such as FSDP2 writes to `.grad` directly; the norm is that of this rank's shard.
        """
        if self._past_hooks is None:
            self._past_hooks = {i for i, (norms, name, _) in enumerate(self._tapped) if name not in norms}
        for i in self._past_hooks:
            norms, name, parameter = self._tapped[i]
            if parameter.grad is not None:
                gradient = parameter.grad
                _keeper(norms, name)(gradient.to_local() if hasattr(gradient, "to_local") else gradient)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps the norms unchanged by a backward pass over another text inside the block."""
        before = {index: dict(norms) for index, norms in self.norms.items()}
        try:
            yield
        finally:
            for index, norms in before.items():
                self.norms[index].clear()
                self.norms[index].update(norms)

    def read(self) -> dict[int, dict[str, float]]:
        """Returns layer -> parameter name -> norm."""
        return {
            index: {name: float(norm) for name, norm in norms.items()} for index, norms in self.norms.items()
        }


def _keeper(norms: dict[str, Tensor], name: str) -> Any:
    def keep(gradient: Tensor) -> None:
        norms[name] = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)

    return keep


class FirstStep(TrainerCallback):
    """Checks conv and P of each TTT layer after the first optimizer step.

    Both must have received a gradient, and states must be float32. If their gradients are zero, it warns.

    Raises:
        InPlaceTTTError: if conv or P got no gradient, or states have a lower precision.
    """

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
                    f"layer {index}: conv and P got a zero gradient at the first step; is every row at "
                    "most a chunk long, or are both zero?"
                )
                logger.warning(self.warnings[-1])


class FiniteGradients(TrainerCallback):
    """Stops the run before an optimizer step whose loss was not finite.

    The gradients of conv, P and W0 are then not finite either. If no gradient reaches these (rows no longer
    than a chunk), the logged loss and norm of all gradients are checked instead. In float16 nothing is
    checked: the gradient scaler skips such steps.

    Raises:
        NotSoError: if a gradient, the loss or the norm is not finite.
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
            f"the loss or its gradient is not finite at step {step}; continue from the checkpoint before it, "
            "if there is one, with lower "
            "learning rates or eta, or look for bad rows in the data."
        )


def check_state_precision(model: nn.Module) -> None:
    """Raises InPlaceTTTError if a layer's state has less precision than float32, in a model of any dtype."""
    for index, dtype in states_in_training(fast_weights(model)).items():
        if torch.finfo(dtype).bits < 32:
            raise InPlaceTTTError(
                f"layer {index} keeps its state in {dtype}, which loses small writes; use the package's "
                "own op."
            )


def check_beginnings(rows: Any, tokenizer: Any, warnings: list[str]) -> None:
    """Warns if rows begin without the special tokens that begin every text.

    Only the first rows of a dataset are read; a stream is not.

    Args:
        rows: the training rows, with input_ids.
        tokenizer: the model's tokenizer.
        warnings: list that the warning is appended to.
    """
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
            f"{odd} of the first {len(first)} rows do not begin with {said!r}, which the tokenizer puts "
            "before every text: a model that was trained with it reads much worse without it, and writes "
            "learn to compensate for that; put it before each part of a split text",
        )


def check_writes(writes: dict[int, WriteHealth], limit: float, warnings: list[str]) -> None:
    """Checks every layer's writes.

    A ratio η‖S‖/‖W0‖ above 1, or a forward pass without a complete chunk, is a warning.

    Args:
        writes: layer -> its writes.
        limit: largest ratio.
        warnings: list that warnings are appended to.

    Raises:
        NotSoError: if a ratio is above `limit` or infinite.
    """
    check_ratios({index: health.state_ratio for index, health in writes.items()}, limit)
    for index, health in writes.items():
        if health.state_ratio > _WRITE_RATIO:
            note(
                warnings,
                f"layer {index}: writes move the weight by more than {_WRITE_RATIO:g} of its norm; "
                "consider a lower eta or a clip.",
            )
        if not health.chunks:
            note(
                warnings,
                f"layer {index}: a forward pass completed no chunk; its rows do not train conv and P.",
            )


def check_ratios(ratios: dict[int, float], limit: float) -> None:
    """Checks how far writes move each layer's weight.

    Args:
        ratios: layer -> η‖S‖/‖W0‖; infinite if S is not finite. NaN means that W0 cannot be read, and passes.
        limit: largest ratio.

    Raises:
        NotSoError: if a ratio is above `limit` or infinite.
    """
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
    """Counts the steps that DeepSpeed skips because the gradient is not finite. DeepSpeed logs nothing.

    Args:
        before: steps that were skipped before this run resumed.
    """

    def __init__(self, before: int = 0) -> None:
        self.count, self.in_a_row = before, 0

    def record(self, step: int, skipped: bool) -> None:
        """Records an optimizer step.

        Raises:
            NotSoError: after `MOST_SKIPPED` skipped steps in a row.
        """
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
        """Returns a sentence for the report, or nothing."""
        return [f"{self.count} steps were skipped, since their gradient was not finite"] if self.count else []


def clip_finite(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clips gradients by their norm.

    Raises:
        NotSoError: if the norm is not finite. Clipping would then make all gradients zero or NaN.
    """
    if not bool(torch.nn.utils.clip_grad_norm_(parameters, limit).isfinite()):
        raise NotSoError(
            "the gradient is not finite, and the weights are as before; lower the learning rates or eta, "
            "or look for bad rows in the data."
        )


def note(warnings: list[str], message: str) -> None:
    """Adds a message to the warnings and the log, once."""
    if message not in warnings:
        warnings.append(message)
        logger.warning(message)
