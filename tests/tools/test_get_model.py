"""A GGUF file becomes the model and the tokenizer it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gemma3
import numpy as np
import pytest
import smollm2
from _gguf import SPECIAL, USER_DEFINED


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to q and k, row by row: (i, i + half) of a head becomes (2i, 2i + 1)."""
    permuted, half = np.empty_like(weight), len(weight) // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            permuted[start + 2 * i] = weight[start + i]
            permuted[start + 2 * i + 1] = weight[start + half + i]
    return permuted


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 4), (9, 64)])
def test_undo_permutation_is_the_inverse(heads: int, head_dim: int) -> None:
    weight = np.random.default_rng(0).normal(size=(heads * head_dim, 5)).astype(np.float32)
    np.testing.assert_array_equal(smollm2.undo_permutation(permute(weight, heads), heads), weight)


def byte_vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<unk>", "<bos>", "<eos>", *sorted(ByteLevel.alphabet())]


def test_digits_are_split_one_by_one() -> None:
    merges = ["1 2", "a b", "Ġ a"]
    tokens = [*byte_vocabulary(), *(merge.replace(" ", "") for merge in merges)]
    tokenizer = smollm2.build_tokenizer(tokens, merges, tokens[:3])
    assert tokenizer.encode("ab 12 a<eos>").tokens == ["ab", "Ġ", "1", "2", "Ġa", "<eos>"]
    text = "naïve “日本語” 🙂 2024\n\n  x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def write_gguf(path: Path, model: Any, tokens: list[str], merges: list[str]) -> None:
    """Write a Hugging Face Llama the way llama.cpp's converter does: its names, its row order."""
    import gguf

    config = model.config
    names = {hf: name for name, hf in smollm2.GLOBAL_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        for part, hf in smollm2.LAYER_NAMES.items():
            names[f"model.layers.{layer}.{hf}.weight"] = f"blk.{layer}.{part}.weight"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(tokens)
    writer.add_token_types([SPECIAL if token.startswith("<") and token != "<" else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}")
    for name, parameter in model.named_parameters():
        array, part = parameter.detach().numpy(), name.split(".")[-2]
        writer.add_tensor(names[name], permute(array, heads[part]) if part in heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converted_gguf_is_the_model_it_came_from(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokens = [*byte_vocabulary(), "12", "ab"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    write_gguf(tmp_path / "tiny.gguf", model, tokens, ["1 2", "a b"])
    smollm2.write_model(tmp_path / "tiny.gguf", tmp_path / "hf", "float32")

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(len(tokens), (2, 40))
    torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=0)
    keys = ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings")
    assert {key: getattr(converted.config, key) for key in keys} == {
        key: getattr(config, key) for key in keys
    }
    assert (converted.config.bos_token_id, converted.config.eos_token_id, converted.config.pad_token_id) == (
        1,
        2,
        2,
    )

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<eos>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<bos>a<eos>"

    smollm2.write_model(tmp_path / "tiny.gguf", tmp_path / "half", "bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def write_gemma(path: Path, model: Any, tokens: list[str], types: list[int]) -> None:
    """As llama.cpp's converter does: its names, one added to every norm, scores that fall from piece to
    piece."""
    import gguf

    config = model.config
    names = {hf: name for name, hf in gemma3.GLOBAL_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        for part, hf in gemma3.LAYER_NAMES.items():
            names[f"model.layers.{layer}.{hf}.weight"] = f"blk.{layer}.{part}.weight"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) if kind == 1 else -1000.0 for index, kind in enumerate(types)])
    writer.add_token_types(types)
    for role, index in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(True)
    for name, parameter in model.named_parameters():
        writer.add_tensor(names[name], parameter.detach().numpy() + (1 if "norm" in name else 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gemma_is_the_model_it_came_from(tmp_path: Path) -> None:
    """Windowed layers with positions of their own, and a tokenizer whose runs of spaces and newlines are
    found before merges."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    special, found_first = ["<pad>", "<eos>", "<bos>", "<unk>"], ["\n\n", "  "]
    letters = [*"▁abcdet", "at", "▁at", "ta", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = special + found_first + letters
    types = [SPECIAL] * 4 + [USER_DEFINED] * 2 + [6 if token.startswith("<0x") else 1 for token in letters]
    config = Gemma3TextConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=64,
        sliding_window=8,
        initializer_range=0.5,
        rms_norm_eps=1e-6,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    write_gemma(tmp_path / "tiny.gguf", model, tokens, types)
    gemma3.write_model(tmp_path / "tiny.gguf", tmp_path / "hf", "float32")

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(len(tokens), (2, 40))
    assert config.layer_types == converted.config.layer_types and config.layer_types[5] == "full_attention"
    # one added to norms, and taken off again
    torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=1e-4)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "at ta\n\n  beat 🙂"
    read = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(read)[:9] == [
        "<bos>",
        "at",
        "▁",
        "ta",
        "\n\n",
        "  ",
        "b",
        "e",
        "at",
    ]
    assert tokenizer.decode(read, skip_special_tokens=True) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
