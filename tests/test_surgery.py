"""Conversion: what it finds, what it refuses, what it leaves as it was, and the guards of a converted
model."""

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from families import UNLISTED, build
from models import CHUNK, LAYERS, converted, distance, hooks_of, logits, random_ids, turn_writer_on
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert, disable_ttt, revert
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.surgery import config_of, fast_weights, is_converted

LENGTH = 4 * CHUNK + 3
IDS = random_ids(2, LENGTH)
CONFIG = InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK)


def untouched(model: nn.Module, name: str) -> bool:
    """Whether the model carries no trace of a conversion and computes what it did."""
    return (
        not is_converted(model)
        and not hooks_of(model)
        and torch.equal(logits(model, IDS), logits(build(name), IDS))
    )


@pytest.mark.parametrize("family", UNLISTED, ids=lambda family: family.name)
def test_unlisted_families_are_found_and_the_log_says_where(family, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "inplace_ttt"):
        model = convert(build(family), CONFIG)
    (record,) = [r.getMessage() for r in caplog.records if r.name.startswith("inplace_ttt")]
    assert model.config.model_type in record
    for found in (family.layers, family.attention, family.mlp, family.down):
        assert repr(found) in record
    assert [name for name, m in model.named_modules() if isinstance(m, FastWeight)] == [
        f"{family.layers}.{i}.{family.down}" for i in LAYERS
    ]


def test_listed_families_are_not_guessed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "inplace_ttt"):
        converted("llama")
    assert not caplog.records


ROUTED = {
    "mixtral": r"layers \[0, 2\] of MixtralModel have routed experts alone.*; choose from the layers with a dense MLP or a shared "
    r"expert: none\.",
    "qwen3_moe": r"layers \[2\] of Qwen3MoeModel have routed experts alone.*; choose from the layers with a dense MLP or a shared "
    r"expert: 0\.",
}


@pytest.mark.parametrize("family", ROUTED)
def test_routed_experts_are_refused_and_left_alone(family: str) -> None:
    model = build(family)
    with pytest.raises(InPlaceTTTError, match=ROUTED[family]):
        convert(model, CONFIG)
    assert not is_converted(model) and not hooks_of(model) and not hasattr(model.config, "inplace_ttt")


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("qwen3_moe", {0: "mlp.down_proj"}),
        ("qwen2_moe", dict.fromkeys(range(3), "mlp.shared_expert.down_proj")),
        ("deepseek_v3", {0: "mlp.down_proj", **dict.fromkeys((1, 2), "mlp.shared_experts.down_proj")}),
    ],
)
def test_dense_layers_and_shared_experts_become_fast_weights(family: str, paths: dict[int, str]) -> None:
    """Of all layers that have one; what no token is routed around."""
    model = convert(build(family), InPlaceTTTConfig(layers=tuple(paths), chunk_size=CHUNK))
    assert [name for name, m in model.named_modules() if isinstance(m, FastWeight)] == [
        f"model.layers.{i}.{p}" for i, p in paths.items()
    ]
    before = logits(model, IDS)
    assert distance(before, logits(build(family), IDS)) < 1e-6
    turn_writer_on(model)
    assert distance(logits(model, IDS), before) > 1e-3
    assert untouched(revert(model), family)


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    r"layers \[3, 9\] do not exist: the model has 3 layers, 0 to 2": lambda m: convert(
        m, InPlaceTTTConfig(layers=(0, 3, 9))
    ),
    r"eta has 2 values for 3 layers; give one number or one per layer": lambda m: convert(
        m, InPlaceTTTConfig(layers="every:1", eta=(1, 2))
    ),
    r"this LlamaForCausalLM is not converted; there is nothing to revert": revert,
    r"this LlamaForCausalLM is not converted; convert\(model, config\) it": config_of,
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_refusal_leaves_the_model_alone(message: str) -> None:
    model = build("llama")
    with pytest.raises(InPlaceTTTError, match=message):
        REFUSED[message](model)
    assert untouched(model, "llama")


def test_a_layer_that_cannot_be_converted_leaves_the_earlier_ones_alone() -> None:
    model = build("llama")
    mlp = model.model.layers[2].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj)
    with pytest.raises(InPlaceTTTError, match="Sequential is not a linear map"):
        convert(model, CONFIG)
    assert untouched(model, "llama")


