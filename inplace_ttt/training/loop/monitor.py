"""Callbacks that log and measure during a run, and one that warms η up."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from ...diagnostics.diagnosis import diagnose
from ...diagnostics.gradients import Rates
from ...diagnostics.observing import observed, watched
from ...diagnostics.report import write_report
from ...diagnostics.writes import WriteHealth, labeled, longest_document
from ...errors import InPlaceTTTError
from ...evaluation.comparison import compare
from ...evaluation.protocol import Protocol
from ...layout import ChunkLayout
from ...surgery import fast_weights
from .guards import GradientTap, check_gradient, check_ratios, check_writes, note
from .speed import Speed

_ROWS_TO_CHOOSE_FROM = 16


class EtaWarmup(TrainerCallback):
    """Raises η linearly from 0 to its own value over the first steps. Checkpoints store that value."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.etas: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for index, layer in fast_weights(kwargs["model"]).items():
            eta = self.etas.setdefault(index, layer.fast.eta)
            layer.fast.eta = eta * min(1.0, (state.global_step + 1) / (self.steps + 1))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for index, eta in self.etas.items():
            fast_weights(kwargs["model"])[index].fast.eta = eta


class LayerMonitor(TrainerCallback):
    """Writes the log: one JSON line per logged step, with writes and gradients of every TTT layer.

    The line also holds the Trainer's values. At steps that are not logged, it measures how far the longest
    document of the first micro-step moves each layer's weight. All ranks stop if one of them exceeds `limit`.

    Args:
        gradients: source of the gradient norms.
        warnings: list that warnings are appended to.
        limit: largest η‖S‖/‖W0‖.
        file: the log, or None on ranks that write none.

    Raises:
        NotSoError: if a ratio exceeds `limit`.
    """

    def __init__(self, gradients: GradientTap, warnings: list[str], limit: float, file: Path | None) -> None:
        self.gradients, self.warnings, self.limit, self.file = gradients, warnings, limit, file
        self.writes: dict[int, WriteHealth] = {}
        self.ratios: dict[int, Tensor] = {}
        self.watching = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, logs = (
            kwargs["model"],
            (state.global_step + 1) % state.logging_steps == 0 or state.global_step == 0,
        )
        self.watching.enter_context(observed(model, self.writes) if logs else watched(model, self.ratios))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ratios:
            self.watching.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watching.close()
        if (state.global_step % state.logging_steps == 0 or state.global_step == 1) and dist.is_initialized():
            self.writes = _worst(self.writes, args.device)
        check_writes(self.writes, self.limit, self.warnings)
        if self.ratios:
            found = torch.stack(list(self.ratios.values()))
            if dist.is_initialized():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
            check_ratios(dict(zip(self.ratios, found.tolist(), strict=True)), self.limit)
            self.ratios.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watching.close()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is None:
            return
        if "loss" in logs:
            check_gradient(float(logs.get("grad_norm", 0.0)), self.warnings)
            for index, health in self.writes.items():
                logs[f"state_ratio/{index}"] = health.state_ratio
        if self.file is not None:
            line = {"step": state.global_step, **logs}
            if "loss" in logs:
                gradients = self.gradients.read()
                line["layers"] = [
                    {"layer": i, **asdict(health), "gradients": gradients.get(i, {})}
                    for i, health in sorted(self.writes.items())
                ]
            with self.file.open("a") as log:
                log.write(json.dumps(line) + "\n")


class DiagnoseCallback(TrainerCallback):
    """Diagnoses the same document every `diagnose_steps` steps, and writes it to `folder`/step-N.

    The run itself is not affected. Severe findings become warnings.

    Args:
        speed: the run's speed; its clock is paused meanwhile.
        ids: token ids of the document [1, n], int64.
        gradients: the run's gradient norms, which the diagnosis must not change.
        warnings: list that warnings are appended to.
        folder: folder to write the diagnoses into.
    """

    def __init__(
        self, speed: Speed, ids: Tensor, gradients: GradientTap, warnings: list[str], folder: Path
    ) -> None:
        self.recipe, self.clock, self.ids = speed.recipe, speed.clock, ids
        self.gradients, self.warnings, self.folder = gradients, warnings, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.recipe.monitor.diagnose_steps:
            return
        o, name = self.recipe.training, f"step-{state.global_step}"
        rates = Rates(
            o.conv_learning_rate or o.learning_rate, o.proj_learning_rate or o.learning_rate, o.learning_rate
        )
        with self.clock.paused(), self.gradients.paused():
            diagnosis = diagnose(
                kwargs["model"],
                {"input_ids": self.ids},
                learning_rates=rates,
                float32_masters=True,
                name=f"{self.recipe.output}, {name}",
                tokenizer=kwargs.get("processing_class"),
            )
        try:
            write_report(diagnosis, self.folder / name, overwrite=True)
        except InPlaceTTTError as error:
            note(self.warnings, f"the diagnosis of {name} is not kept: {error}")
        for finding in diagnosis.of("severe"):
            note(self.warnings, f"{name}: {finding.message} ({finding.id}); {finding.kind.remedy}")


