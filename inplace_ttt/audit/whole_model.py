"""A converted model, with measurements on the whole model that are each made once for all probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from ..config import InPlaceTTTConfig
from ..families import CACHE, features, locate
from ..layer.cache import streams
from ..layer.fast_linear import FastWeight
from ..layer.overrides import overriding
from ..layer.quantized import readable_parameters
from ..surgery import causal_lm, config_of, fast_weights
from .borrowing import probe_chunk, small_chunks

_TEXT = (
    "A ship had lain at the harbour for three days when the captain asked for the letters that she had "
    "carried from the north. "
    "Nobody knew where they were. The mate remembered a box, the cook remembered a fire, and a boy who was "
    "never asked had seen both. "
)


_SMALL = 20_000_000
"""Largest number of parameters at which the model itself is called in every way."""

Measured = TypeVar("Measured")


@dataclass
class WholeModel:
    """A converted model with its cached measurements.

    Attributes:
        model: the converted model, possibly wrapped.
        tokenizer: encodes a real text. If None, token ids are random.
        seed: seed of random inputs.
        lm: the causal language model in `model`.
    """

    model: nn.Module
    tokenizer: Any = None
    seed: int = 0
    lm: Any = field(init=False)
    _measured: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.lm = causal_lm(self.model)

    @cached_property
    def config(self) -> InPlaceTTTConfig:
        return config_of(self.lm)

    @cached_property
    def layers(self) -> dict[int, FastWeight]:
        return fast_weights(self.lm)

    @cached_property
    def depth(self) -> int:
        return len(locate(self.lm).blocks)

    @cached_property
    def undrivable(self) -> str:
        """The reason why the probes cannot drive a single layer, or "" if they can.

        The probes set a convolution, and expect sums of writes.
        """
        if self.config.target == "gradient":
            return (
                "its targets are loss gradients, which one layer alone cannot compute; the item "
                "`declared-rule` covers the whole rule"
            )
        names = sorted({"conv", "write_norm", "preserve_row_norms"} & set(self.config.extensions))
        if not names:
            return ""
        return (
            f"with {' and '.join(names)} a layer lacks a convolution to set, or reads no sum; the item "
            "`declared-rule` covers the whole rule"
        )

    @property
    def is_small(self) -> bool:
        """True if a copy of the model and many calls with single tokens are cheap."""
        return sum(parameter.numel() for parameter in self.lm.parameters()) <= _SMALL

    @property
    def chunk(self) -> int:
        return probe_chunk(self.config.kernel_size)

    @cached_property
    def ids(self) -> Tensor:
        """Token ids [1, T] of three chunks and three more tokens.

        They are real text if there is a tokenizer, and random otherwise.
        """
        tokens = 3 * self.chunk + 3
        vocabulary = self.lm.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(self.seed))
        if self.tokenizer is not None:
            text = self.tokenizer(_TEXT * (1 + tokens // 20), return_tensors="pt").input_ids[:, :tokens]
            ids = text if text.shape[1] == tokens and int(text.max()) < vocabulary else ids
        return ids.to(self.lm.get_input_embeddings().weight.device)

    def once(self, measure: Callable[[WholeModel], Measured]) -> Measured:
        """Returns the result of `measure` on this model, computed at the first call."""
        if measure not in self._measured:
            self._measured[measure] = measure(self)
        return self._measured[measure]

    @cached_property
    def after_reading(self) -> AfterReading:
        """The traces of reading the text through a cache and of generating more than a chunk.

        Generation is greedy and ignores the model's own generation config.
        """
        plain = GenerationConfig(max_new_tokens=self.chunk + 2, do_sample=False, pad_token_id=0)
        with (
            small_chunks(self.model, self.chunk, self.seed),
            overriding([self.lm], generation_config=plain),
            torch.no_grad(),
        ):
            before = fingerprints(self.lm)
            cache = DynamicCache(config=self.lm.config.get_text_config())
            self.lm(self.ids, **{CACHE: cache}, use_cache=True)
            wrote = [
                i
                for i, s in streams(cache).items()
                if s.state is not None and bool(s.state[:, : features(self.layers[i])[1]].any())
            ]
            out = self.lm.generate(self.ids, attention_mask=torch.ones_like(self.ids), use_cache=True)
            after = fingerprints(self.lm)
        changed = [name for name, value in after.items() if before.get(name) != value]
        return AfterReading(sorted(wrote), changed, self.ids.shape[1], out.shape[1] - self.ids.shape[1])


@dataclass(frozen=True)
class AfterReading:
    """The traces of reading and generating.

    Attributes:
        layers: the layers that hold a state after reading.
        changed: names of the model's tensors that changed.
        read: number of tokens read.
        generated: number of tokens generated.
    """

    layers: list[int]
    changed: list[str]
    read: int
    generated: int


def fingerprints(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns two sums over the bits of each parameter and buffer. Quantized parameters are left out."""
    found = {}
    for name, tensor in [*readable_parameters(model), *model.named_buffers()]:
        flat = tensor.detach().contiguous().reshape(-1)
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
        bits = flat.view(width) if width is not None else flat.to(torch.int64)
        found[name] = (
            int(bits.sum(dtype=torch.int64)),
            int((bits[: len(bits) // 2 * 2 : 2]).sum(dtype=torch.int64)),
        )
    return found