def test_converting_twice_is_refused() -> None:
    model = converted("llama")
    before, hooks = logits(model, IDS), hooks_of(model)
    with pytest.raises(
        InPlaceTTTError, match=r"this LlamaForCausalLM is converted already; revert\(model\) first"
    ):
        convert(model, CONFIG)
    assert torch.equal(logits(model, IDS), before) and hooks_of(model) == hooks


@pytest.mark.parametrize("name", ["starcoder2", "gpt2", "gpt_neox", "granite"])
def test_a_bias_of_the_down_projection_is_kept(name: str) -> None:
    model = build(name)
    convert(model, CONFIG)
    turn_writer_on(model)
    before = logits(model, IDS)
    layer = fast_weights(model)[2]
    z = torch.randn(2, 3, 48)
    with torch.no_grad(), disable_ttt(model):
        plain = layer(z)
        assert distance(plain, linear(z, layer.matrix(), layer.bias)) < 1e-6 and layer.bias.any()
        layer.bias.add_(torch.arange(32.0))
        assert distance(layer(z), plain + torch.arange(32.0)) < 1e-6
    assert distance(logits(model, IDS)[:, -1], before[:, -1]) > 1e-3, "the fast path adds it too"
    assert any(
        key.endswith("bias") and key.rpartition(".")[0].endswith(("c_proj", "down_proj", "4h_to_h"))
        for key in model.state_dict()
    )


def test_tied_embeddings_stay_tied() -> None:
    model = convert(build("llama", tie_word_embeddings=True), CONFIG)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert sum(p is model.lm_head.weight for p in model.parameters()) == 1
    assert revert(model).lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])
def test_a_deep_copy_lives_its_own_life(name: str) -> None:
    model = converted(name, target="hidden_states")
    before = logits(model, IDS)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, IDS), before) and hooks_of(twin) == hooks_of(model)
    with disable_ttt(model):
        assert torch.equal(logits(twin, IDS), before), "switching one off leaves the other on"
    with torch.no_grad():
        fast_weights(twin)[0].ttt.conv.mul_(5)
    assert distance(logits(twin, IDS), before) > 1e-3 and torch.equal(logits(model, IDS), before)
    revert(twin)
    assert not is_converted(twin) and not hooks_of(twin) and not hasattr(twin.config, "inplace_ttt")
    assert is_converted(model) and torch.equal(logits(model, IDS), before) and model.config.inplace_ttt
    revert(model)
    assert torch.equal(logits(model, IDS), logits(twin, IDS))


def test_the_fingerprint_is_of_w0_conv_and_proj() -> None:
    model = converted("llama")
    first = fingerprint_of(model)
    assert fingerprint_of(copy.deepcopy(model)) == first
    for parameter in fast_weights(model)[2].parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 1
        assert fingerprint_of(model) != first
        first = fingerprint_of(model)


def test_parameters_start_the_same_every_time_and_differ_by_layer() -> None:
    a, b = (fast_weights(converted("llama", writes=False)) for _ in range(2))
    assert all(torch.equal(a[i].ttt.proj, b[i].ttt.proj) for i in LAYERS) and not torch.equal(
        a[0].ttt.proj, a[2].ttt.proj
    )
    assert all(
        p.dtype == torch.bfloat16
        for p in fast_weights(converted("llama", torch.bfloat16))[0].ttt.parameters()
    )


class Tiled(nn.Module):
    """An MLP run on two halves, of the sequence or of the batch."""

    def __init__(self, mlp: nn.Module, dim: int) -> None:
        super().__init__()
        self.mlp, self.dim = mlp, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mlp(half) for half in x.chunk(2, self.dim)], self.dim)


