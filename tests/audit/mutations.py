"""Faults planted in this package: which item of the catalog owns each, and how it is planted."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, UpdateClip, surgery
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import chunk_conv, chunked
from inplace_ttt.ops import fast_weight as op
from inplace_ttt.surgery import fast_weights

from .mutation import Mutation, Patch

# Faults in this package.


def transposed_projection(patch: Patch) -> None:
    def forward(self: TargetGenerator, x: Tensor, layout: ChunkLayout) -> Tensor:
        x = x.to(self.conv.dtype)
        return chunk_conv(x, self.conv, layout, self.first_tap) @ self.proj.T

    patch.setattr(TargetGenerator, "forward", forward)


def padded_on_the_left(patch: Patch) -> None:
    def __init__(self: TargetGenerator, dim: int, kernel_size: int, conv: Any, **factory: Any) -> None:
        real(self, dim, kernel_size, conv, **factory)
        self.first_tap = 1 - kernel_size

    real = TargetGenerator.__init__
    patch.setattr(TargetGenerator, "__init__", __init__)


def taps_over_the_edge(patch: Patch) -> None:
    def chunk_ids(self: ChunkLayout, device: Any = "cpu") -> Tensor:
        ids = torch.full((self.batch, self.length), -1, dtype=torch.int32)
        for row, documents in enumerate(self.documents):
            for number, (start, stop) in enumerate(documents):
                ids[row, start:stop] = number
        return ids.to(device)

    patch.setattr(ChunkLayout, "chunk_ids", chunk_ids)


def normalized_keys(patch: Patch) -> None:
    def normalized(z: Tensor, v: Tensor, weight: Tensor | None, **kwargs: Any) -> Any:
        keys = torch.nn.functional.normalize(z, dim=-1)
        out = op(keys, v, None, **kwargs)
        return out if weight is None else out + torch.nn.functional.linear(z, weight)

    patch.setattr("inplace_ttt.layer.fast_linear.fast_weight", normalized)


def stop_gradient(patch: Patch) -> None:
    patch.setattr(
        "inplace_ttt.layer.fast_linear.fast_weight",
        lambda z, v, weight, **kwargs: op(z, v.detach(), weight, **kwargs),
    )


def update_then_apply(patch: Patch) -> None:
    def advance(
        self: FastWeightStream, out: Tensor, z: Tensor, x: Tensor, spans: Any, writer: Any, **_: Any
    ) -> Tensor:
        for row, (start, stop) in enumerate(spans):
            while start < stop:
                end = min(start + self.chunk_size - self.filled[row], stop)
                self._take(row, z[row, start:end], x[row, start:end], writer, undoable=False)
                self._read(out[row : row + 1, start:end], z[row : row + 1, start:end], writer, row)
                start = end
        return out

    patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))


def one_weight_a_call(patch: Patch) -> None:
    def advance(
        self: FastWeightStream, out: Tensor, z: Tensor, x: Tensor, spans: Any, writer: Any, **_: Any
    ) -> Tensor:
        self._read(out, z, writer)
        for row, (start, stop) in enumerate(spans):
            while start < stop:
                end = min(start + self.chunk_size - self.filled[row], stop)
                self._take(row, z[row, start:end], x[row, start:end], writer, undoable=False)
                start = end
        return out

    patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))


def last_token_lost(patch: Patch) -> None:
    """A chunk's last token, when it comes alone, is not in the write."""

    def take(self: FastWeightStream, row: int, z: Tensor, x: Tensor, writer: Any, undoable: bool) -> None:
        lost = len(z) == 1 and self.filled[row] == self.chunk_size - 1
        real(self, row, 0 * z if lost else z, x, writer, undoable)

    real = FastWeightStream._take
    patch.setattr(FastWeightStream, "_take", take)


