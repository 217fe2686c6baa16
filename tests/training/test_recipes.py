"""Every shipped recipe parses, builds its model at toy size, computes a loss, and is planned without a
warning."""

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_ids
from transformers import AutoConfig, AutoModelForCausalLM

from inplace_ttt import InPlaceTTTConfig, convert
from inplace_ttt.calibration.calibrate import calibrate
from inplace_ttt.cli.options import convert as convert_options
from inplace_ttt.config_tables import KeyWhitening
from inplace_ttt.surgery import config_of, fast_weights, is_converted
from inplace_ttt.training.audit import gate
from inplace_ttt.training.model import build_model, meta_model
from inplace_ttt.training.plan import plan
from inplace_ttt.training.plan.meta_step import StepCost
from inplace_ttt.training.recipe.recipe import Recipe, load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
SMOLLM2 = FOLDER / "configs" / "HuggingFaceTB--SmolLM2-135M.json"
TOY: dict[str, Any] = {"intermediate_size": 48, "head_dim": 8, "vocab_size": 97, "initializer_range": 0.3}


@dataclasses.dataclass(frozen=True)
class Run:
    """A recipe, or one with settings put over it by a command that stands in its first comment."""

    file: Path
    settings: tuple[str, ...] = ()

    def load(self, *changes: str) -> Recipe:
        return load_recipe(self.file, [*self.settings, *changes])

    @property
    def name(self) -> str:
        """Of the recipe, or of the folder that the command writes into."""
        return Path(self.load().output).name if self.settings else self.file.stem


def runs_of(file: Path) -> Iterator[Run]:
    yield Run(file)
    head = file.read_text(encoding="utf-8").partition("model:")[0]
    for line in head.replace("\\\n#", " ").splitlines():
        if line.startswith("#   inplace-ttt train recipes/") and "--set" in line:
            _, _, _, path, *words = shlex.split(line)
            assert Path(path).name == file.name and set(words[::2]) == {"--set"}
            yield Run(file, tuple(words[1::2]))


RUNS = [run for file in FILES for run in runs_of(file)]
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


def architecture_of(recipe: Recipe) -> dict[str, Any] | None:
    """The config of the model that a recipe names; None for one that is made from scratch."""
    path = recipe.model.path
    if path is None:
        return None
    path = conversion.src if (conversion := conversion_of(recipe)) is not None else path
    known = FOLDER / "configs" / f"{path.replace('/', '--')}.json"
    if path.startswith("runs/"):  # what an earlier recipe leaves
        return architecture_of(earlier(recipe))
    return json.loads((SMOLLM2 if path.startswith(".cache/") else known).read_text())


def conversion_of(recipe: Recipe) -> argparse.Namespace | None:
    """The arguments of the `convert` that the recipe's first comment names for its model; None without one."""
    assert recipe.path is not None
    for line in recipe.path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#   inplace-ttt convert "):
            parser = argparse.ArgumentParser()
            convert_options.add_arguments(parser)
            args = parser.parse_args(shlex.split(line)[3:])
            assert args.out == recipe.model.path and args.calibrate == recipe.data.train
            return args
    return None


def settings_of(recipe: Recipe) -> InPlaceTTTConfig:
    """The settings of the conversion that a recipe trains."""
    if (conversion := conversion_of(recipe)) is not None:
        return convert_options.chosen_config(conversion)
    settings = recipe.ttt or earlier(recipe).ttt
    assert settings is not None
    return settings


def earlier(recipe: Recipe) -> Recipe:
    """The recipe that makes the checkpoint from which this one goes on."""
    assert recipe.model.path is not None
    return load_recipe(FOLDER / f"{Path(recipe.model.path).parent.name}.yaml")


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """The same kind of model with all its layers, and few channels; as many query heads to a key head."""
    heads = values["num_attention_heads"]
    groups = heads // (values.get("num_key_value_heads") or heads)
    return {
        **values,
        **TOY,
        "hidden_size": 16 * groups,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
    }


