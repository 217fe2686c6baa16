"""A recipe's model: where it comes from, what of it is trained, what is refused; ZeRO-3."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import distance, logits
from peft import PeftModel
from tiny import word_level

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, load, revert
from inplace_ttt.surgery import config_of, fast_weights
from inplace_ttt.training.model import build_model, meta_model
from inplace_ttt.training.recipe.recipe import Recipe
from inplace_ttt.training.run.worker import read_tokenizer

from . import zero3_worker
from .forked import Forked
from .recipes import CONFIG, VALUES, tiny_recipe
from .runs import environments
from .saved_models import IDS, LORA, at

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its ids have no embedding, where the first batch would end in an IndexError."""
    recipe = tiny_recipe(tmp_path, model={**VALUES["model"], "tokenizer": str(tmp_path / "words")})
    known = CONFIG["vocab_size"]
    word_level(f"t{i}" for i in range(3, known)).save_pretrained(tmp_path / "words")
    assert len(read_tokenizer(recipe, meta_model(recipe))) == known
    word_level(f"t{i}" for i in range(3, known + 5)).save_pretrained(tmp_path / "words")
    with pytest.raises(
        InPlaceTTTError, match=f"words has the tokenizer of another model: it gives ids up to {known + 4}"
    ):
        read_tokenizer(recipe, meta_model(recipe))


def test_from_scratch_starts_as_a_fresh_conversion(tmp_path: Path) -> None:
    model = build_model(tiny_recipe(tmp_path))
    assert model.config.model_type == "mistral" and model.dtype == torch.float32
    for layer in fast_weights(model).values():
        assert not layer.ttt.conv.any()
        diagonal = layer.ttt.proj.diagonal()
        assert torch.equal(layer.ttt.proj.detach(), diagonal.diag()) and 0.15 < diagonal.std() < 0.45
    assert 0.28 < model.model.layers[1].mlp.down_proj.weight.std() < 0.32
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), build_model(tiny_recipe(tmp_path)).parameters(), strict=True)
    ), "the seed decides"
    other = build_model(tiny_recipe(tmp_path, "training.seed=1"))
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_every_form_of_a_checkpoint(saved: dict[str, Path], tmp_path: Path) -> None:
    expected = logits(load(saved["full"]), IDS)
    for form in ("full", "adapter"):
        model = build_model(tiny_recipe(tmp_path, **at(saved[form])))
        assert torch.equal(logits(model, IDS), expected), form
    base = build_model(
        tiny_recipe(tmp_path, **{**at(saved["base"]), "ttt": {"layers": [1], "chunk_size": 8, "eta": 0.5}})
    )
    assert config_of(base) == InPlaceTTTConfig(layers=(1,), chunk_size=8, eta=0.5)
    assert distance(logits(base, IDS), expected) > 0.01


