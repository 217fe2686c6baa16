"""The generator of faults: wide, each fault proved live apart from the audit, and that proof able to fail."""

import dataclasses
from collections.abc import Callable

import pytest

from audit.faults import held_out_faults, open_faults
from audit.faults.caught import caught
from audit.faults.conditions import COARSE, LATER_LAYER, When
from audit.faults.fault import Fault, Kind, owned
from audit.faults.liveness import liveness
from audit.faults.op import wrong_eta
from audit.faults.rule import with_rule
from audit.faults.score import score, table
from inplace_ttt.audit import catalog
from inplace_ttt.training.audit.catalog import RECIPE

PLANNED = {
    "in-training", "in-batches", "in-pieces", "over-many-chunks", "every-layer", "precisions", "through-a-file", "take-back",
    "data-rows",
}  # fmt: skip
"""Items that are still to be made, for what shows under some circumstance alone."""
PLACES = sorted({fault.place for fault in open_faults()})


def named(name: str) -> Fault:
    return next(fault for fault in open_faults() if fault.name == name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("faults", [open_faults, held_out_faults], ids=["open", "held out"])
@pytest.mark.full
def test_every_fault_is_live(faults: Callable[[], tuple[Fault, ...]], place: str) -> None:
    assert [fault.name for fault in faults() if fault.place == place and liveness(fault) <= 1] == []


ALIVE = Kind("η is too small", "op", owned("eta"), with_rule(wrong_eta))
NEVER = When("never", lambda at: False)


@pytest.mark.parametrize(
    "dead",
    [
        *dataclasses.replace(ALIVE, sizes=(0.0,)).faults(),
        *dataclasses.replace(ALIVE, whens=(NEVER,)).faults(),
        *(dataclasses.replace(fault, plant=None) for fault in ALIVE.faults()),
        dataclasses.replace(named("conv is frozen"), plant=None),
        dataclasses.replace(named("P is saved transposed"), spoil=None),
    ],
    ids=["of no size", "never acts", "not planted", "not planted in a run", "model not spoiled"],
)
@pytest.mark.sample(2)
def test_what_does_nothing_is_dead(dead: Fault) -> None:
    assert [liveness(fault) > 1 for fault in ALIVE.faults()] == [True]
    assert liveness(dead) < 0.01


@pytest.mark.parametrize("when", COARSE, ids=lambda when: when.name)
def test_another_order_of_operations_is_no_fault(when: When) -> None:
    """In half precision, where it changes most."""
    (alike,) = dataclasses.replace(ALIVE, whens=(when,), sizes=(0.0,)).faults()
    assert 0 < liveness(alike) < 0.7


def test_the_generator_is_wide() -> None:
    faults = [*open_faults(), *held_out_faults()]
    kinds = [{fault.kind for fault in part} for part in (open_faults(), held_out_faults())]
    assert len(faults) >= 220 and len({fault.name for fault in faults}) == len(faults)
    assert len(kinds[0] | kinds[1]) >= 45 and not kinds[0] & kinds[1]
    assert 0.28 < len(kinds[1]) / len(kinds[0] | kinds[1]) < 0.4
    assert {fault.place for fault in held_out_faults()} == set(PLACES)
    assert sum(fault.place == "data row" for fault in faults) >= 15


def test_owners_are_items() -> None:
    known = {*catalog(), *(item.id for item in RECIPE), *PLANNED}
    assert [
        fault.name
        for fault in (*open_faults(), *held_out_faults())
        if not fault.owners or not fault.owners <= known
    ] == []


@pytest.mark.full
def test_what_the_audit_says_of_a_fault() -> None:
    (seen,) = dataclasses.replace(ALIVE, whens=(LATER_LAYER,), sizes=(0.3,)).faults()
    assert caught(seen) == ["every-layer"]
    assert caught(dataclasses.replace(seen, plant=None)) == []
    labels = named("a document's first token is predicted")
    assert caught(dataclasses.replace(labels, plant=None)) == []
    (verdict,) = score([seen])
    assert verdict.is_rightly_named and not dataclasses.replace(verdict, fault=labels).is_rightly_named
    assert "100%" in table([verdict], "by place", lambda fault: fault.place)
