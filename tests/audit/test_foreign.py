"""Modules of others through their adapters: the public interface conforms, the port's known faults are
found."""

import pytest
import torch

from audit.foreign import CHUNK, PortGating, PublicMLP
from audit.public_code import MoshiGating
from audit.toy import ToyAdapter, ToyLayer
from inplace_ttt import InPlaceTTTError
from inplace_ttt.audit import Declaration, ReferenceMLP, audit_module

SHORT = Declaration("chunk-size", "a test's chunk is short")


def test_a_module_with_the_public_signature_conforms() -> None:
    mlp = PublicMLP()
    before = {name: p.clone() for name, p in mlp.named_parameters()}
    report = audit_module(ReferenceMLP(mlp, CHUNK, 3.0), declared=[SHORT])
    assert report.undeclared == [] and report["chunk-size"].declared
    assert report["eta"].outcome.numbers["η"] == pytest.approx(3.0)
    assert report["document-reset"].verdict == report["padding"].verdict == "not checked"
    assert "share its state" in report["document-reset"].outcome.found
    assert all(torch.equal(p, before[name]) for name, p in mlp.named_parameters()) and mlp.training


def test_the_ports_faults_are_found() -> None:
    report = audit_module(MoshiGating(PortGating()), declared=[SHORT])
    assert report.undeclared == [
        "fast-tensor",  # a copy of the weight
        "state-place",  # the state is in a parameter
        "conv-depthwise",
        "conv-size",
        "projection-untransposed",
        "clip-training",
        "clip-effect",
        "chunked-prefill",  # one weight for a whole call
        "streaming-target",  # no look-ahead token by token
        "stream-reset",  # what waits for a full chunk stays
    ]
    assert report["clip-inference"].outcome.numbers["tau"] == pytest.approx(1e-5, rel=0.01)
    assert "t+0" in report["streaming-target"].outcome.found


def test_one_chunk_of_a_mutated_public_module() -> None:
    class Mean(PublicMLP):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return super().forward(x, t / CHUNK)

    report = audit_module(ReferenceMLP(Mean(), CHUNK, 3.0), declared=[SHORT])
    assert (
        report.undeclared == ["loss-sum"]
        and f"mean over the chunk of {CHUNK}" in report["loss-sum"].outcome.found
    )


def test_a_module_that_raises_is_one_sentence() -> None:
    class Broken(PublicMLP):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("first line\nsecond line")

    with pytest.raises(
        InPlaceTTTError,
        match=r"^Broken raises RuntimeError on 25 random tokens: first line; the audit needs it to run on such input\.$",
    ):
        audit_module(ReferenceMLP(Broken(), CHUNK))


def test_a_module_that_raises_later_names_the_item() -> None:
    class Late(PublicMLP):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > 40:
                raise IndexError("too long")
            return super().forward(x, t)

    with pytest.raises(
        InPlaceTTTError, match=r"^Late raises IndexError while the audit measures '[a-z-]+': too long"
    ):
        audit_module(ReferenceMLP(Late(), CHUNK))


def test_wrong_shapes_and_short_chunks_are_refused() -> None:
    class Flat(PublicMLP):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return super().forward(x, t)[0]

    with pytest.raises(InPlaceTTTError, match=r"returns \[25, 16\] for 25 tokens"):
        audit_module(ReferenceMLP(Flat(), CHUNK))
    with pytest.raises(InPlaceTTTError, match="chunks of 4 tokens and a kernel of 5"):
        audit_module(ReferenceMLP(PublicMLP(), 4))


def test_a_batch_that_is_refused_is_a_finding() -> None:
    class OneRow(ToyLayer):
        def forward(self, z: torch.Tensor, x: torch.Tensor, documents: object = None) -> torch.Tensor:
            if len(z) > 1:
                raise ValueError("batch size 1 only")
            return super().forward(z, x, documents)  # type: ignore[arg-type]

    report = audit_module(ToyAdapter(OneRow()))
    assert report.undeclared == ["rows"] and "raises ValueError" in report["rows"].outcome.found


def test_a_module_that_never_writes_is_not_called_right() -> None:
    class Silent(PublicMLP):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return super().forward(x, 0 * t)

    report = audit_module(ReferenceMLP(Silent(), CHUNK, 3.0), declared=[SHORT])
    assert report.undeclared == ["writes"]
    reasons = {r.item.id: r.outcome.found for r in report.items if r.verdict == "not checked"}
    assert "no write is ever read" in reasons["causality"]
    assert {r.item.id for r in report.items if r.verdict == "conforms"} == {"slow-weights", "state-place"}
