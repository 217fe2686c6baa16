"""L6: converted is the base. L7: eta 0, switched off, and the base agree. And everything can be undone."""

import copy
from typing import Any

import pytest
import torch
from families import build
from models import (
    CHUNK,
    LAYERS,
    NAMES,
    converted,
    distance,
    gradients,
    hooks_of,
    logits,
    random_ids,
    streamed,
)

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert, disable_ttt, revert
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams
from inplace_ttt.surgery import config_of, fast_weights, is_converted

LENGTH = 4 * CHUNK + 3
PIECES = [CHUNK + 2, 1, 1, 2 * CHUNK, CHUNK - 1]
# in float32 one product per chunk stands for one over the row
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.0}


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_converted_is_the_base(name: str, dtype: torch.dtype, target: str) -> None:
    base, model, ids = (
        build(name, dtype=dtype),
        converted(name, dtype, writes=False, target=target),
        random_ids(2, LENGTH),
    )
    assert distance(logits(model, ids), logits(base, ids)) <= DTYPES[dtype]
    assert torch.equal(logits(model, ids, use_cache=True), logits(base, ids, use_cache=True))
    assert torch.equal(streamed(model, ids, PIECES), streamed(base, ids, PIECES))
    assert distance(logits(model.train(), ids), logits(base.train(), ids)) <= DTYPES[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_converted_trains_from_the_first_step(name: str) -> None:
    """At the start conv has a gradient although it is zero, P has none, and the base's parameters have the
    base's own."""
    base, model, ids = build(name).train(), converted(name, writes=False).train(), random_ids(2, LENGTH)
    expected, found = (
        gradients(m, m(input_ids=ids, labels=ids, use_cache=False).loss) for m in (base, model)
    )
    for index, layer in fast_weights(model).items():
        assert layer.ttt.conv.grad.abs().max() > 0 and not layer.ttt.proj.grad.any(), index
    assert {name for name in found if ".ttt." not in name} == set(expected)
    for key, value in expected.items():
        assert distance(found[key], value) < 1e-4, key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_eta_zero_is_off_is_the_base(name: str, dtype: torch.dtype) -> None:
    base, on, zero, ids = (
        build(name, dtype=dtype),
        converted(name, dtype),
        converted(name, dtype, eta=0.0),
        random_ids(2, LENGTH),
    )
    assert distance(logits(on, ids), logits(base, ids)) > 0.02
    with disable_ttt(on):
        for use_cache in (False, True):
            assert torch.equal(logits(on, ids, use_cache=use_cache), logits(base, ids, use_cache=use_cache))
        assert torch.equal(streamed(on, ids, PIECES), streamed(base, ids, PIECES))
    assert distance(logits(zero, ids), logits(base, ids)) <= DTYPES[dtype]
    assert torch.equal(streamed(zero, ids, PIECES), streamed(base, ids, PIECES))


def test_the_switch_goes_back() -> None:
    model, ids = converted("llama"), random_ids(1, LENGTH)
    on = logits(model, ids)
    with disable_ttt(model):
        cache = model(input_ids=ids)[CACHE]
        with disable_ttt(model):
            pass
        off = logits(model, ids)
    assert not streams(cache), "nothing is written while switched off"
    assert torch.equal(logits(model, ids), on) and not torch.equal(on, off)
    with pytest.raises(KeyboardInterrupt), disable_ttt(model):
        raise KeyboardInterrupt
    assert torch.equal(logits(model, ids), on)


@pytest.mark.parametrize("name", NAMES)
def test_revert_leaves_the_base(name: str) -> None:
    base, model, ids = build(name), build(name), random_ids(2, LENGTH)
    hooked, classes = hooks_of(model), [type(module) for module in model.modules()]
    config = copy.deepcopy(model.config.to_dict())
    convert(model, InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK, target="hidden_states"))
    assert is_converted(model) and len(hooks_of(model)) > len(hooked) and config_of(model).layers == LAYERS
    assert model.config.model_type == base.config.model_type
    logits(model, ids)
    assert revert(model) is model
    assert torch.equal(logits(model, ids), logits(base, ids))
    assert not is_converted(model) and hooks_of(model) == hooked
    assert [type(module) for module in model.modules()] == classes
    assert list(model.state_dict()) == list(base.state_dict())
    assert all(torch.equal(value, base.state_dict()[key]) for key, value in model.state_dict().items())
    assert type(model.config) is type(base.config) and model.config.to_dict() == config
    with pytest.raises(InPlaceTTTError, match=r"is not converted; convert\(model, config\) it"):
        config_of(model)


def test_convert_after_revert_starts_anew() -> None:
    model, ids = revert(converted("llama")), random_ids(2, LENGTH)
    convert(model, InPlaceTTTConfig(layers=(1,), chunk_size=5))
    assert config_of(model).layers == (1,) and list(fast_weights(model)) == [1]
    assert torch.equal(logits(model, ids, use_cache=True), logits(build("llama"), ids, use_cache=True))


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
def test_a_detached_target_gives_its_source_no_gradient(target: str) -> None:
    ids, found = random_ids(2, LENGTH), {}
    for detach in (False, True):
        model = converted("llama", target=target, detach_target=detach).train()
        sources: list[bool] = []
        for layer in fast_weights(model).values():
            layer.ttt.register_forward_pre_hook(
                lambda module, args, seen=sources: seen.append(args[0].requires_grad)
            )
        out = model(input_ids=ids, labels=ids, use_cache=False)
        found[detach] = (out.logits.detach(), gradients(model, out.loss), sources)
    (logits_on, grads_on, sources_on), (logits_off, grads_off, sources_off) = found[False], found[True]
    assert torch.equal(logits_on, logits_off) and sources_on == [True, True] and sources_off == [False, False]
    assert distance(grads_off["model.embed_tokens.weight"], grads_on["model.embed_tokens.weight"]) > 1e-3
    last: dict[str, Any] = {
        key: value for key, value in grads_on.items() if "layers.2" in key and ".ttt." in key
    }
    assert len(last) == 2 and all(torch.equal(grads_off[key], value) for key, value in last.items())