class WithoutDownProj(nn.Module):
    """An MLP that reads the weight itself, as some fused kernels do."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return linear(silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x), self.mlp.down_proj.weight)


class Twice(Tiled):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.mlp(x)


GUARDS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "tiled over the sequence": (
        lambda mlp: Tiled(mlp, 1),
        r"layer 2's down-projection got rows \[2, 16\] of .* \[2, 31\].*tiled",
    ),
    "tiled over the batch": (
        lambda mlp: Tiled(mlp, 0),
        r"layer 2's down-projection got rows \[1, 31\] of .* \[2, 31\]",
    ),
    "called twice": (
        lambda mlp: Twice(mlp, 0),
        r"layer 2's down-projection was called outside a forward of the model, or twice in one",
    ),
    "never called": (
        WithoutDownProj,
        r"down-projections of layers \[2\] did not run in this forward.*undo that, or exclude these layers",
    ),
}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
def test_a_changed_mlp_is_caught(guard: str, use_cache: bool) -> None:
    change, message = GUARDS[guard]
    model = converted("llama")
    before, layer = logits(model, IDS, use_cache=use_cache), model.model.layers[2]
    plain = layer.mlp
    layer.mlp = change(plain)
    with pytest.raises(InPlaceTTTError, match=message):
        logits(model, IDS, use_cache=use_cache)
    with disable_ttt(model):
        logits(model, IDS)
    layer.mlp = plain
    assert torch.equal(logits(model, IDS, use_cache=use_cache), before), (
        "and the model is fine again once that is undone"
    )


def test_the_down_projection_is_not_to_be_called_alone() -> None:
    model = converted("llama")
    for _ in range(2):
        with pytest.raises(
            InPlaceTTTError,
            match=r"layer 0's down-projection was called outside a forward.*disable_ttt\(model\)",
        ):
            fast_weights(model)[0](torch.randn(2, LENGTH, 48))
        logits(model, IDS)


def test_a_forward_that_broke_off_leaves_no_armed_layer() -> None:
    model = converted("llama")

    def interrupt(*_: object) -> None:
        raise RuntimeError

    handle = model.model.layers[0].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(RuntimeError):
        logits(model, IDS)
    handle.remove()
    with pytest.raises(InPlaceTTTError, match="outside a forward"):
        fast_weights(model)[0](torch.randn(2, LENGTH, 48))
    assert torch.equal(logits(model, IDS), logits(converted("llama"), IDS))


def test_inputs_embeds_are_the_same_source_as_ids() -> None:
    model = converted("llama")
    with torch.no_grad():
        found = model(inputs_embeds=model.model.embed_tokens(IDS), use_cache=False).logits
    assert torch.equal(found, logits(model, IDS))


def test_accelerates_hooks_and_ours_go_together() -> None:
    """accelerate (device_map) replaces the forward of every module: before or after the conversion, nothing
    changes."""
    places = {"model": "cpu", "lm_head": "cpu"}
    expected = logits(converted("llama"), IDS)
    after = dispatch_model(converted("llama"), places, main_device="cpu", force_hooks=True)
    assert torch.equal(logits(after, IDS), expected)
    before = convert(dispatch_model(build("llama"), places, main_device="cpu", force_hooks=True), CONFIG)
    turn_writer_on(before)
    assert torch.equal(logits(before, IDS), expected)


def test_offloaded_weights_are_refused_or_get_real_parameters() -> None:
    """Where accelerate keeps weights away, modules hold meta tensors between forwards; new parameters must
    not be such."""
    model = cpu_offload(build("llama"), execution_device=torch.device("cpu"))
    with contextlib.suppress(InPlaceTTTError):
        convert(model, CONFIG)
    assert not [name for name, p in model.named_parameters() if ".ttt." in name and p.is_meta]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_models_that_share_a_config_are_converted_one_by_one(name: str) -> None:
    first = build(name)
    config, values = first.config, first.config.to_dict()
    second, third = type(first)(config), convert(type(first)(config), CONFIG)
    convert(first, CONFIG)
    assert not hasattr(second.config, "inplace_ttt") and config.to_dict() == values
    assert all(module.config is not config for module in first.modules() if hasattr(module, "config"))
    again = type(first)(first.config)
    revert(first)
    assert hasattr(again.config, "inplace_ttt") and hasattr(third.config, "inplace_ttt")
    assert first.config.to_dict() == values


def test_a_converted_config_can_be_pickled() -> None:
    """Worker processes are handed their model's config by pickle."""
    config = converted("llama").config
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is type(config) and again.to_dict() == config.to_dict()
