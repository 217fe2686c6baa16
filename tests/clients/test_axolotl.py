"""Axolotl with our plugin: its own command on the YAML of docs/clients.md, and its own reader of settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from transformers import AutoModelForCausalLM

from inplace_ttt.surgery import fast_weights

pytest.importorskip("axolotl", reason="Axolotl is not installed here; `make test-clients` does it")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
PLUGIN = "inplace_ttt.clients.axolotl.InPlaceTTTPlugin"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's, in a folder that has what they name."""
    monkeypatch.chdir(tmp_path)
    words = tiny.byte_level()
    tiny.save_llama(
        tmp_path / "smollm2-135m",
        words,
        num_hidden_layers=7,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    tiny.write_lines(tmp_path / "texts.jsonl", [{"text": tiny.text(200, seed=i)} for i in range(40)])
    return yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0])


def axolotl(settings: dict[str, Any], **changes: Any) -> subprocess.CompletedProcess[str]:
    Path("axolotl.yaml").write_text(yaml.safe_dump({**settings, **changes}))
    environment = {**os.environ, "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        str(Path(sys.executable).with_name("axolotl")),
        "train",
        "axolotl.yaml",
        "--launcher",
        "python",
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def lines() -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path("axolotl-ttt/log.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


def test_the_page_is_true(settings: dict[str, Any]) -> None:
    """Five steps on packed rows with the documents apart; then the same run two steps further."""
    done = axolotl(settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5]
    # of one document; the last row is half padding
    assert {layer["chunks"] for line in lines()[:4] for layer in line["layers"]} == {3}
    model = AutoModelForCausalLM.from_pretrained("axolotl-ttt")
    for layer in fast_weights(model).values():
        # by its own rate, ten times the other
        assert layer.eta == 1.0 and layer.chunk_size == 64 and layer.ttt.conv.abs().max() > 1e-3
    done = axolotl(settings, max_steps=7, resume_from_checkpoint="./axolotl-ttt/checkpoint-5")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5, 6, 7]


def test_lora_beside_conv_and_p(settings: dict[str, Any]) -> None:
    lora = {
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_steps": 3,
    }
    done = axolotl(settings, **lora)
    assert done.returncode != 0 and "conv and P are frozen, so nothing would learn to write" in done.stderr
    done = axolotl(settings, **lora, lora_modules_to_save=["ttt"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(layer["gradients"]["conv"] > 0 for layer in lines()[-1]["layers"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"ttt": {"chunk_sise": 4}}, "inplace_ttt, ttt.chunk_sise: unknown setting"),
        ({"ttt": {"chunk_size": "many"}}, "inplace_ttt, ttt.chunk_size: must be a whole number"),
        (
            {"training": {"conv_learning_rate": -1}},
            "inplace_ttt, training: conv_learning_rate must be a number above 0, got -1",
        ),
        ({"rates": {}}, "inplace_ttt, rates: unknown setting; known here: ttt, training"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_where_axolotl_reads_them(
    settings: dict[str, Any], section: dict[str, Any], message: str
) -> None:
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    values = DictDefault({**settings, "inplace_ttt": section})
    prepare_plugins(values)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_config(values)


def test_a_surgery_too_much_or_too_little_is_refused(settings: dict[str, Any]) -> None:
    """Through Axolotl's own manager, which calls the plugin on the built model."""
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register(PLUGIN)
    model = AutoModelForCausalLM.from_pretrained("smollm2-135m")
    with pytest.raises(ValueError, match=r"the model is not converted and inplace_ttt\.ttt is missing"):
        manager.post_model_build(DictDefault({"inplace_ttt": None}), model)
    with pytest.raises(ValueError, match="need measurements on a text"):
        manager.post_model_build(DictDefault({"inplace_ttt": {"ttt": {"preset": "ridge"}}}), model)
    manager.post_model_build(DictDefault(settings), model)
    assert list(fast_weights(model)) == [0, 6]
    with pytest.raises(ValueError, match=r"converted already, so inplace_ttt\.ttt does nothing"):
        manager.post_model_build(DictDefault(settings), model)