def at_toy_size(run: Run, folder: Path) -> Recipe:
    """The recipe with a toy model of the same structure, in the forms that run on a CPU without more
    packages."""
    recipe = run.load()
    changes = [
        "model.attn_implementation=sdpa",
        "training.liger=false",
        "model.dtype=float32",
        "model.load_in=null",
    ]
    values = architecture_of(recipe)
    if values is None:
        small = shrunk(recipe.model.config or {}) if recipe.data.recall is None else recipe.model.config
        return run.load(*changes, f"model.config={json.dumps(small)}")
    (folder / "config.json").write_text(json.dumps(shrunk(values)))
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    base.save_pretrained(folder)
    changes.append(f"model.path={folder}")
    if conversion_of(recipe) is not None:
        narrow = dataclasses.replace(settings_of(recipe), whitening=KeyWhitening(rank=16))
        calibrate(convert(base, narrow), [random_ids(1, 64, seed=2)])
        base.save_pretrained(folder / "converted")
        changes[-1] = f"model.path={folder / 'converted'}"
    elif (recipe.model.path or "").startswith("runs/"):
        first = load_recipe(FOLDER / f"{earlier(recipe).path.stem}.yaml", changes)  # type: ignore[union-attr]
        build_model(first).save_pretrained(folder / "converted")
        changes[-1] = f"model.path={folder / 'converted'}"
    return run.load(*changes)


@every_run
@pytest.mark.sample(3)
def test_it_builds_at_toy_size(run: Run, tmp_path: Path) -> None:
    recipe = at_toy_size(run, tmp_path)
    model = build_model(recipe)
    written = run.load()
    base = model.get_base_model() if written.training.trainable == "lora" else model
    text = base.config
    assert is_converted(model)
    layers = fast_weights(model)
    assert max(layers) < text.num_hidden_layers and len(layers) < text.num_hidden_layers
    settings = settings_of(written).resolve(text.num_hidden_layers)
    if settings.whitening is not None:  # the toy model has few channels
        settings = dataclasses.replace(settings, whitening=config_of(model).whitening)
    assert config_of(model) == settings
    for key, value in written.model.overrides.items():
        found = getattr(text, key)
        assert found == ({**found, **value} if isinstance(value, dict) else value)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert (len(trained) == 2 * len(layers)) == (written.training.trainable == "ttt")
    assert any("lora_A" in name for name in trained) == (written.training.trainable == "lora")
    ids = random_ids(1, 40)
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert loss.isfinite()


