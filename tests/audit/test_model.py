"""Audits of converted models: verdicts by profile, declarations, and that nothing of the model is changed."""

import dataclasses
from pathlib import Path

import pytest
import torch
from families import build
from models import converted, random_ids, seven_layers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, UpdateClip, calibrate, convert, revert
from inplace_ttt.attention_window import set_attention_window
from inplace_ttt.audit import Declaration, audit_model, auditor, catalog
from inplace_ttt.audit.catalog import METHOD
from inplace_ttt.audit.probes.circumstances import declared_rule
from inplace_ttt.audit.whole_model import WholeModel
from inplace_ttt.layer import prompt_stream
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.training.audit.catalog import RECIPE

# Tests' models: 3 layers, TTT in 0 and 2, chunks of 7.
TINY = ["chunk-size", "layer-spacing"]


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


REFERENCE = {"chunk_size": 4096, "eta": 3.0, "target": "hidden_states"}


def test_the_paper_preset_has_no_deviation() -> None:
    assert audit_model(seven_layers()).undeclared == []


@pytest.mark.full
def test_the_reference_preset_has_two_deviations() -> None:
    assert audit_model(seven_layers(**REFERENCE)).undeclared == ["chunk-size", "target-source"]
    report = audit_model(seven_layers(**REFERENCE), profile="reference")
    assert report.undeclared == []
    assert report["document-reset"].verdict == "extension" and report["eta"].verdict == "conforms"
    assert audit_model(seven_layers(), profile="reference").undeclared == [
        "eta",
        "chunk-size",
        "target-source",
    ]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2", "phi3", "gpt_neox", "moshi", "falcon"])
@pytest.mark.sample(1)
def test_other_families(name: str) -> None:
    assert audit_model(converted(name)).undeclared == TINY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.sample(1)
def test_everything_is_put_back(dtype: torch.dtype) -> None:
    """Values, storages, dtypes, modes, settings, hooks and the generator of random numbers."""
    model = converted("llama", dtype=dtype, clip=UpdateClip(0.5)).train()
    model.model.layers[0].mlp.eval()
    ids = random_ids(1, 30)
    before, pointers = bits(model), [p.data_ptr() for p in model.parameters()]
    flags = [(p.requires_grad, p.dtype) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    settings = {name: m.fast.config for name, m in model.named_modules() if hasattr(m, "fast")}
    logits, random = model(ids).logits.detach(), torch.random.get_rng_state()
    report = audit_model(model)
    assert report.undeclared == TINY
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [(p.requires_grad, p.dtype) for p in model.parameters()] == flags and all(
        p.grad is None for p in model.parameters()
    )
    assert [module.training for module in model.modules()] == modes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert {name: m.fast.config for name, m in model.named_modules() if hasattr(m, "fast")} == settings
    assert torch.equal(model(ids).logits.detach(), logits)


def test_everything_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("llama")
    before = bits(model)
    broken = [
        dataclasses.replace(item, probe=lambda bench, expected: 1 / 0) if item.id == "rows" else item
        for item in METHOD
    ]
    monkeypatch.setattr(auditor, "METHOD", broken)
    with pytest.raises(InPlaceTTTError, match="raises ZeroDivisionError while the audit measures 'rows'"):
        audit_model(model)
    assert all(
        torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
        for name, tensor in model.state_dict().items()
    )
    assert model.model.layers[0].mlp.down_proj.fast.config.chunk_size == 7


@pytest.mark.full
def test_declared_and_stale() -> None:
    declared = [Declaration("chunk-size", "short documents"), Declaration("sign", "long mended")]
    report = audit_model(converted("llama"), declared=declared)
    assert report.undeclared == ["layer-spacing"]
    assert report["chunk-size"].declared == "short documents"
    assert report.stale_declarations == [declared[1]]
    with pytest.raises(InPlaceTTTError, match="'chunksize' is not the id of an item"):
        audit_model(converted("llama"), declared=[Declaration("chunksize", "typo")])
    with pytest.raises(InPlaceTTTError, match="has an empty `why`"):
        audit_model(converted("llama"), declared=[Declaration("chunk-size", " ")])


@pytest.mark.full
def test_a_setting_of_its_own_is_seen() -> None:
    assert (
        audit_model(converted("llama", update_on_decode=False))["generated-tokens"].outcome.found
        == "generated tokens do not write"
    )
    report = audit_model(converted("llama", clip=UpdateClip(0.1, relative=True)))
    assert report["clip-inference"].verdict == "extension" and report["clip-scope"].verdict == "conforms"
    assert report["clip-effect"].verdict == "conforms"
    report = audit_model(converted("llama", clip=UpdateClip(1e-5, mode="always")))
    assert [id for id in report.undeclared if id not in TINY] == ["clip-training", "clip-effect"]
    assert (
        report["clip-inference"].verdict == "conforms"
        and "leaves nothing to see" in report["clip-effect"].outcome.found
    )
    report = audit_model(converted("llama", eta=[0.5, 2.0]))
    assert report.undeclared == TINY and report["eta"].outcome.numbers["η"] == pytest.approx(0.5)
    assert audit_model(converted("llama", detach_target=True))["extensions"].verdict == "extension"


def test_what_is_not_converted_is_refused() -> None:
    with pytest.raises(InPlaceTTTError, match="is not converted"):
        audit_model(build("llama"))
    with pytest.raises(InPlaceTTTError, match="profile 'papre' does not exist"):
        audit_model(converted("llama"), profile="papre")


def test_the_catalog_is_complete() -> None:
    items = {**catalog(), **{item.id: item for item in RECIPE}}
    assert len(items) == len(METHOD) + len(RECIPE) == len({item.title for item in items.values()}) >= 50
    for item in items.values():
        texts = (item.id, item.title, item.paper_ref, item.paper, item.reference_code, item.why, item.remedy)
        assert all(text.strip() for text in texts), item.id
        assert item.probe or item.on_model


@pytest.mark.full
def test_progress_counts_every_item() -> None:
    seen: list[tuple[int, int, str]] = []
    report = audit_model(
        converted("llama"), progress=lambda done, total, title: seen.append((done, total, title))
    )
    assert [done for done, _, _ in seen] == list(range(len(report.items))) and {
        total for _, total, _ in seen
    } == {len(report.items)}


@pytest.mark.full
def test_it_says_the_same_twice() -> None:
    """Numbers of the order of rounding may differ; what is said does not."""
    one, two = (audit_model(converted("llama"), seed=3) for _ in range(2))
    assert [(r.verdict, r.outcome.found) for r in one.items if r.item.id != "state-precision"] == [
        (r.verdict, r.outcome.found) for r in two.items if r.item.id != "state-precision"
    ]


@pytest.mark.full
def test_a_low_rank_adapter() -> None:
    """Beside the TTT layers too, with dropout, which draws: no gradient of LoRA's is the layer's, and the
    generator is as before."""
    adapter = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.3, init_lora_weights=False
    )
    adapted, random = get_peft_model(converted("llama"), adapter), torch.random.get_rng_state()
    report = audit_model(adapted)
    assert report.undeclared == TINY and torch.equal(torch.random.get_rng_state(), random)
    assert not [r.item.id for r in report.items if "quantized or wrapped" in r.outcome.found]


