"""L12: torch.compile changes nothing, and needs no graph break where there is no cache."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from models import RIDGE, converted, distance, logits, random_ids
from torch import Tensor, nn

from inplace_ttt import InPlaceTTTError, disable_ttt
from inplace_ttt.config import KeyWhitening, UpdateClip
from inplace_ttt.surgery import fast_weights

IDS = random_ids(2, 40)
OPTIONS: dict[str, dict[str, Any]] = {
    "relative clip": {"clip": UpdateClip(0.02, relative=True, mode="always")},
    "whitened keys, hidden states": {
        "whitening": KeyWhitening(4),
        "normalize_targets": True,
        "target": "hidden_states",
        "eta": 3.0,
    },
    "least squares": RIDGE,
}


NORMS: dict[str, Any] = {
    "conv": "next",
    "target": "hidden_states",
    "write_norm": "spectral",
    "preserve_row_norms": True,
    "eta": 0.2,
}


def _padded_left() -> Tensor:
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    return mask


def _blocks() -> Tensor:
    """Two documents of 20 tokens, by who sees whom."""
    causal = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    causal[:, :, 20:, :20] = False
    return causal


FORWARDS: dict[str, dict[str, Tensor]] = {
    "whole rows": {},
    "padded left": {"attention_mask": _padded_left()},
    "packed": {"position_ids": torch.cat([torch.arange(17), torch.arange(23)]).expand(2, -1)},
    "blocks": {"attention_mask": _blocks(), "position_ids": torch.arange(20).repeat(2).expand(2, -1)},
}


def compiled(model: nn.Module, **settings: Any) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, **{"fullgraph": True, "backend": "aot_eager", **settings})


def results(run: nn.Module, model: nn.Module, **forward: Tensor) -> list[Tensor]:
    """Logits and the gradient of every parameter."""
    out = run(input_ids=IDS, use_cache=False, **forward).logits
    return [
        out,
        *torch.autograd.grad(out.float().square().mean(), [p for p in model.parameters() if p.requires_grad]),
    ]


def check(model: nn.Module, *forwards: str) -> None:
    one_graph = compiled(model)
    for name in forwards:
        for eager, found in zip(
            *(results(run, model, **FORWARDS[name]) for run in (model, one_graph)), strict=True
        ):
            assert distance(found, eager) < 1e-5, name


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.sample(1)
def test_one_graph_with_every_option(options: str) -> None:
    check(converted("llama", **OPTIONS[options]), "whole rows")


@pytest.mark.full
def test_a_measured_model_may_be_compiled_before_it_ever_ran() -> None:
    """And one that is not measured is refused, compiled or not."""
    model, fresh = (converted("llama", **RIDGE).requires_grad_(False) for _ in range(2))
    for layer in fast_weights(fresh).values():
        layer.ttt._is_measured = False  # as it is loaded
    assert distance(compiled(fresh)(input_ids=IDS, use_cache=False).logits, logits(model, IDS)) < 1e-5
    for layer in fast_weights(fresh).values():
        layer.ttt._is_measured = False
        layer.ttt.keys.directions.zero_()
    with pytest.raises(Exception, match="are not measured yet"):
        compiled(fresh)(input_ids=IDS, use_cache=False)


@pytest.mark.full
def test_norms_break_the_graph_and_nothing_else() -> None:
    model = converted("llama", **NORMS)
    run = compiled(model, fullgraph=False)
    for eager, found in zip(
        *(results(run_, model, **FORWARDS["packed"]) for run_ in (model, run)), strict=True
    ):
        assert distance(found, eager) < 1e-5


@pytest.mark.full
def test_documents_are_known_when_the_graph_runs() -> None:
    check(converted("llama"), "padded left", "packed", "blocks")


def test_another_family() -> None:
    check(converted("gpt2", target="hidden_states"), "packed")


@pytest.mark.full
def test_a_graph_is_switched_off() -> None:
    model = converted("llama").requires_grad_(False)
    run = compiled(model)
    on = run(input_ids=IDS, use_cache=False).logits
    with disable_ttt(model):
        off = run(input_ids=IDS, use_cache=False).logits
        assert distance(off, logits(model, IDS)) < 1e-5
    assert distance(off, on) > 0.02, "the writes must be visible for this test to mean anything"


def test_one_graph_for_all_lengths_and_masks() -> None:
    model = converted("llama").requires_grad_(False)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = compiled(model, backend=graphs)
    for length in (40, 41, 57, 33):
        ids, mask = random_ids(2, length), torch.ones(2, length, dtype=torch.long)
        mask[1, length - 5 :] = 0
        assert (
            distance(
                run(input_ids=ids, attention_mask=mask, use_cache=False).logits,
                logits(model, ids, attention_mask=mask),
            )
            < 1e-5
        )
    assert graphs.frame_count <= 2  # the second time with a length that may vary
    mask[0, 5:9] = 0
    with pytest.raises(InPlaceTTTError, match="row 0 has padding between"):
        run(input_ids=ids, attention_mask=mask, use_cache=False)


def test_a_graph_is_made_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a training loop imports between two of them."""
    model = converted("llama").train()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
    run = compiled(model, backend=graphs)
    for step in range(3):
        run(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        monkeypatch.setitem(sys.modules, f"imported_after_step_{step}", ModuleType("imported"))
    assert graphs.frame_count == 1


@pytest.mark.full
def test_a_cache_breaks_the_graph_and_nothing_else() -> None:
    """Threads that generate with one compiled model answer as each alone with the model as it is."""
    model = converted("llama")
    prompts = [random_ids(2, length, seed=length) for length in (13, 20)]
    expected = [
        model.generate(
            ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        for ids in prompts
    ]
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")

    def generated(ids: Tensor) -> Any:
        return model.generate(
            ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_logits=True
        )

    with ThreadPoolExecutor(2) as threads:
        for eager, found in zip(expected, threads.map(generated, prompts), strict=True):
            assert torch.equal(found.sequences, eager.sequences)
            assert distance(torch.stack(found.logits), torch.stack(eager.logits)) < 1e-5
