"""Mixtures of experts: shared experts and dense layers converted, planned, trained, evaluated and read with,
by the command line."""

import json
from pathlib import Path

import pytest
import torch
from families import build
from models import distance, random_ids, streamed
from tiny import word_level

from inplace_ttt import cli, load
from inplace_ttt.surgery import disable_ttt, fast_weights

from .recipes import CONFIG
from .runs import CHUNK, documents, recipe_file, trained, weights

WIDTHS = {"qwen2_moe": {1: 40, 2: 40}, "deepseek_v3": {0: 48, 2: 24}}


@pytest.fixture(params=list(WIDTHS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A converted folder."""
    base = tmp_path / "base"
    build(family).save_pretrained(base)
    word_level(f"t{i}" for i in range(3, CONFIG["vocab_size"])).save_pretrained(base)
    layers = ",".join(map(str, WIDTHS[family]))
    assert (
        cli.main(
            ["convert", str(base), str(tmp_path / "model"), "--layers", layers, "--chunk-size", str(CHUNK)]
        )
        == 0
    )
    assert cli.main(["info", str(tmp_path / "model"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["fast_weights"] == [[32, width] for width in WIDTHS[family].values()]
    return tmp_path / "model"


@pytest.mark.parametrize(("train", "stage"), [("all", 2), ("all", 3), ("lora", 2)])
@pytest.mark.sample(1)
def test_it_trains(family: str, model: Path, tmp_path: Path, train: str, stage: int) -> None:
    training = {
        "trainable": train,
        **({"lora": {"rank": 4, "alpha": 8, "targets": ["o_proj"]}} if train == "lora" else {}),
    }
    recipe = recipe_file(tmp_path, model, documents(tmp_path / "text"), training=training, deepspeed=stage)
    assert cli.main(["plan", str(recipe), "--json"]) == 0
    report, _ = trained(recipe)
    final = weights(tmp_path / "out" / "final")
    written = {name: tensor for name, tensor in final.items() if name.endswith("ttt.conv")}
    assert report["steps"] == 3 and len(written) == 2 and all(tensor.any() for tensor in written.values())
    if train == "all":
        reads_what_it_wrote(family, tmp_path / "out" / "final")


def reads_what_it_wrote(family: str, folder: Path) -> None:
    """In pieces as in one, and not as without writes."""
    trained_model, ids = load(folder), random_ids(2, 5 * CHUNK + 3)
    layers = fast_weights(trained_model)
    assert {index: layer.in_features for index, layer in layers.items()} == WIDTHS[family]
    for layer in layers.values():
        layer.ttt.conv.data.mul_(1e3)  # three steps write little
    with torch.no_grad():
        whole = trained_model(input_ids=ids, use_cache=False).logits
        with disable_ttt(trained_model):
            without = trained_model(input_ids=ids, use_cache=False).logits
    assert (
        distance(streamed(trained_model, ids, [CHUNK + 5, 2, CHUNK, 3 * CHUNK - 4]), whole) < 1e-5
        and distance(whole, without) > 1e-3
    )