@pytest.mark.full
def test_a_kernel_of_one_tap() -> None:
    report = audit_model(converted("llama", kernel_size=1))
    assert [id for id in report.undeclared if id not in TINY] == ["conv-size", "conv-lookahead"]


@pytest.mark.full
def test_behind_an_attention_window() -> None:
    """Which refuses padded rows."""
    model = converted("llama")
    set_attention_window(model, 12, 2)
    report = audit_model(model)
    assert (
        report.undeclared == TINY
        and report["in-batches"].verdict == report["in-training"].verdict == "conforms"
    )


@pytest.mark.full
def test_a_later_layer_that_reads_nothing() -> None:
    assert (
        audit_model(converted("llama", eta=(1.0, 0.0)))["every-layer"].outcome.found
        == "layers 2 differ from layer 0"
    )


@pytest.mark.full
def test_a_relative_clip_by_another_norm_in_a_later_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FastWeight.w0_norm
    monkeypatch.setattr(FastWeight, "w0_norm", lambda layer: right(layer) * (10 if layer.fast.layer else 1))
    report = audit_model(converted("llama", clip=UpdateClip(0.1, relative=True)))
    assert [id for id in report.undeclared if id not in TINY] == ["every-layer"]


def test_a_prompt_that_is_written_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    right, model = (
        prompt_stream.ridge_write,
        converted("llama", **{**InPlaceTTTConfig.preset("ttt_ntp").to_dict(), "layers": [0, 2]}),
    )
    assert declared_rule(WholeModel(model), None).verdict == "conforms"
    for wrong in (lambda k, v, *rest: right(k[1:], v[1:], *rest), lambda *given: 0.9 * right(*given)):
        monkeypatch.setattr(prompt_stream, "ridge_write", wrong)
        assert "a written prompt" in declared_rule(WholeModel(model), None).found


def test_spectral_writes_in_half_precision() -> None:
    """Which no P makes larger: they are small beside the rounding of outputs."""
    model = converted(
        "llama", target="hidden_states", conv="next", write_norm="spectral", preserve_row_norms=True, eta=0.02
    )
    assert declared_rule(WholeModel(model.to(torch.bfloat16)), None).verdict == "conforms"


def test_settings_of_generation_play_no_part() -> None:
    model = converted("llama")
    model.generation_config = GenerationConfig(
        use_cache=False, num_beams=2, stop_strings=["x"], eos_token_id=list(range(97))
    )
    reading, own = WholeModel(model).after_reading, model.generation_config
    assert reading.layers == [0, 2] and reading.changed == [] and own.stop_strings == ["x"]


@pytest.mark.full
def test_an_eta_that_float16_cannot_make_up_for() -> None:
    assert audit_model(converted("llama", eta=1e-5))["precisions"].verdict == "conforms"


@pytest.mark.full
def test_a_four_bit_base(tmp_path: Path) -> None:
    """Where W0 cannot be read as one matrix, what needs it is not checked, and the rest is."""
    build("llama", hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=128).save_pretrained(
        tmp_path
    )
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four_bit, dtype=torch.float32, device_map="cpu"
    )
    report = audit_model(convert(quantized, InPlaceTTTConfig(layers=(0, 2))))
    assert report.undeclared == ["layer-spacing"]
    assert [r.item.id for r in report.items if "quantized or wrapped" in r.outcome.found] == [
        "fast-tensor",
        "reset-keeps-training",
    ]
    ridge = {"update_rule": "ridge", "ridge": 0.03, "whitening": {"rank": 0.5}}
    model = convert(revert(quantized), InPlaceTTTConfig(layers=(0, 2), **ridge))
    calibrate(model, [random_ids(1, 64)])
    report = audit_model(model)
    assert (
        report.undeclared == ["layer-spacing"]
        and report["least-squares"].verdict == report["keys"].verdict == "extension"
    )
