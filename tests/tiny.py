"""Tiny models with tokenizers of their own, on disk, and texts for them to read."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from inplace_ttt import InPlaceTTTConfig, convert
from inplace_ttt.surgery import fast_weights

CHUNK = 64
_WORDS = (
    "the",
    "sea",
    "a",
    "whale",
    "and",
    "ship",
    "of",
    "captain",
    "to",
    "harpoon",
    "in",
    "night",
    "magic",
    "numbers",
    "green",
    "sky",
)


def text(words: int, seed: int = 0) -> str:
    """Sentences of common words."""
    generator = random.Random(seed)
    drawn = [generator.choice(_WORDS) for _ in range(words)]
    return " ".join(word + "." * (i % 11 == 10) for i, word in enumerate(drawn))


def byte_level(special: Iterable[str] = ("<pad>", "<s>", "</s>"), **roles: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens, the first of them special; `roles` of these: pad_token, bos_token,
    eos_token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text(3000)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | roles
    )


def word_level(words: Iterable[str], begins: int = 0) -> PreTrainedTokenizerFast:
    """A word a token, from id 3 on, after <pad>, <eos> and <unk>. begins: how many <eos> it puts before every
    text, as others a BOS."""
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<eos>", "<unk>", *words))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single=["<eos>"] * begins + ["$A"], special_tokens=[("<eos>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template."""
    made = byte_level()
    turn, answer = (
        "<s>{{ m.role }}: {{ m.content }}</s>",
        "{% if add_generation_prompt %}<s>assistant: {% endif %}",
    )
    made.chat_template = "{% for m in messages %}" + turn + "{% endfor %}" + answer
    return made


def save_llama(
    folder: Path, words: PreTrainedTokenizerFast, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """A random Llama and its tokenizer."""
    words.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "initializer_range": 0.3,
        "num_key_value_heads": 2,
    }
    ids = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, **ids, **config)).to(
            dtype
        ).save_pretrained(folder)
    return folder


def save_base(folder: Path, positions: int = 4096) -> Path:
    """A random Llama of two layers and its tokenizer."""
    return save_llama(
        folder, tokenizer(), num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=positions
    )


def save_converted(base: Path, folder: Path) -> Path:
    """The base converted, with a writer that moves what the model says."""
    model = convert(
        AutoModelForCausalLM.from_pretrained(base), InPlaceTTTConfig(layers=(0,), chunk_size=CHUNK)
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in fast_weights(model).values():
            layer.ttt.conv.copy_(torch.randn(layer.ttt.conv.shape, generator=generator) * 0.02)
            layer.ttt.proj.copy_(torch.randn(layer.ttt.proj.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def questions(count: int) -> list[dict[str, object]]:
    """Questions with one document each, in the form of docs/evaluate.md."""
    return [
        {"question": f"Where is the whale number {i}?", "answers": [f"In harbour {i:03}.", f"harbour {i:03}"], "documents": [
            f"Whale {i}. {text(40, seed=i)} In harbour {i:03}."]}
        for i in range(count)
    ]  # fmt: skip


def write_lines(path: Path, values: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path