@every_run
@pytest.mark.sample(2)
def test_its_plan_warns_of_nothing(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At full size, but without the cost of a step, which takes seconds."""
    monkeypatch.setattr(plan, "step_cost", lambda recipe: StepCost(10**9, 10**9, 0, 10**12))
    recipe = full_size(run, tmp_path)
    made = plan.make_plan(recipe)
    assert made.warnings == []
    assert made.chunks_per_row >= 4 and made.steps >= 1
    if recipe.training.tokens:
        assert 0 <= made.tokens - recipe.training.tokens < made.tokens_per_step
    size = {
        "500m": 0.4,
        "1.5b": 1.5,
        "135m": 0.135,
        "demo": 0.135,
        "360m": 0.37,
        "1.7b": 1.75,
        "4b": 4.06,
        "8b": 8.2,
        "14b": 14.95,
    }
    name = next((name for name in size if name in run.name.split("-")), None)
    if name is not None:
        assert made.parameters / 1e9 == pytest.approx(size[name], rel=0.03)


def full_size(run: Run, folder: Path) -> Recipe:
    """The recipe with a model that can be found here."""
    recipe = run.load()
    path = recipe.model.path or ""
    if (conversion := conversion_of(recipe)) is not None:
        config = FOLDER / "configs" / f"{conversion.src.replace('/', '--')}.json"
        (folder / "config.json").write_text(config.read_text())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            convert(model, settings_of(recipe)).config.save_pretrained(folder / "converted")
        return run.load(f"model.path={folder / 'converted'}")
    if path.startswith("runs/"):
        return run.load(
            f"model.path={earlier(recipe).model.path}", f"ttt={json.dumps(earlier(recipe).ttt.to_dict())}"
        )
    if path.startswith(".cache/"):
        (folder / "config.json").write_text(SMOLLM2.read_text())
        return run.load(f"model.path={folder}")
    return recipe


PAPER = {
    "qwen3-4b-stage1-32k-8gpu": (32768, 20, 5e-6),
    "qwen3-4b-stage2-128k-8gpu": (131072, 15, 5e-6),
    "llama3.1-8b-32k-8gpu": (32768, 20, 5e-6),
    "llama3.1-8b-32k-2nodes": (32768, 20, 5e-6),
    "qwen3-14b-32k-8gpu": (32768, 20, 5e-6),
    "scratch-500m-32k-8gpu": (32768, 20, 5e-4),
    "scratch-1.5b-32k-8gpu": (32768, 60, 3e-4),
}
"""Tokens a row, billions of tokens, learning rate."""


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_follow_the_paper(name: str) -> None:
    """Table 6, 7 and 8: rule, length, learning rate, weight decay, tokens; and the scratch models' own
    sizes."""
    (recipe,) = (run.load() for run in RUNS if run.name == name)
    settings = settings_of(recipe)
    assert (settings.layers, settings.target, settings.kernel_size, settings.conv) == (
        "every:6",
        "embeddings",
        5,
        "lookahead",
    )
    o = recipe.training
    assert (recipe.data.sequence_length, (o.tokens or 0) / 1e9, o.learning_rate) == PAPER[name]
    assert (o.trainable, o.weight_decay, o.max_grad_norm) == ("all", 0.1, 1.0)
    if name.startswith("scratch"):
        big = "1.5b" in name
        config = recipe.model.config or {}
        sizes = [
            config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "sliding_window")
        ]
        assert sizes == ([2048, 6144, 16, 4096] if big else [1024, 3072, 8, 2048])
        assert (config["num_hidden_layers"], config["vocab_size"], config["rope_theta"]) == (24, 32000, 1e6)
        assert (o.warmup_steps, recipe.rows_per_step * 32768) == (1024, 2**22 if big else 2**21)


def test_the_reference_codes_runs_follow_it() -> None:
    reference = [run.load() for run in RUNS if "reference" in run.name]
    assert len(reference) == 2
    for recipe in reference:
        settings, o = recipe.ttt, recipe.training
        assert settings is not None and (settings.target, settings.eta, settings.chunk_size) == (
            "hidden_states",
            3.0,
            4096,
        )
        assert (recipe.data.sequence_length, o.steps, recipe.rows_per_step) == (65536, 5000, 64)
        assert (
            o.learning_rate,
            o.weight_decay,
            o.conv_weight_decay,
            o.proj_weight_decay,
            o.warmup_steps,
        ) == (5e-6, 0.1, 0.1, 0.1, 100)


def test_the_index_names_every_run_and_every_shared_file_is_used() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w.-]+)\]\(([\w.-]+)\)", index, flags=re.MULTILINE)
    assert sorted(rows) == sorted((run.name, run.file.name) for run in RUNS)
    recipes = [run.load() for run in RUNS]
    settings = {recipe.deepspeed for recipe in recipes if isinstance(recipe.deepspeed, str)}
    assert settings == {f"deepspeed/{file.name}" for file in (FOLDER / "deepspeed").iterdir()}
    models = {str(recipe.model.path).replace("/", "--") for recipe in recipes}
    assert {file.stem for file in (FOLDER / "configs").iterdir()} <= models


def test_no_two_runs_write_into_one_folder() -> None:
    outputs = [run.load().output for run in RUNS]
    assert len(set(outputs)) == len(outputs) and all(output.startswith("runs/") for output in outputs)


def test_hub_models_are_described_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = meta_model(load_recipe(FOLDER / "qwen3-4b-128k-sp8-8gpu.yaml"))
    assert model.config.rope_parameters["factor"] == 4.0 and model.config.num_hidden_layers == 36


@pytest.mark.parametrize("run", [run for run in RUNS if run.load().audit.profile], ids=lambda run: run.name)
@pytest.mark.sample(1)
def test_deviations_are_declared(run: Run, tmp_path: Path) -> None:
    """Or the run would not start. The gate that holds the toy model and the recipe against the recipe's
    profile."""
    recipe = at_toy_size(run, tmp_path)
    report = gate(build_model(recipe), recipe)
    assert (report.undeclared, report.stale_declarations) == ([], [])
