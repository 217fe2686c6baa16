"""The figures of a diagnosis against sums made another way, and that measuring leaves no trace."""

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from models import CHUNK, converted, random_ids
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from inplace_ttt import InPlaceTTTError, Session, UpdateClip
from inplace_ttt.config import KeyWhitening
from inplace_ttt.diagnostics import plots
from inplace_ttt.diagnostics.diagnosis import Diagnosis, diagnose
from inplace_ttt.diagnostics.gradients import Rates
from inplace_ttt.diagnostics.keys import key_health, keys_of_all_layers
from inplace_ttt.diagnostics.observing import observed
from inplace_ttt.diagnostics.report import page
from inplace_ttt.diagnostics.writes import WriteHealth
from inplace_ttt.layer.cache import streams
from inplace_ttt.surgery import disable_ttt, fast_weights

from .sick import at_the_papers_start, healthy, rows

ROW = 50


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return healthy()


@pytest.fixture(scope="module")
def found(model: nn.Module) -> Diagnosis:
    return diagnose(model, rows(), learning_rates=1e-3)


def everything(model: nn.Module) -> dict[str, Any]:
    state = {name: (p.detach().clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    hooks = {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()}
    slots = {
        i: (layer.fast.eta, layer.fast.config, layer.fast.observer)
        for i, layer in fast_weights(model).items()
    }
    return {"parameters": state, "modes": modes, "hooks": hooks, "slots": slots}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "start",
    [lambda: healthy(clip=UpdateClip(1e-5, mode="always")), lambda: at_the_papers_start(detach_target=True)],
)
def test_nothing_is_left_behind(start: Any, training: bool) -> None:
    """Parameters, `.grad`, requires_grad, modes, hooks, settings and the generator, through every kind of
    ablation."""
    model = start().train(training)
    next(model.parameters()).requires_grad_(False)
    fast_weights(model)[2].ttt.conv.grad = torch.full_like(fast_weights(model)[2].ttt.conv, 3.0)
    before, generator = everything(model), torch.get_rng_state()
    diagnose(model, rows())
    after = everything(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert {k: v for k, v in after.items() if k != "parameters"} == {
        k: v for k, v in before.items() if k != "parameters"
    }
    for name, (value, trains, grad) in before["parameters"].items():
        assert torch.equal(value, after["parameters"][name][0]), name
        assert (trains, grad) == after["parameters"][name][1:], name


def test_gradients_are_those_of_a_plain_backward(model: nn.Module, found: Diagnosis) -> None:
    twin = copy.deepcopy(model).train()
    ids = rows()["input_ids"]
    loss = twin(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    values = found.to_dict()
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for layer in values["layers"]:
        own = fast_weights(twin)[layer["layer"]]
        for name, parameter in (("conv", own.ttt.conv), ("proj", own.ttt.proj), ("weight", own.weight)):
            entry = layer["parameters"][name]
            assert entry["gradient"] == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
            assert entry["parameter"] == pytest.approx(parameter.norm().item(), rel=1e-5)
    conv = [layer["parameters"]["conv"]["gradient"] for layer in values["layers"]]
    assert values["groups"]["conv"]["gradient"] == pytest.approx(math.hypot(*conv), rel=1e-5)


def test_gradients_under_checkpointing_are_the_same(model: nn.Module, found: Diagnosis) -> None:
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    again = diagnose(twin, rows()).measured.gradients
    assert again.norms == pytest.approx(found.measured.gradients.norms, rel=1e-4)
    assert again.by_chunk[2] == pytest.approx(found.measured.gradients.by_chunk[2], rel=1e-4)


def test_adams_first_step_is_that_of_adam(model: nn.Module, found: Diagnosis) -> None:
    twin = copy.deepcopy(model).train()
    ids = rows()["input_ids"]
    twin(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    conv = fast_weights(twin)[0].ttt.conv
    before = conv.detach().clone()
    torch.optim.Adam([conv], lr=1e-3).step()
    step = next(layer for layer in found.to_dict()["layers"] if layer["layer"] == 0)["parameters"]["conv"][
        "adam_step"
    ]
    assert step == pytest.approx((conv - before).norm().item(), rel=1e-3)


def test_writes_are_those_of_the_rule(model: nn.Module, found: Diagnosis) -> None:
    """η‖S‖/‖W0‖ after each chunk of layer 0, from keys and targets caught on the way."""
    caught: list[tuple[Tensor, Tensor]] = []
    layer = fast_weights(model)[0]
    layer.fast.observer = lambda own, z, v, gate, context: caught.append((z.detach(), v.detach()))
    with torch.no_grad():
        model.eval()(**rows(), use_cache=False)
    layer.fast.observer = None
    z, v = (x[0].double() for x in caught[0])
    state, ratios, deltas = torch.zeros(32, 48, dtype=torch.float64), [], []
    for start in range(0, ROW - CHUNK + 1, CHUNK):
        deltas.append(v[start : start + CHUNK].T @ z[start : start + CHUNK])
        state = state + deltas[-1]
        ratios.append(float(layer.eta * state.norm() / layer.weight.double().norm()))  # type: ignore[operator]
    writes = next(entry for entry in found.to_dict()["layers"] if entry["layer"] == 0)["writes"]
    assert [c["state_ratio"] for c in writes["by_chunk"]] == pytest.approx(ratios, rel=1e-4)
    cosine = float((deltas[0] * deltas[1]).sum() / deltas[0].norm() / deltas[1].norm())
    assert writes["by_chunk"][1]["alignment"] == pytest.approx(cosine, abs=1e-4)
    singular = torch.linalg.svdvals(state)
    assert writes["effective_rank"] == pytest.approx(
        float(singular.square().sum() ** 2 / (singular**4).sum()), rel=1e-3
    )


def test_effects_are_differences_of_losses(model: nn.Module, found: Diagnosis) -> None:
    """All writes on minus off, over the tokens past each row's first chunk, averaged by hand."""
    ids = rows()["input_ids"]

    def loss() -> Tensor:
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        ).view(2, -1)[:, CHUNK:]

    on = loss()
    with disable_ttt(model):
        off = loss()
    all_writes = found.to_dict()["effect_of_all_writes"]
    assert all_writes["loss"] == pytest.approx(float((on - off).mean()), rel=1e-3)
    both = sum(layer["effect"]["loss_change"] for layer in found.to_dict()["layers"])
    assert both == pytest.approx(all_writes["loss"], abs=0.05) and both != 0


def test_the_last_chunk_gets_no_gradient(found: Diagnosis) -> None:
    """50 tokens in chunks of 7: the eighth chunk is not complete, and what reads the seventh predicts
    nothing."""
    for layer in found.to_dict()["layers"]:
        reached = layer["gradient_by_chunk"]
        assert len(reached) == 8 and all(g > 0 for g in reached[:6]) and reached[6:] == [0, 0]


def test_a_model_in_double_precision() -> None:
    model = converted("llama", dtype=torch.float64, layers=(0,))
    found = diagnose(model, {"input_ids": random_ids(1, 17)}).measured
    assert found.sizes[0, "proj"] == pytest.approx(fast_weights(model)[0].ttt.proj.detach().norm().item())


def test_a_weight_that_is_no_number_is_reported() -> None:
    model = converted("llama", layers=(0,))
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    found = diagnose(model, {"input_ids": random_ids(1, 17)})
    assert [finding.id for finding in found.of("severe")] == ["weight-not-finite"] and "<td>–</td>" in page(
        found, []
    )


def test_rates_that_are_none() -> None:
    for rate in (math.nan, math.inf, -1e-3):
        with pytest.raises(
            InPlaceTTTError, match="a learning rate to diagnose with must be a number of at least 0"
        ):
            Rates(1e-3, rate, 1e-3)


def test_a_layers_share_is_of_conv_and_p(found: Diagnosis) -> None:
    norms = {(0, "conv"): 3.0, (0, "proj"): 4.0, (2, "conv"): 0.3, (2, "proj"): 0.4, (0, "weight"): 9.0}
    gradients = dataclasses.replace(found.measured.gradients, norms=norms)
    assert gradients.shares() == pytest.approx({0: 25 / 25.25, 2: 0.25 / 25.25})


def test_what_least_squares_read_is_no_sum_of_writes() -> None:
    model = converted("llama", layers=(0,), update_rule="ridge", ridge=0.5)
    lost = diagnose(model, {"input_ids": random_ids(1, 17)}).measured.writes[0].lost
    assert lost.state is None and lost.weight is not None


def test_eta_of_zero_is_swept_around_one() -> None:
    found = diagnose(converted("llama", layers=(0,), eta=0.0), {"input_ids": random_ids(1, 17)})
    (sweep,) = (s for s in found.measured.sweeps if s.name == "eta")
    assert sweep.now is None and [p.value for p in sweep.points] == [0.1, 0.3, 1.0, 3.0, 10.0]
    assert [finding.id for finding in found.of("severe")] == ["eta-too-small"]


def test_many_layers_are_drawn(found: Diagnosis) -> None:
    figure = Figure()
    one = found.measured.writes[0]
    many = dataclasses.replace(found.measured, writes=dict.fromkeys(range(13), one))
    plots._writes(figure, dataclasses.replace(found, measured=many))
    left, right = figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "layer 0",
        "layer 12",
    ] and right.get_legend() is None


def test_a_last_token_that_reads_a_write_predicts_nothing(model: nn.Module) -> None:
    """A chunk and a token: a write is read, and no prediction reads it."""
    assert [
        finding.id for finding in diagnose(model, {"input_ids": random_ids(1, CHUNK + 1)}).of("severe")
    ] == ["one-chunk"]


def test_whitened_keys_are_those_that_count() -> None:
    """The keys that a whitening layer writes under, not the down-projection's input."""
    model = converted("llama", whitening=KeyWhitening())
    caught: list[Tensor] = []
    fast_weights(model)[2].fast.observer = lambda own, z, v, gate, context: caught.append(z.detach())
    with torch.no_grad():
        model.eval()(**rows(), use_cache=False)
    fast_weights(model)[2].fast.observer = None
    found = diagnose(model, rows()).measured
    written = key_health(caught[0].flatten(0, 1))
    # layer 0's writes are off where keys are measured
    assert found.keys[2].collision == pytest.approx(written.collision, rel=0.02)
    assert found.writes[2].lost.output is None, "its output is not that of these keys"
    beside = get_peft_model(model, LoraConfig(r=2, target_modules=["down_proj"]))  # type: ignore[arg-type]
    with keys_of_all_layers(beside, None, lora := {}), torch.no_grad():
        beside(**rows(), use_cache=False)
    assert lora[2].collision == pytest.approx(written.collision, rel=0.02)


def test_padding_is_no_key_and_no_token() -> None:
    """A padded row is diagnosed as the row alone."""
    model = converted("llama")
    ids = random_ids(1, 40)
    alone = diagnose(model, {"input_ids": ids}).to_dict()
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), ids], 1)
    mask = (torch.arange(49) >= 9).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = diagnose(
        model, {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
    ).to_dict()
    assert batch["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    for a, b in zip(alone["layers"], batch["layers"], strict=True):
        for section in ("writes", "keys", "effect"):
            flat_a, flat_b = (
                json.loads(json.dumps(x[section]), parse_float=lambda s: round(float(s), 3)) for x in (a, b)
            )
            assert flat_a == flat_b, section


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": torch.full((1, 20), 97)},
            "token ids go from 97 to 97, but the model has 97 embeddings",
        ),
        ({"input_ids": torch.zeros(0, 5, dtype=torch.int64)}, "at least one token"),
        ({"input_ids": torch.zeros(20, dtype=torch.int64)}, r"must be whole numbers \[B, T\]"),
        ({"input_ids": torch.zeros(1, 20)}, r"must be whole numbers \[B, T\]"),
        ({"attention_mask": torch.ones(1, 20)}, r"needs input_ids \[B, T\]"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids of a batch to diagnose is not a tensor of rows"),
        (
            {"input_ids": random_ids(2, 20), "labels": random_ids(2, 19)},
            r"labels must have the shape \[2, 20\] of input_ids, got \[2, 19\]",
        ),
        (
            {"input_ids": random_ids(2, 20), "attention_mask": torch.ones(2, 1, 20, 20)},
            r"attention_mask must have the shape \[2, 20\]",
        ),
        (
            {"input_ids": random_ids(1, 20), "attention_mask": torch.zeros(1, 20)},
            "these rows predict no token",
        ),
        (
            {"input_ids": random_ids(1, 20), "labels": torch.full((1, 20), -100)},
            "these rows predict no token",
        ),
        ({"input_ids": random_ids(2, 1)}, "these rows predict no token"),
        ({"input_ids": random_ids(1, 20), "tokens": torch.ones(1)}, "cannot hold 'tokens'"),
    ],
)
def test_rows_that_do_not_fit(model: nn.Module, batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InPlaceTTTError, match=message):
        diagnose(model, batch)


def test_a_model_that_is_not_converted() -> None:
    with pytest.raises(InPlaceTTTError, match="not converted"):
        diagnose(nn.Linear(3, 3), rows())


LEAST_SQUARES = {"update_rule": "ridge", "ridge": 0.5}


@pytest.mark.parametrize(
    "options",
    [{}, LEAST_SQUARES, {**LEAST_SQUARES, "whitening": KeyWhitening(0.5)}, {"whitening": KeyWhitening(7)}],
    ids=str,
)
def test_writes_are_those_that_were_made(options: dict[str, Any]) -> None:
    """The measured state is that of a session which read the same tokens, and its ratio that of the weight it
    stands for."""
    model, ids = converted("llama", **options), random_ids(1, 5 * CHUNK)
    found: dict[int, WriteHealth] = {}
    with observed(model, found), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    session = Session(model)
    session.read(ids)
    for index, layer in fast_weights(model).items():
        read = layer.readout(streams(session.cache)[index].state[0])
        weight = layer.eta * (read if layer.ttt.keys is None else read @ layer.ttt.keys.directions)
        ratio = float(weight.norm() / layer.weight.detach().norm())
        assert found[index].state_ratio == pytest.approx(ratio, rel=1e-3) and found[index].chunks == 5
