"""Faults of a training run: what its rows say, what is trained on them and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.surgery import fast_weights
from inplace_ttt.tasks import IGNORED
from inplace_ttt.training import model
from inplace_ttt.training.data import cached, packing
from inplace_ttt.training.loop import batches, parameters, trainer
from inplace_ttt.training.run import worker

from .fault import Fault, Plant, owned
from .run import CHUNK, ROW, Run
from .under_way import Patch

Row = dict[str, Any]
PLACE = "data row"
ROWS, STEPS = ("rows",), ("steps",)


def filled(change: Callable[[Row, list[Any]], None]) -> Plant:
    """A packed row is changed in place; change: the row and the pieces of documents in it."""

    def plant(patch: Patch) -> None:
        def fill(row: list[Any], *args: Any) -> Row:
            made = real(row, *args)
            change(made, row)
            return made

        real = packing._fill
        patch.setattr(packing, "_fill", fill)

    return plant


def positions_run_on(from_border: int) -> Plant:
    """From a document of the row on, positions do not begin anew."""

    def change(made: Row, row: list[Any]) -> None:
        positions = made["position_ids"]
        starts = [i for i in range(1, len(positions)) if positions[i] == 0]
        if len(starts) >= from_border:
            first = starts[from_border - 1]
            positions[first:] = positions[first - 1] + 1 + np.arange(len(positions) - first)

    return filled(change)


def positions_restart(every: int) -> Plant:
    def change(made: Row, row: list[Any]) -> None:
        made["position_ids"] %= every

    return filled(change)


def first_labels_kept(made: Row, row: list[Any]) -> None:
    """A document's first token is predicted from the one before it."""
    for piece in row:
        made["labels"][piece.at] = made["input_ids"][piece.at]


def ignored(part: slice) -> Plant:
    def change(made: Row, row: list[Any]) -> None:
        made["labels"][part] = IGNORED

    return filled(change)


def first_chunks_labeled(made: Row, row: list[Any]) -> None:
    """Of each document only the chunk that reads no write teaches anything."""
    made["labels"][made["position_ids"] >= CHUNK] = IGNORED


def padding_labeled(made: Row, row: list[Any]) -> None:
    end = row[-1].at + row[-1].length
    made["labels"][end:] = made["input_ids"][end:]


def reversed_documents(made: Row, row: list[Any]) -> None:
    for piece in row:
        end = piece.at + piece.length
        made["input_ids"][piece.at : end] = made["input_ids"][piece.at : end][::-1].copy()
        made["labels"][piece.at + 1 : end] = made["input_ids"][piece.at + 1 : end]


def rows_repeat(patch: Patch) -> None:
    """All rows are the first."""

    def pack(*args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        return {name: np.repeat(values[:1], len(values), 0) for name, values in real(*args, **kwargs).items()}

    real = cached._pack_rows
    patch.setattr(cached, "_pack_rows", pack)


def collated(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Plant:
    """Another batch of the same rows."""

    def plant(patch: Patch) -> None:
        real = batches.collate
        for module in (batches, worker):
            patch.setattr(module, "collate", lambda rows: change(real(rows)))

    return plant


def without_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "position_ids"}


def first_rows_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "position_ids": batch["position_ids"][:1].expand_as(batch["position_ids"])}


def frozen(kind: str, layers: slice) -> Plant:
    """A tensor of some TTT layers' generators is not trained."""

    def plant(patch: Patch) -> None:
        def choose(built: Any, recipe: Any) -> Any:
            chosen = real(built, recipe)
            for layer in list(fast_weights(chosen).values())[layers]:
                getattr(layer.ttt, kind).requires_grad_(False)
            return chosen

        real = model._choose_trained
        patch.setattr(model, "_choose_trained", choose)

    return plant


def detached(patch: Patch) -> None:
    real = FastWeight._source
    patch.setattr(FastWeight, "_source", lambda self, call: real(self, call).detach())


def grouped(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Plant:
    """Other groups of parameters."""

    def plant(patch: Patch) -> None:
        real = parameters.parameter_groups
        for module in (parameters, trainer):
            patch.setattr(module, "parameter_groups", lambda *args: change(real(*args)))

    return plant


def scheduled(factor: Callable[[str, int, float], float]) -> Plant:
    """Another factor of the learning rate; factor: group, step and the right one."""

    def plant(patch: Patch) -> None:
        def schedule(settings: Any, steps: int, group: str) -> Callable[[int], float]:
            right = real(settings, steps, group)
            return lambda step: factor(group, step, right(step))

        real = parameters.schedule
        for module in (parameters, trainer):
            patch.setattr(module, "schedule", schedule)

    return plant


def own(group: str) -> bool:
    return group in ("conv", "proj")


TRAINED, OWNERS = "trained-parameters optimizer in-training", "data-rows"


def faults() -> Iterator[Fault]:
    """Each with its kind and, where there are several, which one it is."""
    for border in (1, 2):
        yield made(
            "positions run on",
            f"from document {border + 1}",
            positions_run_on(border),
            "data-rows document-reset",
        )
    for every in (CHUNK, ROW // 2):
        yield made(
            "positions restart", f"every {every}", positions_restart(every), "data-rows long-documents"
        )
    yield made("a document's first token is predicted", "", filled(first_labels_kept))
    yield made("labels are left out", "in the second half", ignored(slice(ROW // 2, None)))
    yield made("labels are left out", "in the last quarter", ignored(slice(3 * ROW // 4, None)))
    yield made("labels are left out", "behind the first chunk", filled(first_chunks_labeled))
    yield made("labels are left out", "everywhere", ignored(slice(None)))
    yield made("padding is predicted", "", filled(padding_labeled))
    yield made("documents are reversed", "", filled(reversed_documents))
    yield made("all rows are the first", "", rows_repeat, "data-rows token-budget")
    yield made(
        "positions are not collated", "", collated(without_positions), "data-rows document-reset", STEPS
    )
    yield made(
        "positions are the first row's",
        "",
        collated(first_rows_positions),
        "data-rows in-batches document-reset",
        STEPS,
    )
    for name, layers in (("", slice(None)), ("in the second TTT layer", slice(1, 2))):
        also = " every-layer" if name else ""
        yield made("conv is frozen", name, frozen("conv", layers), TRAINED + also, STEPS)
    yield made("the target is detached", "in a run", detached, "target-gradient gradient in-training", STEPS)
    for group in ("conv", "proj"):
        left = grouped(lambda groups, out=group: [g for g in groups if g["name"] != out])
        yield made("a group is not optimized", group, left, TRAINED, STEPS)
    yield made(
        "conv and P never warm up",
        "by patch",
        scheduled(lambda group, step, right: 1e-9 if own(group) else right),
        "schedule learning-rate optimizer",
        STEPS,
    )
    yield made("conv and P never warm up", "by setting", None, "schedule learning-rate optimizer", STEPS,
               "training.ttt_warmup_steps=100000")  # fmt: skip


def made(
    kind: str, which: str, plant: Plant | None, owners: str = OWNERS, scenes: tuple[str, ...] = ROWS, *changes: str,
    needs: tuple[str, ...] = (),
) -> Fault:  # fmt: skip
    """A fault of this place; changes: settings that are the fault. needs: those that it shows under."""
    named = f"{kind} · {which}" if which else kind
    return Fault(named, kind, PLACE, owned(owners), scenes, plant, None, Run((*needs, *changes)), Run(needs))
