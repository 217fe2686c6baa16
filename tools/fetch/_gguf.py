"""Reads a model out of a GGUF file, for any of the models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _fetch import Archive

if TYPE_CHECKING:  # heavy imports wait until a conversion needs them
    import numpy as np
    from transformers import PretrainedConfig

SPECIAL, USER_DEFINED = 3, 4
"""GGUF types of tokens: control tokens, and tokens that are found in a text before any merge."""


@dataclass(frozen=True)
class Member:
    """Parts of the wanted file, each a file inside an archive."""

    archive: Archive
    name: str


class GGUF:
    """An open file: its metadata, and its tensors in full precision under Hugging Face's names."""

    def __init__(self, file: Path, global_names: dict[str, str], layer_names: dict[str, str]) -> None:
        from gguf import GGUFReader

        self.reader = GGUFReader(file)
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in self.reader.fields.items()}
        self.global_names, self.layer_names = global_names, layer_names

    def tensors(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """(`attn_q`, `model.layers.3.self_attn.q_proj.weight`, array) of `blk.3.attn_q.weight`, and so on."""
        from gguf import dequantize

        for tensor in self.reader.tensors:
            yield (
                tensor.name.split(".")[-2],
                self.hf_name(tensor.name),
                dequantize(tensor.data, tensor.tensor_type),
            )

    def hf_name(self, name: str) -> str:
        """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
        if name in self.global_names:
            return self.global_names[name]
        _, layer, part, kind = name.split(".")
        return f"model.layers.{layer}.{self.layer_names[part]}.{kind}"

    def tokens_of(self, wanted: int) -> list[str]:
        """Returns the tokens of a type."""
        tokens, kinds = (self.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
        return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]

    def token(self, role: str) -> str:
        """Returns the token of a role: `bos`, `eos`, `padding` or `unknown`."""
        token: str = self.metadata["tokenizer.ggml.tokens"][self.metadata[f"tokenizer.ggml.{role}_token_id"]]
        return token


def short(value: float) -> float:
    """Returns the decimal number that a float32 stands for: GGUF keeps 1e-05 as 9.99999975e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def save(config: PretrainedConfig, weights: dict[str, np.ndarray], folder: Path) -> None:
    """Returns the model of a config with tied embeddings, in the config's dtype. Every name and shape must
    fit."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).to(config.dtype)
    tensors = {name: torch.tensor(array) for name, array in weights.items()}
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    model.save_pretrained(folder)
