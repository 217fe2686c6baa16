"""Small converted checkpoints of every family that vLLM serves, with writes that change what is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.surgery import config_of, fast_weights

WIDE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3Text", GEMMA),
}
CHUNK = 32
LIVE = {"paper": {"eta": 0.3}, "reference": {"eta": 0.3}, "ridge": {"write_gate": True}}
"""Settings of the presets, for a chunk of 32 tokens."""


def base(family: str) -> PreTrainedModel:
    """A random model, its logits far enough apart that rounding does not change a choice."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**WIDE, **settings)
    config.initializer_range = 0.2
    architecture = {"Gemma3Text": "Gemma3"}.get(name, name)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    if family == "gemma3":  # whose embeddings would say all the rest of it
        model.get_input_embeddings().weight.data *= 0.1
    return model


def save(path: Path, family: str = "llama", preset: str = "paper", **settings: Any) -> PreTrainedModel:
    """The converted model, saved to `path`."""
    model = convert(
        base(family),
        InPlaceTTTConfig.preset(preset, layers=(1, 3), chunk_size=CHUNK, **{**LIVE[preset], **settings}),
    )
    if config_of(model).needs_calibration:
        calibrate(model, [torch.randint(3, 512, (1, 512), generator=torch.Generator().manual_seed(1))])
    write(model)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def write(model: PreTrainedModel) -> None:
    """Draw what a training would have made of the convolution, P and the gate of writes."""
    torch.manual_seed(2)
    for layer in fast_weights(model).values():
        if layer.ttt.conv is not None:
            layer.ttt.conv.normal_(0, 0.2)
        if layer.ttt.proj_init != "calibrated":
            layer.ttt.proj.normal_(0, 0.1)
        if layer.ttt.gate is not None:
            layer.ttt.gate.normal_()


def save_tokenizer(path: Path) -> None:
    """Token n is the word wn."""
    special = {0: "<pad>", 2: "</s>", 3: "<unk>"}
    vocabulary = Tokenizer(
        WordLevel({special.get(n, f"w{n}"): n for n in range(WIDE["vocab_size"])}, unk_token=special[3])
    )
    vocabulary.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, eos_token=special[2], pad_token=special[0], unk_token=special[3]
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)