def test_dtype_and_attention(saved: dict[str, Path], tmp_path: Path) -> None:
    model = build_model(
        tiny_recipe(tmp_path, **at(saved["full"], dtype="bfloat16", attn_implementation="eager"))
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("form", ["full", "adapter", "base"])
def test_overrides_reach_the_model(form: str, saved: dict[str, Path], tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    sections = at(
        saved[form], overrides={"rope_parameters": yarn, "max_position_embeddings": 2048, "sliding_window": 8}
    )
    if form == "base":
        sections["ttt"] = {"layers": [0], "chunk_size": 16}
    plain = build_model(
        tiny_recipe(tmp_path, **{**sections, "model": {**sections["model"], "overrides": {}}})
    )
    model = build_model(tiny_recipe(tmp_path, **sections))
    assert model.config.rope_parameters == {**yarn, "rope_theta": plain.config.rope_parameters["rope_theta"]}
    assert (model.config.max_position_embeddings, model.config.sliding_window) == (2048, 8)
    assert not torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    meta = meta_model(tiny_recipe(tmp_path, **sections))
    assert meta.config.rope_parameters == model.config.rope_parameters


def test_a_window_over_a_family_with_layer_types(tmp_path: Path) -> None:
    config = {
        **{k: v for k, v in CONFIG.items() if k != "sliding_window"},
        "model_type": "qwen3",
        "head_dim": 8,
    }
    base = tmp_path / "qwen"
    revert(build_model(tiny_recipe(tmp_path, model={"config": config, "tokenizer": "x"}))).save_pretrained(
        base
    )
    assert json.loads((base / "config.json").read_text())["layer_types"] == ["full_attention"] * 3
    sections = {
        **at(base, overrides={"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0})
    }
    sections["ttt"] = {"layers": [0], "chunk_size": 16}
    assert build_model(tiny_recipe(tmp_path, **sections)).config.layer_types == ["sliding_attention"] * 3
    sections["model"]["overrides"] = {"sliding_window": 16}
    with pytest.raises(
        InPlaceTTTError,
        match="no layer would use the window; set use_sliding_window: true and max_window_layers: 0",
    ):
        build_model(tiny_recipe(tmp_path, **sections))


@pytest.mark.parametrize("train", ["all", "ttt", "lora"])
def test_what_is_trained(train: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, training={"trainable": train, "steps": 1})
    model = build_model(recipe)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    ttt = {name for name in trained if ".ttt." in name}
    assert len(ttt) == 4
    lora = {name for name in trained if ".lora_" in name}
    assert len(lora) == (3 * 6 * 2 if train == "lora" else 0)
    assert (len(trained - ttt - lora) > 0) == (train == "all")
    assert isinstance(model, PeftModel) == (train == "lora")
    meta = meta_model(recipe)
    described = [
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in m.named_parameters()] for m in (model, meta)
    ]
    assert described[0] == described[1]
    assert {p.device.type for p in meta.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "deepspeed=3",
            "deepspeed: with target='gradient' ranks read unequal numbers of chunks, which ZeRO-3 does not allow; "
            "set stage 2",
        ),
        (
            "parallel={nproc_per_node: 2, sequence_parallel_size: 2}",
            "parallel.sequence_parallel_size: target='gradient' reads whole rows",
        ),
        (
            "training.trainable=ttt",
            "training.trainable: a model with target='gradient' lacks TTT parameters",
        ),
    ],
)
def test_what_loss_gradients_cannot_be_trained_with(
    setting: str, message: str, reads_by_gradient: Path, tmp_path: Path
) -> None:
    for build in (build_model, meta_model):
        with pytest.raises(InPlaceTTTError, match=message):
            build(tiny_recipe(tmp_path, setting, **at(reads_by_gradient)))


@pytest.mark.parametrize(
    ("overrides", "sections", "message"),
    [
        (
            ["ttt=null"],
            {},
            "ttt: a model from scratch is not converted and the section ttt is missing; add it",
        ),
        (
            ["model.config.hiden_size=3"],
            {},
            "model.config.hiden_size: the config of a mistral lacks this value",
        ),
        (["model.config.hidden_size=big"], {}, "model.config: .*hidden_size.*expected int"),
        (
            ["model.config.model_type=perceptron"],
            {},
            "model.config: model_type 'perceptron' is not one of transformers' model types",
        ),
        (["model.config.model_type=vit"], {}, "the config of a vit lacks this value"),
        (["model.overrides.widow=3"], {}, "model.overrides.widow: the config of a mistral lacks this value"),
        (
            ["model.overrides.rope_parameters={rope_type: yarn, factor: 4.0}"],
            {},
            "add original_max_position_embeddings",
        ),
        (
            ["model.overrides.rope_parameters={factor: 4.0}"],
            {},
            "plain RoPE reads no factor; add the rope_type, such as yarn",
        ),
        (["ttt.layers=[0, 3]"], {}, r"layers \[3\] do not exist: the model has 3 layers"),
        (["model.attn_implementation=flash_attention_2"], {}, "model: FlashAttention2"),
        ([], at(Path("./nowhere")), "model.path: nowhere does not exist; give a model folder or a hub id"),
        ([], at(Path(__file__).parent), "model.path: .* lacks a config.json"),
        (
            [],
            {"training": {**LORA, "lora": {"targets": ["q_proj", "down_proj"]}}},
            "is the fast weight of layer 0.*leave down_proj out",
        ),
        ([], {"training": {**LORA, "lora": {"targets": "all-linear"}}}, "is the fast weight of layer 0"),
        (
            [],
            {"training": {**LORA, "lora": {"targets": ["q_proj", "qproj"]}}},
            "lora.targets: no module of the mistral is called .*qproj",
        ),
    ],
)
def test_refusals(overrides: list[str], sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=message) as refusal:
        build_model(tiny_recipe(tmp_path, *overrides, **sections))
    assert "\n" not in str(refusal.value)


def test_surgery_belongs_to_what_is_not_converted(saved: dict[str, Path], tmp_path: Path) -> None:
    for form in ("full", "adapter"):
        with pytest.raises(
            InPlaceTTTError, match="is converted already, so ttt does nothing; remove the section"
        ):
            build_model(tiny_recipe(tmp_path, **{**at(saved[form]), "ttt": {"chunk_size": 16}}))
    with pytest.raises(InPlaceTTTError, match="is not converted and the section ttt is missing"):
        meta_model(tiny_recipe(tmp_path, **at(saved["base"])))


def test_zero3(saved: dict[str, Path], tmp_path: Path) -> None:
    """Partitioned while loading, the model has the values that it has without DeepSpeed, and trains."""
    recipes = {}
    for form in ("full", "adapter", "base", "scratch", "ttt", "lora"):
        sections = {} if form == "scratch" else at(saved.get(form, saved["full"]))
        if form == "base":
            sections["ttt"] = {"layers": [0, 2], "chunk_size": 16}
        (tmp_path / f"zero3-{form}").mkdir()
        train = form if form in ("ttt", "lora") else "all"
        recipes[form] = tiny_recipe(
            tmp_path / f"zero3-{form}", **sections, training={"trainable": train, "steps": 1}
        )
    for (form, recipe), found in zip(recipes.items(), under_zero3(*recipes.values()), strict=True):
        plain = build_model(recipe)
        assert set(found["values"]) == {name for name, _ in plain.named_parameters()}
        if form != "scratch":  # transformers initializes a partitioned model in another order
            assert found["values"] == {
                n: pytest.approx(p.double().abs().sum().item()) for n, p in plain.named_parameters()
            }, form
            loss = plain.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.item()
            assert found["losses"][0] == pytest.approx(loss, abs=1e-4), form
        assert found["losses"][-1] < found["losses"][0], form


def under_zero3(*recipes: Recipe) -> list[dict[str, Any]]:
    (environment,) = environments(1)
    code, log = Forked(
        functools.partial(zero3_worker.main, [str(recipe.path) for recipe in recipes]), [environment]
    ).wait()
    assert code == 0, log[-3000:]
    return json.loads(log.split("RESULT ")[1].splitlines()[0])
