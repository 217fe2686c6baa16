"""A TTT layer of a converted model, driven through the model's own hooks without the rest of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..families import CACHE, Decoder, features
from ..layer.cache import streams
from ..layer.fast_linear import plain_class
from ..layer.overrides import with_config
from ..layer.quantized import readable_parameters
from ..layer.stream import FastWeightStream
from ..layout import ChunkLayout
from ..ops import fast_weight as op
from ..ops import form_of, state_dtype
from ..surgery import fast_weights
from .adapters import AuditedModule
from .law import key_size
from .outcome import NotChecked
from .stream import Stream


class ConvertedLayer(AuditedModule):
    """A borrowed TTT layer. Its inputs are Z, so no module before the down-projection runs.

    If the layer normalizes the target source, the probes pass the normalized source.
    """

    def __init__(self, lm: Any, decoder: Decoder, index: int, dtype: torch.dtype, own_chunk: int) -> None:
        self.lm, self.decoder, self.index, self.dtype = lm, decoder, index, dtype
        self.layer = fast_weights(lm)[index]
        self.name = f"layer {index}"
        self.input_size, self.d = features(self.layer)
        whitened = self.layer.ttt.keys
        self.h = self.input_size if whitened is None else len(whitened.directions)
        self.whitening = None if whitened is None else f"{self.h} whitened numbers of {self.input_size}"
        self.ridge = self.layer.fast.config.ridge
        self.chunk_size, self.eta = self.layer.chunk_size, self.layer.eta
        self._own_chunk = own_chunk
        self.writes_generated = self.layer.fast.config.update_on_decode
        self.detaches_target = self.layer.fast.config.detach_target
        self.device = self.layer.ttt.proj.device

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        kwargs: dict[str, Any] = {}
        if documents is not None:
            positions = torch.cat([torch.arange(n) for n in documents])
            kwargs["position_ids"] = positions.expand(len(x), -1)
        if padding is not None:
            kwargs["attention_mask"] = (~padding).long()
        return self._forward(x, target, **kwargs)

    def _forward(self, z: Tensor, target: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        """Runs one forward through the model's hooks.

        The target source is passed at both places from which a layer may take it, as embeddings and as the
        MLP's input.
        """
        z, target = z.to(self.device, self.dtype), self._source(target)
        layer, model, parts = self.layer.hooks, self.layer.hooks.model, self.decoder.layers[self.index]
        opened = model.open(self.decoder.base, (), {**kwargs, CACHE: cache})
        try:
            model.take_embeddings(self.decoder.blocks[0], (target,), {})
            traveling = {} if opened is None else dict(opened[1])
            layer.arm(parts.attention, (), {**traveling, CACHE: cache})
            layer.take_mlp_input(parts.mlp, (target,), {})
            return self.layer(z)
        finally:
            model.close(self.decoder.base, (), None)

    def _source(self, target: Tensor) -> Tensor:
        """Returns the source that the layer normalizes to `target`."""
        target, mean, gain = target.to(self.device, self.dtype), self.layer.ttt.mean, self.layer.ttt.gain
        return target if mean is None or gain is None else target / gain.to(self.dtype) + mean.to(self.dtype)

    def keys(self, x: Tensor) -> Tensor:
        """Returns K = A (Z - ‖Z‖ c), computed here from the layer's tensors, without the layer's code."""
        x, whitened = x.to(self.device, self.dtype), self.layer.ttt.keys
        if whitened is None:
            return x
        return (x - x.norm(dim=-1, keepdim=True) * whitened.center.to(self.dtype)) @ whitened.directions.to(
            self.dtype
        ).T

    def features(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)

    def inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """Returns inputs [n, input] with orthonormal keys. For n > h, KᵀK is a multiple of the identity.

        Under least squares the keys are scaled, and λ then has about as much weight as their writes.
        """
        draw = torch.randn(max(n, self.h), min(n, self.h), generator=generator, dtype=torch.float64)
        columns = torch.linalg.qr(draw)[0]
        keys = columns.T if n <= self.h else columns * (n / self.h) ** 0.5
        return self.inputs_of(key_size(self.ridge) * keys)

    def inputs_of(self, keys: Tensor) -> Tensor:
        """Returns the shortest inputs Z with these keys. Without whitening they are the keys themselves."""
        whitened = self.layer.ttt.keys
        if whitened is None:
            return keys.contiguous()
        directions, center = (t.double().cpu() for t in (whitened.directions, whitened.center))
        seen, along = (
            torch.linalg.lstsq(directions, k.T).solution.T for k in (keys, (directions @ center)[None])
        )
        # z = seen + ‖z‖ along, where ‖along‖ ≤ ‖c‖ < 1
        across, rest = seen @ along.T, 1 - along.square().sum()
        lengths = (across + (across.square() + rest * seen.square().sum(-1, keepdim=True)).sqrt()) / rest
        return (seen + lengths * along).contiguous()

    def targets(self, target: Tensor) -> Tensor:
        return self.layer.ttt(
            self._source(target)[None], ChunkLayout.from_lengths([[len(target)]], self.chunk_size)
        )[0]

    @property
    def fast_weight(self) -> Tensor:
        matrix = self.layer.matrix()
        if matrix is None:
            kind = type(self.layer).__name__
            raise NotChecked(f"the weight is quantized or wrapped ({kind}) and cannot be read as one matrix")
        return matrix

    @property
    def conv(self) -> Tensor:
        return self.layer.ttt.conv

    @property
    def proj(self) -> Tensor:
        return self.layer.ttt.proj

    @property
    def own_chunk(self) -> int:
        return self._own_chunk

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(readable_parameters(self.layer)), **dict(self.layer.named_buffers())}

    def is_fast(self, name: str) -> bool:
        return not name.startswith("ttt.")

    def train(self, mode: bool) -> None:
        self.layer.train(mode)

    def stream(self) -> Stream:
        return ConvertedStream(self)

    @contextmanager
    def resized(self, chunk_size: int) -> Iterator[AuditedModule]:
        with with_config([self.layer], chunk_size=chunk_size):
            yield ConvertedLayer(self.lm, self.decoder, self.index, self.dtype, self._own_chunk)

    @contextmanager
    def single_precision(self) -> Iterator[AuditedModule]:
        data = [(p, p.data) for _, p in readable_parameters(self.layer)]
        dtype = torch.float32 if self.dtype == torch.float64 else self.dtype
        for parameter, tensor in data:
            parameter.data = tensor.to(dtype)
        try:
            yield ConvertedLayer(self.lm, self.decoder, self.index, dtype, self._own_chunk)
        finally:
            for parameter, tensor in data:
                parameter.data = tensor

    @property
    def tau(self) -> float | None:
        clip = self.layer.fast.config.clip
        if clip is None:
            return None
        one = float(torch.linalg.vector_norm(self.fast_weight.detach())) if clip.relative else 1.0
        return clip.max_norm * one

    def ranks(self, x: Tensor, target: Tensor, parts: int) -> Tensor:
        """Computes the steps of `ops.scan` in one process.

        The steps are each rank's sum of writes, its starting state, and its own reads.
        """
        z, target = x.to(self.device, self.dtype), self._source(target)
        rule = self.layer.fast.config.rule
        given: dict[str, Any] = {"clip": self.layer.tau(), "rule": rule, "gate": None}
        whole = ChunkLayout.from_lengths([[z.shape[1]]], self.chunk_size)
        links = whole.links(parts)
        layouts = [whole.part(rank, parts) for rank in range(parts)]
        pieces = list(zip(self.layer.keys(z).chunk(parts, 1), target.chunk(parts, 1), layouts, strict=True))
        values = [self.layer.ttt(source, layout) for _, source, layout in pieces]
        written, sums = form_of(rule).sum_of_writes, []
        for (keys, _, layout), v in zip(pieces, values, strict=True):
            last = [layout.documents[0][-1]]
            sums.append(written(keys, v.to(keys.dtype), last, layout=layout, **given))
        # the first rank starts from zero
        known = torch.stack([torch.zeros_like(sums[0]), *sums]).to(state_dtype(z.dtype))
        outputs = []
        for rank, ((keys, _, layout), v) in enumerate(zip(pieces, values, strict=True)):
            start = torch.einsum("bq,qbdh->bdh", links[:, rank].to(known), known)
            how: dict[str, Any] = {"eta": self.layer.eta, "layout": layout, "initial_state": start}
            outputs.append(op(keys, v.to(keys.dtype), None, **how, **given))
        plain: Any = plain_class(self.layer)
        return plain.forward(self.layer, z) + torch.cat(outputs, 1)

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        with with_config([self.layer], clip=None):
            yield


class ConvertedStream:
    """One sequence on a new cache."""

    def __init__(self, module: ConvertedLayer) -> None:
        self.module = module
        self.cache = DynamicCache(config=module.lm.config.get_text_config())

    @torch.no_grad()
    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        return self.module._forward(x, target, self.cache)

    def reset(self) -> None:
        self.cache.reset()

    @property
    def _stream(self) -> FastWeightStream | None:
        return streams(self.cache).get(self.module.index)

    @property
    def state(self) -> Tensor | None:
        """The state [1, ·, h], or None before the first write."""
        return None if self._stream is None else self._stream.state
