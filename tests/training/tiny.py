"""A recipe for a model of a few thousand parameters."""

from pathlib import Path
from typing import Any

import yaml

from inplace_ttt.training.recipe import Recipe, load_recipe

CONFIG: dict[str, Any] = dict(
    model_type="mistral",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    sliding_window=16,
    rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    initializer_range=0.3,
)
VALUES: dict[str, Any] = {
    "model": {"config": CONFIG, "tokenizer": "nowhere", "dtype": "float32"},
    "surgery": {"layers": [0, 2], "chunk_size": 16},
    "data": {"train": "nowhere.txt", "sequence_length": 64},
    "optimisation": {"steps": 2},
    "output": "out",
}


def write_recipe(folder: Path, **sections: Any) -> Path:
    """The tiny recipe as a file; a section given replaces the one above, None removes it."""
    values = {**VALUES, **sections}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}), encoding="utf-8")
    return file


def tiny_recipe(folder: Path, *overrides: str, **sections: Any) -> Recipe:
    return load_recipe(write_recipe(folder, **sections), overrides)
