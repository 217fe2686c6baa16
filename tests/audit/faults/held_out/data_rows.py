"""Faults of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..data_rows import STEPS, TRAINED, Row, filled, frozen, grouped, made
from ..fault import Fault, owned
from ..run import Run


def shifted(made: Row, row: list[Any]) -> None:
    """Labels that are shifted already, and that the model shifts again."""
    made["labels"][:-1], made["labels"][-1] = made["labels"][1:].copy(), -100


def with_the_matrices(groups: list[dict[str, Any]], moved: str) -> list[dict[str, Any]]:
    """A group's parameters are among the matrices, with their decay."""
    (found,) = (group for group in groups if group["name"] == moved)
    for group in groups:
        if group["name"] == "matrices":
            group["params"] = [*group["params"], *found["params"]]
    return [group for group in groups if group["name"] != moved]


def faults() -> Iterator[Fault]:
    """Each with its kind and, where there are several, which one it is."""
    yield made("labels are shifted twice", "", filled(shifted))
    lengths = (*[14] * 30, 17)
    yield Fault("documents are shorter than a chunk", "documents are shorter than a chunk", "data row", owned("data-rows long-documents"),
                ("rows",), None, None, Run(lengths=lengths), Run())  # fmt: skip
    rates = "learning-rate optimizer schedule"
    for name in ("learning_rate", "conv_learning_rate", "proj_learning_rate"):
        yield made("a rate is next to nothing", name, None, rates, STEPS, f"training.{name}=1e-20")
    for steps in (30, 100000):
        setting = f"training.eta_warmup_steps={steps}"
        yield made(
            "η warms up longer than the run", str(steps), None, "schedule eta in-training", STEPS, setting
        )
    for name, layers in (("", slice(None)), ("in the second TTT layer", slice(1, 2))):
        also = " every-layer" if name else ""
        yield made("P is frozen", name, frozen("proj", layers), TRAINED + also, STEPS)
    for group in ("conv", "proj"):
        plant = grouped(lambda groups, moved=group: with_the_matrices(groups, moved))
        yield made("a group decays with the matrices", group, plant, "weight-decay optimizer learning-rate", STEPS,
                   needs=(f"training.{group}_learning_rate=1e-2",))  # fmt: skip
    for which, eta in (("the first", "[0.0, 1.0]"), ("the second", "[1.0, 0.0]")):
        yield made(
            "η is zero in a layer",
            which,
            None,
            "eta writes every-layer every-layer loss-sum",
            STEPS,
            f"ttt.eta={eta}",
        )
