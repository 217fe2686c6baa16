"""The table of state sizes: that of docs/choose.md, from shapes that are those of public configs."""

import json
import math
from pathlib import Path

import pytest
import state_sizes
from state_sizes import MODELS, Shape

from inplace_ttt import InPlaceTTTConfig

ROOT = Path(__file__).resolve().parents[2]
KEPT = {
    "Qwen3 4B": "Qwen--Qwen3-4B-Base",
    "Qwen3 8B": "Qwen--Qwen3-8B",
    "Qwen3 14B": "Qwen--Qwen3-14B-Base",
    "Llama 3.1 8B": "meta-llama--Llama-3.1-8B",
}
"""Models whose config is in recipes/configs."""


def test_the_page_has_the_printed_table() -> None:
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    begins = "<!-- table: python tools/release/state_sizes.py -->\n"
    assert page.partition(begins)[2].partition("\n<!-- end of table -->")[0] == state_sizes.table()


@pytest.mark.parametrize("name", KEPT)
def test_shapes_are_those_of_the_kept_configs(name: str) -> None:
    config = json.loads((ROOT / "recipes" / "configs" / f"{KEPT[name]}.json").read_text(encoding="utf-8"))
    shape = MODELS[name]
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
    assert [getattr(shape, field) for field in fields] == [config[field] for field in fields]


def test_sizes_by_hand() -> None:
    """Qwen3 8B: six layers by `paper` and `ridge`, three by `gradient`; 36 layers of eight heads in the cache."""
    shape = MODELS["Qwen3 8B"]
    assert shape.state_bytes("paper") == 6 * 4096 * 12288 * 4 == 1_207_959_552
    assert shape.state_bytes("ridge") == 6 * (4096 + 1024) * 1024 * 4
    assert shape.state_bytes("gradient") == 3 * 4096 * 12288 * 4
    assert shape.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert shape.kv_bytes(8192) == 8192 * shape.kv_bytes_per_token


def test_sliding_layers_keep_their_window() -> None:
    """26 layers, of which the 6th, 12th, 18th and 24th see the whole text."""
    shape, layer = MODELS["Gemma 3 1B"], 2 * 256 * 2
    assert shape.full_layers == 4
    assert shape.kv_bytes(100) == 26 * layer * 100
    assert shape.kv_bytes(8192) == layer * (4 * 8192 + 22 * 512)


def test_a_narrow_model_keeps_fewer_directions() -> None:
    config = InPlaceTTTConfig.preset("ridge").resolve(6)
    assert Shape(64, 256, 6, 1, 8).state_bytes("ridge") == 4 * math.prod(config.state_shape(64, 256))


@pytest.mark.parametrize(
    ("count", "text"),
    [(3_072, "3.07 KB"), (62_914_560, "62.9 MB"), (1_207_959_552, "1.21 GB"), (147_456, "147 KB")],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert state_sizes.readable(count) == text
