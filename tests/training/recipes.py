"""Recipes for a model of a few thousand parameters, and for one of a few million."""

from pathlib import Path
from typing import Any

import yaml
from families import COMMON, WINDOW

from inplace_ttt.training.recipe.recipe import Recipe, load_recipe

CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    **{key: value for key, value in COMMON.items() if not key.endswith("token_id")},
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
VALUES: dict[str, Any] = {
    "model": {"config": CONFIG, "tokenizer": "nowhere", "dtype": "float32"},
    "ttt": {"layers": [0, 2], "chunk_size": 16},
    "data": {"train": "nowhere.txt", "sequence_length": 64},
    "training": {"steps": 2},
    "output": "out",
}


def write_recipe(folder: Path, **sections: Any) -> Path:
    """The tiny recipe as a file; a section given replaces the one above, None removes it."""
    values = {**VALUES, **sections}
    file = folder / "tiny.yaml"
    file.write_text(
        yaml.safe_dump({key: value for key, value in values.items() if value is not None}), encoding="utf-8"
    )
    return file


def tiny_recipe(folder: Path, *overrides: str, **sections: Any) -> Recipe:
    return load_recipe(write_recipe(folder, **sections), overrides)


SMALL = dict(
    model_type="llama",
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


EXPERTS = dict(
    model_type="qwen2_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=1024,
)


def small_recipe(
    folder: Path, dtype: str, checkpointing: bool, vocabulary: int = 4096, length: int = 1024, **config: Any
) -> Recipe:
    """One document of `length` tokens, trained with every parameter."""
    return tiny_recipe(
        folder,
        model={"config": {**SMALL, "vocab_size": vocabulary, **config}, "tokenizer": "x", "dtype": dtype},
        ttt={"layers": [0, 2], "chunk_size": 128},
        data={"train": "x", "sequence_length": length},
        training={"steps": 1, "gradient_checkpointing": checkpointing},
    )