class CompareCallback(TrainerCallback):
    """Compares losses on held-out documents before the first step and every `compare_steps` steps.

    It appends a line to `file` with the key "comparison". Its figures show whether writes help, and whether
    they help only their own document. Before the first step of a fresh conversion `off` is the base's loss.

    Args:
        speed: the run's speed; its clock is paused meanwhile.
        documents: token ids [T] of each document.
        file: the log.
    """

    def __init__(self, speed: Speed, documents: list[Tensor], file: Path) -> None:
        self.recipe, self.clock, self.documents, self.file = speed.recipe, speed.clock, documents, file

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._compare(kwargs["model"], 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.recipe.monitor.compare_steps == 0:
            self._compare(kwargs["model"], state.global_step)

    def _compare(self, model: Any, step: int) -> None:
        window = self.recipe.model.window
        protocol = (
            Protocol(batch_size=2) if window is None else Protocol(window.size, window.sinks, batch_size=2)
        )
        with self.clock.paused():
            model.eval()
            found = compare(model, self.documents, protocol).to_dict()
            model.train()
        line = {
            "step": step,
            "comparison": {
                name: found[name]
                for name in ("on", "off", "mismatched", "difference", "document_gain", "generic_gain")
            },
        }
        with self.file.open("a") as log:
            log.write(json.dumps(line) + "\n")


def documents_to_compare(rows: Iterable[dict[str, Any]], chunk_size: int) -> list[Tensor]:
    """Returns the longest document of each row, if it is long enough to read a write.

    Args:
        rows: rows with input_ids, position_ids and labels.
        chunk_size: tokens per chunk.

    Returns:
        Token ids [T], int64, of the documents with more than `chunk_size` + 1 tokens.

    Raises:
        InPlaceTTTError: if no document is long enough.
    """
    longest = (_longest_document(row, chunk_size) for row in rows)
    found = [ids for ids in longest if len(ids) > chunk_size + 1]
    if not found:
        raise InPlaceTTTError(
            f"no held-out document has more than {chunk_size + 1} tokens, so monitor.compare_steps "
            "has nothing to read; "
            "give longer ones."
        )
    return found


def document_to_diagnose(rows: Iterable[dict[str, Any]], chunk_size: int) -> Tensor:
    """Returns the start [1, n] of the longest document among the first 16 rows.

    n is at most 2,048, or four chunks and one token if that is more.
    """
    longest = max(
        (_longest_document(row, chunk_size) for row in itertools.islice(rows, _ROWS_TO_CHOOSE_FROM)), key=len
    )
    return longest[None, : max(2048, 4 * chunk_size + 1)]


def _longest_document(row: dict[str, Any], chunk_size: int) -> Tensor:
    """Returns the token ids [T], int64, of a row's longest document, without padding."""
    positions, labels = (torch.as_tensor(row[name])[None] for name in ("position_ids", "labels"))
    _, (start, stop) = longest_document(labeled(ChunkLayout.from_position_ids(positions, chunk_size), labels))
    return torch.as_tensor(row["input_ids"], dtype=torch.int64)[start:stop]


def _worst(writes: dict[int, WriteHealth], device: torch.device) -> dict[int, WriteHealth]:
    """Returns the largest value of every figure over the ranks.

    All ranks then see the same figures, so they stop together.
    """
    figures = torch.tensor(
        [list(asdict(health).values()) for health in writes.values()], dtype=torch.float32, device=device
    )
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return {
        index: WriteHealth(int(chunks), *rest)
        for index, (chunks, *rest) in zip(writes, figures.tolist(), strict=True)
    }
