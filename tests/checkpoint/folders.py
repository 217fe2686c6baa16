"""Tiny checkpoints on disk, in the shapes that users bring."""

import json
from pathlib import Path
from typing import Any

import torch
from families import build
from safetensors import safe_open
from safetensors.torch import load_file

from inplace_ttt.files.manifest import MANIFEST


def save_base(
    folder: Path,
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """A tiny base model, saved as transformers saves it."""
    build(name, dtype=dtype, **config).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that a folder's index, or its single file, names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    tensors = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            tensors[name] = shard.get_tensor(name)
    return tensors


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file by its name, but for manifests, which hold times."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != MANIFEST)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
