"""Each planted fault is caught by the item that owns it and by no other; without faults there is no alarm."""

import pytest
import torch
from models import seven_layers

from audit.mutation import Mutation, expected
from audit.mutations import PRODUCT
from audit.toy import FOREIGN, foreign
from inplace_ttt.audit import audit_model, catalog


@pytest.mark.parametrize("fault", FOREIGN)
@pytest.mark.sample(3)
def test_a_fault_of_a_foreign_module_has_one_owner(fault: str) -> None:
    assert foreign(fault).undeclared == [FOREIGN[fault]]


@pytest.mark.parametrize("mutation", PRODUCT, ids=lambda m: m.what)
@pytest.mark.sample(3)
def test_a_fault_in_this_package_has_one_owner(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation.sound and mutation.settings:
        assert mutation.report(None).undeclared == [], "without the fault"
    assert set(mutation.report(monkeypatch).undeclared) == expected(mutation)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.full
def test_no_false_alarm(seed: int) -> None:
    assert foreign("", seed).undeclared == []
    assert audit_model(seven_layers(seed), seed=seed).undeclared == []


def test_the_table_is_wide() -> None:
    owning = {*FOREIGN.values(), *(mutation.owner for mutation in PRODUCT)}
    assert len(owning) >= 25 and owning <= set(catalog())
    assert torch.get_default_dtype() == torch.float32
