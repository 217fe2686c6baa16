"""The public implementations' own classes, audited as they are: what is known of them comes out, and nothing
else."""

import pytest
import torch
from torch import nn

from audit.public_classes import D, H, port_gating, public_layer, public_mlp
from audit.public_code import MoshiGating, PublicInferenceLayer, PublicMLP
from inplace_ttt.audit import AuditedModule, Declaration, audit_module

FAMILIES = ("qwen3", "llama")


def deviations(module: AuditedModule) -> dict[str, str]:
    """What a module deviates in, and what was found."""
    return {
        result.item.id: result.outcome.found
        for result in audit_module(module).items
        if result.verdict == "deviates"
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_code_conforms(family: str) -> None:
    mlp = public_mlp(family, ttt_chunk=4096, ttt_lr=3.0)
    report = audit_module(PublicMLP(mlp))
    assert report.undeclared == [] and mlp.ttt_chunk == 4096
    assert report["eta"].outcome.numbers["η"] == pytest.approx(3.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_inference_code_computes_the_first_row_alone(family: str) -> None:
    found = deviations(PublicInferenceLayer(public_layer(family)))
    assert set(found) == {"rows"} and "row 1 of two" in found["rows"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_inference_codes_state_is_in_half_precision(family: str) -> None:
    found = deviations(PublicInferenceLayer(public_layer(family).bfloat16()))
    assert set(found) == {"rows", "state-precision"} and "arrive in bfloat16" in found["state-precision"]
    assert "state-precision" not in deviations(PublicMLP(public_mlp(family).bfloat16()))


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_a_module_without_p(inference: bool) -> None:
    found = deviations(PublicMLP(public_mlp("qwen3", inference, ttt_proj=False)))
    assert {id for id in found if id != "rows"} == {"projection-untransposed"} and "no P" in found[
        "projection-untransposed"
    ]


def test_a_bias_that_is_left_out() -> None:
    mlp = public_mlp("llama")
    mlp.down_proj = nn.Linear(H, D)
    assert deviations(PublicMLP(mlp)) == {"fast-tensor": "the down-projection's bias is left out"}


@pytest.mark.parametrize(("tau", "meant"), [(1e-5, 1e-5), (1e-12, 1e-12), (0.0, None)])
def test_the_port(tau: float, meant: float | None) -> None:
    """With the clip of its defaults, with one that is active at every size of write, and without one."""
    report = audit_module(MoshiGating(port_gating(delta_clip_fro_norm=tau)))
    own = {
        "fast-tensor": "do not follow",  # a copy of the weight
        "state-place": "w_down",
        "conv-depthwise": "other channels",
        "conv-size": "2 taps",
        "projection-untransposed": "transposed",
        "chunked-prefill": "in pieces",  # one weight for a whole call
        "streaming-target": "t+0",  # no look-ahead token by token
    }
    clip = {} if meant is None else {"clip-training": "in training too", "clip-effect": "nothing to see"}
    if meant is not None and meant != 1e-5:
        assert report["clip-inference"].verdict == "extension"
    found = {result.item.id: result.outcome.found for result in report.items if result.verdict == "deviates"}
    assert set(found) == set(own) | set(clip)
    assert [id for id, words in {**own, **clip}.items() if words not in found[id]] == []
    if meant is not None:
        assert report["clip-inference"].outcome.numbers["tau"] == pytest.approx(meant, rel=0.01)


def test_a_declared_deviation_of_the_port_is_one() -> None:
    report = audit_module(
        MoshiGating(port_gating()), declared=[Declaration("conv-size", "two taps were enough")]
    )
    assert "conv-size" not in report.undeclared and torch.get_default_dtype() == torch.float32