def target_token_by_token(patch: Patch) -> None:
    """What a chunk writes while streaming is made from each token's embedding alone."""

    def write(
        self: FastWeight, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> Any:
        v = self.ttt(x, dataclasses.replace(layout, chunk_size=1)).to(z.dtype)
        return op(
            z, v, None, eta=self.eta, layout=layout, initial_state=state, clip=self.tau(), return_state=True
        )

    patch.setattr(FastWeight, "write", write)


def reset_keeps_the_open_chunk(patch: Patch) -> None:
    def reset(self: FastWeightStream) -> None:
        rows, opened = [dataclasses.replace(row, written=0, undo=None) for row in self.rows], self._open
        self.__init__(self.batch, self.chunk_size)  # type: ignore[misc]
        self.rows, self._open = rows, opened

    patch.setattr(FastWeightStream, "reset", reset)


def generated_tokens_dropped(patch: Patch) -> None:
    def advance(self: FastWeightStream, *args: Any, **kwargs: Any) -> Tensor:
        self.update_on_decode = False
        return real(self, *args, **kwargs)

    real = FastWeightStream.advance
    patch.setattr(FastWeightStream, "advance", advance)


def half_precision_state(patch: Patch) -> None:
    for module in ("layer.fast_linear", "layer.stream", "ops.chunked"):
        patch.setattr(f"inplace_ttt.{module}.state_dtype", lambda dtype: torch.bfloat16)


def running_weight_in_half_precision(patch: Patch) -> None:
    """W0 + ηS, rounded to bf16 at every chunk, as a running weight would be."""

    def add_delta(self: Any, carry: Tensor | None, row: int, chunk: Any) -> Tensor:
        if self.weight is None:
            return real(self, carry, row, chunk)
        assert carry is not None
        step = real(self, torch.zeros_like(carry), row, chunk)
        return (carry.bfloat16() + step.bfloat16()).to(carry.dtype) if step.any() else carry

    real = chunked.Walk.add_delta
    patch.setattr(chunked.Walk, "add_delta", add_delta)


def ranks_start_anew(patch: Patch) -> None:
    def start_carry(self: Any, row: int, number: int) -> Tensor | None:
        return None if self.weight is None else self.weight.clone()

    patch.setattr(chunked.Walk, "start_carry", start_carry)


def padding_written(patch: Patch) -> None:
    def whole(cls: Any, mask: Tensor, chunk_size: int) -> ChunkLayout:
        return cls.from_lengths([[mask.shape[1]]] * len(mask), chunk_size)

    patch.setattr(ChunkLayout, "from_attention_mask", classmethod(whole))


def second_row_without_memory(patch: Patch) -> None:
    def segments(self: Any, row: int) -> Any:
        return iter([((0, self.layout.length), None)]) if row else real(self, row)

    real = chunked.Walk.segments
    patch.setattr(chunked.Walk, "segments", segments)


def clip_in_training_too(patch: Patch) -> None:
    def tau(self: FastWeight) -> Any:
        training, self.training = self.training, False
        try:
            return real(self)
        finally:
            self.training = training

    real = FastWeight.tau
    patch.setattr(FastWeight, "tau", tau)


def clip_by_largest_entry(patch: Patch) -> None:
    def factor(delta: Tensor, tau: Any) -> Tensor:
        return delta.new_ones(()) if tau is None else (tau / delta.abs().max().clamp(min=1e-300)).clamp(max=1)

    patch.setattr("inplace_ttt.ops.chunked.clip_factor", factor)
    patch.setattr("inplace_ttt.ops.chunked.write_factor", lambda delta, tau, rule: factor(delta, tau))


def clip_on_the_sum(patch: Patch) -> None:
    def add_delta(self: Any, carry: Tensor | None, row: int, chunk: Any) -> Tensor:
        if self.clip is None:
            return real(self, carry, row, chunk)
        clip, self.clip = self.clip, None
        try:
            whole = real(self, None if carry is None else carry.clone(), row, chunk)
        finally:
            self.clip = clip
        start = torch.zeros_like(whole) if self.weight is None else self.weight
        return start + (whole - start) * factor((whole - start) / self.write, clip)

    real, factor = chunked.Walk.add_delta, chunked.clip_factor
    patch.setattr(chunked.Walk, "add_delta", add_delta)


def random_convolution(patch: Patch) -> None:
    def reset(self: TargetGenerator, std: float, seed: int) -> None:
        real(self, std, seed)
        self.conv.normal_(0, std)

    real = TargetGenerator.reset_parameters
    patch.setattr(TargetGenerator, "reset_parameters", torch.no_grad()(reset))


def dense_projection(patch: Patch) -> None:
    def reset(self: TargetGenerator, std: float, seed: int) -> None:
        real(self, std, seed)
        self.proj.normal_(0, std)

    real = TargetGenerator.reset_parameters
    patch.setattr(TargetGenerator, "reset_parameters", torch.no_grad()(reset))


def one_seed_for_all_layers(patch: Patch) -> None:
    real = TargetGenerator.reset_parameters
    patch.setattr(TargetGenerator, "reset_parameters", lambda self, std, seed: real(self, std, 42))


def conversion_rounds_w0(patch: Patch) -> None:
    def install(parts: Any, *args: Any, **kwargs: Any) -> None:
        real(parts, *args, **kwargs)
        parts.down_proj.weight.data = parts.down_proj.weight.data.half().to(torch.float8_e4m3fn).float()

    real = surgery.install
    patch.setattr(surgery, "install", install)


def layers_beyond_the_model_ignored(patch: Patch) -> None:
    def resolve(self: InPlaceTTTConfig, num_layers: int) -> InPlaceTTTConfig:
        if isinstance(self.layers, tuple):
            object.__setattr__(self, "layers", tuple(i for i in self.layers if i < num_layers))
        return real(self, num_layers)

    real = InPlaceTTTConfig.resolve
    patch.setattr(InPlaceTTTConfig, "resolve", resolve)


def weaker_later_layer(model: PreTrainedModel) -> None:
    generator = fast_weights(model)[6].ttt

    def forward(self: TargetGenerator, x: Tensor, layout: ChunkLayout) -> Tensor:
        return 0.5 * TargetGenerator.forward(self, x, layout)

    generator.forward = types.MethodType(forward, generator)  # type: ignore[method-assign]


def reading_moves_w0(patch: Patch) -> None:
    def forward(self: FastWeight, z: Tensor) -> Tensor:
        out = real(self, z)
        if not self.training:
            with torch.no_grad():
                self.weight.data.view(-1)[:1] += 1e-4  # type: ignore[operator]
        return out

    real = FastWeight.forward
    patch.setattr(FastWeight, "forward", forward)


def reading_moves_the_embeddings(model: PreTrainedModel) -> None:
    def hook(module: Any, args: Any, out: Tensor) -> None:
        with torch.no_grad():
            module.weight.data[0, 0] += 1e-4

    model.get_input_embeddings().register_forward_hook(hook)


TIGHT = {"clip": UpdateClip(0.05, relative=True)}

PRODUCT: tuple[Mutation, ...] = (
    Mutation("the state is added to W0 in place", "state-place", plant=reading_moves_w0),
    Mutation("reading moves the embedding table", "slow-weights", spoil=reading_moves_the_embeddings),
    Mutation("update, then apply, while streaming", "apply-then-update", plant=update_then_apply),
    Mutation("keys normalized in the write", "no-normalization", plant=normalized_keys),
    Mutation("chunks of 64", "chunk-size", settings={"chunk_size": 64}, sound=False),
    Mutation(
        "targets from the MLP's input", "target-source", settings={"target": "hidden_states"}, sound=False
    ),
    Mutation("a kernel of 3", "conv-size", settings={"kernel_size": 3}, sound=False),
    Mutation("convolution padded on the left", "conv-lookahead", plant=padded_on_the_left),
    Mutation("convolution causal by setting", "conv-lookahead", settings={"conv": "causal"}, sound=False),
    Mutation("taps reach over the chunk's edge", "conv-isolation", plant=taps_over_the_edge),
    Mutation("P transposed", "projection-untransposed", plant=transposed_projection),
    Mutation("convolution starts at random", "start-conv", plant=random_convolution),
    Mutation("P starts dense", "start-projection", plant=dense_projection),
    Mutation("P starts the same in every layer", "start-projection", plant=one_seed_for_all_layers),
    Mutation("the conversion rounds W0", "start-identity", plant=conversion_rounds_w0),
    Mutation("the clip holds in training too", "clip-training", plant=clip_in_training_too, settings=TIGHT),
    Mutation(
        "the clip bounds the largest entry", "clip-inference", plant=clip_by_largest_entry, settings=TIGHT
    ),
    Mutation("the clip bounds the sum of deltas", "clip-scope", plant=clip_on_the_sum, settings=TIGHT),
    Mutation("τ = 1e-5 on the whole matrix", "clip-effect", settings={"clip": UpdateClip(1e-5)}, sound=False),
    Mutation("padding is written", "padding", plant=padding_written),
    Mutation("the second row has no memory", "rows", plant=second_row_without_memory),
    Mutation("one weight for a whole prefill call", "chunked-prefill", plant=one_weight_a_call),
    Mutation("the token that fills a chunk alone is lost", "token-by-token", plant=last_token_lost),
    Mutation("streaming target without look-ahead", "streaming-target", plant=target_token_by_token),
    Mutation("a reset keeps the open chunk", "stream-reset", plant=reset_keeps_the_open_chunk),
    Mutation("generated tokens are dropped", "generated-tokens", plant=generated_tokens_dropped),
    Mutation("state in bf16", "state-precision", plant=half_precision_state),
    Mutation("running weight in bf16", "state-precision", plant=running_weight_in_half_precision),
    Mutation("each rank starts from W0", "context-parallel", plant=ranks_start_anew),
    Mutation("stop-gradient before the scan", "gradient", plant=stop_gradient),
    Mutation("every third layer", "layer-spacing", settings={"layers": "every:3"}, sound=False),
    Mutation("a layer beyond the model is ignored", "layers-in-range", plant=layers_beyond_the_model_ignored),
    Mutation("a later layer writes half", "every-layer", spoil=weaker_later_layer),
)
