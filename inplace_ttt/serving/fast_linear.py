"""vLLM's down-projection as a fast weight: vLLM's own output, plus the reads of the slots' states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layer.fast_linear import FastWeight, LayerSettings
from ..layer.target import target_generator
from .blocks import SlotHandle
from .engine_settings import ADVANCE
from .slots import Slots
from .tokens import StepTokens
from .vllm_names import RowParallelLinear, VllmConfig, get_forward_context


class Source:
    """Holds the target source of the current forward.

    This is the embeddings for all TTT layers, or the MLP's input for one layer.
    """

    value: Tensor | None = None

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the hidden states that enter a decoder layer or an MLP (a forward pre-hook)."""
        self.value = (
            kwargs["hidden_states"]
            if "hidden_states" in kwargs
            else next(x for x in args if x.is_floating_point())
        )


class FastRowParallelLinear(FastWeight, RowParallelLinear):
    """A `RowParallelLinear` that reads and writes the slots of its batch's requests.

    Under tensor parallelism each rank has a part of W0's input features. With the paper's rule, its state has
    the same part, and the reads are summed over ranks together with W0's output. A rule that needs the whole
    input gathers it, and every rank keeps the whole state.
    """

    tp_size: int
    is_split: bool
    slots: Slots
    source: Source
    handle: SlotHandle
    norm: Tensor | None = None
    """‖W0‖ as loaded. Later, vLLM may change the layout of W0."""

    def forward(self, z: Tensor) -> Any:
        """Returns the output [N, d] for the keys z [N, h], in the form of `RowParallelLinear`."""
        given = RowParallelLinear.forward(self, z)
        out, rest = (given[0], given[1:]) if isinstance(given, tuple) else (given, None)
        if self.tp_size > 1 and not self.is_split:
            z = tensor_model_parallel_all_gather(z)
        torch.ops.inplace_ttt.advance(out, z, self.source.value, self.prefix)
        if self.is_split:
            out = tensor_model_parallel_all_reduce(out)
        return out if rest is None else (out, *rest)

    def advance(self, out: Tensor, z: Tensor, x: Tensor, tokens: StepTokens) -> None:
        """Adds the reads of the step's tokens to `out` in place, and stores or writes these tokens.

        Args:
            out: the output of W0 [N, d].
            z: inputs of the down-projection [N, h].
            x: target source [N, d].
            tokens: the requests, their tokens and their slots.
        """
        self.slots.advance(out, self.keys(z), x, tokens, self)

    def note_norm(self) -> None:
        """Keeps ‖W0‖ for a relative clip, after the weights are loaded."""
        clip = self.fast.config.clip
        if clip is not None and clip.relative:
            part = super().w0_norm()
            self.norm = part if self.tp_size == 1 else tensor_model_parallel_all_reduce(part.square()).sqrt()

    def w0_norm(self) -> Tensor:
        assert self.norm is not None
        return self.norm

    def matrix(self) -> Tensor | None:
        weight = getattr(self, "weight", None)
        return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def slot_bytes(down: RowParallelLinear, config: InPlaceTTTConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of a slot of this down-projection on this rank."""
    return _slots(down, config, 1, dtype, torch.device("meta")).nbytes


def _slots(
    down: RowParallelLinear, config: InPlaceTTTConfig, count: int, dtype: torch.dtype, device: torch.device
) -> Slots:
    h = down.input_size_per_partition if _is_split(down, config) else down.input_size
    return Slots(count, config, down.output_size, h, dtype, device)


def _is_split(down: RowParallelLinear, config: InPlaceTTTConfig) -> bool:
    """Returns True if each rank of tensor parallelism keeps the part of the state of its input features."""
    return down.tp_size > 1 and not config.wanting_whole_input


def install(
    down: RowParallelLinear,
    settings: LayerSettings,
    source: Source,
    handle: SlotHandle,
    vllm_config: VllmConfig,
) -> None:
    """Turns a down-projection into a fast weight, in place.

    Args:
        down: the down-projection.
        settings: the layer's index, config and η.
        source: the holder of the layer's target source.
        handle: the slots' handle, which gives their number.
        vllm_config: gives the dtype; the layer is registered in its `static_forward_context`.
    """
    h, d, config = down.input_size, down.output_size, settings.config
    dtype, device = vllm_config.model_config.dtype, next(down.parameters()).device
    down.__class__ = FastRowParallelLinear
    down.ttt = target_generator(config, h, d, dtype=dtype, device=device).requires_grad_(False)
    down.fast, down.source, down.handle = settings, source, handle
    down.is_split = _is_split(down, config)
    down.reduce_results = down.reduce_results and not down.is_split  # `forward` reduces the sum
    down.slots = _slots(down, config, handle.slots, dtype, device)
    vllm_config.compilation_config.static_forward_context[down.prefix] = down


@torch.library.custom_op(ADVANCE, mutates_args=("out",))
def advance(out: Tensor, z: Tensor, x: Tensor, name: str) -> None:
    """Calls `advance` of the layer with this name, which adds its reads to `out` [N, d] in place."""
    context = get_forward_context()
    if context.attn_metadata is None:  # a run in which vLLM measures its memory
        return
    layer = context.no_compile_layers[name]
    tokens = context.attn_metadata[layer.handle.name].tokens
    if not tokens.alone and _is_recorded(out):  # replays of the graph would advance these requests again
        raise InPlaceTTTError(
            "a CUDA graph can record fast weights only in steps of one token per request; start vLLM with "
            "cudagraph_mode=FULL_AND_PIECEWISE or with --enforce-eager."
        )
    layer.advance(out, z, x, tokens)


def _is_recorded(x: Tensor) -> bool:
    """Returns True if a CUDA graph is being recorded on x's device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@advance.register_fake
def _(out: Tensor, z: Tensor, x: Tensor, name: str) -> None:
    return None
