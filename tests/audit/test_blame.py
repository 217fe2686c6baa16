"""A probe's own failure is reported as the probe's; what the model raises is the model's."""

from typing import Any

import pytest
import torch
from models import seven_layers
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.audit import audit_model
from inplace_ttt.audit.blame import is_the_probes
from inplace_ttt.audit.probed import Probed
from inplace_ttt.audit.probes import circumstances
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.surgery import fast_weights


@pytest.mark.full
def test_a_probe_that_divides_by_zero_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute of `Probed` raises, so that the innermost frame is the audit's."""
    monkeypatch.setattr(Probed, "takes_padding", property(lambda self: self.takes_documents and _fails()))
    report = audit_model(seven_layers())
    assert report.undeclared == []
    assert report["in-batches"].outcome.verdict == "not checked"
    assert "the audit's own probe fails with ZeroDivisionError" in report["in-batches"].outcome.found


def _fails() -> Any:
    namespace = {"__name__": circumstances.__name__}
    exec("def divide():\n    return 1 / 0", namespace)
    return namespace["divide"]()


def test_what_a_model_raises_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: FastWeight, z: Tensor) -> Tensor:
        raise ZeroDivisionError("in the model")

    monkeypatch.setattr(FastWeight, "forward", forward)
    with pytest.raises(InPlaceTTTError, match="raises ZeroDivisionError"):
        audit_model(seven_layers())
    with pytest.raises(ZeroDivisionError) as caught:
        seven_layers()(torch.ones(1, 3, dtype=torch.long))
    assert not is_the_probes(caught.value)


@pytest.mark.full
def test_w0_of_zeros_is_no_fault() -> None:
    model = seven_layers()
    for layer in fast_weights(model).values():
        layer.get_parameter("weight").data.zero_()
    report = audit_model(model)
    assert report.undeclared == []
    assert [r.item.id for r in report.items if "own probe fails" in r.outcome.found] == []
