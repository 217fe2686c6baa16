"""Training a converted model: LoRA in both orders, and gradient checkpointing (law L10)."""

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from families import build
from models import CHUNK, LAYERS, NAMES, converted, distance, gradients, logits, random_ids, streamed
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION
from upstream import before

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert, disable_ttt
from inplace_ttt.surgery import fast_weights, is_converted

# new names came after our floor
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")

LENGTH = 4 * CHUNK + 3
IDS = random_ids(2, LENGTH)
CONFIG = InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK)
# transformers does not hand a layer's keyword arguments on to its attention here, so that a recomputation has
# no context.
NOT_CHECKPOINTED = (
    "stablelm",
    "falcon",
    *(["gptj"] if before("5.24") else []),
    *(["moshi"] if before("5.21") else []),
)


def lora(targets: list[str], **config: object) -> LoraConfig:
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **config)


def loss(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def check_lora(model: PeftModel) -> None:
    """Every trainable parameter learns, LoRA's and TTT's among them; and the adapted model streams as it
    reads."""
    assert len(fast_weights(model)) == len(LAYERS)
    found = gradients(model.train(), loss(model))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(".conv" in n or ".proj" in n for n in trainable if ".ttt." in n) == 4 and any(
        "lora_A" in n for n in trainable
    )
    assert not [name for name in trainable if name not in found or not found[name].any()]
    model.eval()
    expected = logits(model, IDS)
    assert distance(streamed(model, IDS, [CHUNK + 1, *[1] * 9, LENGTH - CHUNK - 10]), expected) < 5e-5
    with disable_ttt(model):
        assert distance(logits(model, IDS), expected) > 0.02


# Layers 0 and 2 are the TTT layers: peft refuses to keep a module trainable inside one that it adapts, so not
# their down_proj.
@pytest.mark.parametrize(
    "targets", [["q_proj", "1.mlp.down_proj"], ["q_proj", "k_proj", "gate_proj"]], ids=str
)
def test_convert_then_lora(targets: list[str]) -> None:
    model = converted("llama")
    base = logits(model, IDS)
    adapted = get_peft_model(model, lora(targets, modules_to_save=["ttt"]))
    check_lora(adapted)
    with adapted.disable_adapter():
        assert distance(logits(adapted, IDS), base) < 1e-5
    before = logits(adapted, IDS)
    merged = adapted.merge_and_unload()
    assert distance(logits(merged, IDS), before) < 5e-5 and is_converted(merged)


def test_convert_then_lora_with_ttt_unfrozen_by_hand() -> None:
    adapted = get_peft_model(converted("llama"), lora(["q_proj", "down_proj"]))
    for layer in fast_weights(adapted).values():
        layer.ttt.requires_grad_(True)
    check_lora(adapted)


@pytest.mark.parametrize("how", ["wrapped", "added"])
def test_lora_then_convert_is_refused(how: str) -> None:
    """PEFT would save the adapter without the writer, and load it onto the base without a word."""
    model = build("llama")
    if how == "wrapped":
        model = get_peft_model(model, lora(["q_proj"]))
    elif Version(version("peft")) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters of peft {MIN_PEFT_VERSION} and newer alone")
    else:
        model.add_adapter(lora(["q_proj"]))
    with pytest.raises(InPlaceTTTError, match="convert the base first, then wrap it"):
        convert(model, CONFIG)
    assert not is_converted(model)


def checkpointed(model: nn.Module, **kwargs: object) -> nn.Module:
    model.train().gradient_checkpointing_enable(kwargs)
    return model


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_CHECKPOINTED])
def test_recomputed_is_kept(name: str, target: str) -> None:
    plain, model = (
        converted(name, target=target).train(),
        checkpointed(converted(name, target=target), use_reentrant=False),
    )
    runs = []

    def count(*_: object) -> None:
        runs.append(1)

    fast_weights(model)[2].register_forward_pre_hook(count)
    expected_loss, found_loss = loss(plain), loss(model)
    with torch.no_grad():
        model(input_ids=IDS[:1, :9])  # a forward in between, with documents of its own
    expected, found = gradients(plain, expected_loss), gradients(model, found_loss)
    assert len(runs) == 3, "forward, the one in between, and the recomputation"
    assert torch.equal(found_loss, expected_loss) and found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_two_forwards_are_recomputed_with_their_own_documents() -> None:
    """Gradient accumulation that keeps both graphs: packed rows of different documents, backward in the other
    order."""
    positions = [
        torch.cat([torch.arange(n) for n in row])[None].expand(2, -1) for row in ([11, 20], [LENGTH])
    ]
    results = []
    for model in (converted("llama").train(), checkpointed(converted("llama"), use_reentrant=False)):
        losses = [model(input_ids=IDS, labels=IDS, position_ids=p, use_cache=False).loss for p in positions]
        model.zero_grad()
        for one in reversed(losses):
            one.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(results[1][key], value) for key, value in results[0].items())


@pytest.mark.parametrize("name", NOT_CHECKPOINTED)
def test_a_family_that_cannot_be_recomputed_says_so(name: str) -> None:
    model = checkpointed(converted(name), use_reentrant=False)
    with pytest.raises(
        InPlaceTTTError, match=r"does not pass keyword arguments on; turn gradient checkpointing off for it"
    ):
        loss(model).backward()


def gradients_or_refusal(model: nn.Module, of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor] | str:
    try:
        return gradients(model, of(model))
    except InPlaceTTTError as error:
        return str(error)


def right_or_refused(found: dict[str, Tensor] | str, expected: dict[str, Tensor], word: str) -> bool:
    if isinstance(found, str):
        return word in found
    return all(distance(found[key], value) < 1e-5 for key, value in expected.items())


def test_reentrant_checkpointing_is_right_or_refused() -> None:
    expected = gradients(model := converted("llama").train(), loss(model))
    model = checkpointed(converted("llama"), use_reentrant=True)
    model.enable_input_require_grads()
    assert right_or_refused(gradients_or_refusal(model, loss), expected, "use_reentrant")


def test_a_backward_outside_the_switched_off_block_is_right_or_names_the_switch() -> None:
    expected = gradients(base := build("llama").train(), loss(base))
    model = checkpointed(converted("llama"), use_reentrant=False)
    with disable_ttt(model):
        off = loss(model)
    assert right_or_refused(gradients_or_refusal(model, lambda model: off), expected, "disable_ttt")


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
def test_bfloat16_autocast_trains(target: str) -> None:
    model = converted("llama", target=target).train()
    exact = loss(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(model)
    grads = gradients(model, found)
    assert abs(found.item() / exact.item() - 1) < 0.02
    assert all(
        value.isfinite().all() and value.dtype == torch.float32 and value.any() for value in grads.values()
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_without_a_write_still_give_every_parameter_a_gradient(name: str) -> None:
    """Zero, not None: data-parallel training waits for the gradient of every parameter."""
    model = converted(name).train()
    short = IDS[:, : CHUNK - 1]
    found = gradients(model, model(input_ids=short, labels=short, use_cache=False).loss)
    ttt = {key: value for key, value in found.items() if ".ttt." in key}
    assert len(ttt) == 4 and not any(value.any() for value in ttt.values())
