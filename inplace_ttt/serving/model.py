"""Model classes for vLLM: a base's own class with fast weights.

Each class is an attribute of this module, under the architecture that a converted checkpoint names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layer.fast_linear import LayerSettings
from .blocks import HANDLE, SlotHandle, attention_specs, number_of_slots, room_for_slots
from .engine_settings import ttt_config
from .families import FAMILIES
from .fast_linear import FastRowParallelLinear, Source, install, slot_bytes
from .vllm_names import HasInnerState, IsHybrid, VllmConfig, get_temporal_copy_spec

_LOG = init_logger(f"vllm.{__name__}")
_NEW = ".down_proj.ttt."
"""Part of the name of each of a TTT layer's new tensors."""


def _served(architecture: str) -> type:
    module, name = FAMILIES[architecture]
    base: Any = getattr(import_module(module), name)

    class Served(base, HasInnerState, IsHybrid):
        supports_lora = False

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            _make_fast(self, vllm_config)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            mine: dict[str, Tensor] = {}
            loaded = super().load_weights(_without(weights, mine))
            own = {
                name: tensor
                for name, tensor in (*self.named_parameters(), *self.named_buffers())
                if _NEW in name
            }
            if odd := own.keys() ^ mine.keys():
                raise InPlaceTTTError(
                    f"the checkpoint's fast weights and its config differ in {min(odd)}; convert the base "
                    "again."
                )
            for name, tensor in mine.items():
                if tensor.shape != (shape := own[name].shape):  # `copy_` would broadcast it
                    raise InPlaceTTTError(
                        f"{name} has shape {list(tensor.shape)}, but the config asks for {list(shape)}; "
                        "convert the base again."
                    )
                own[name].data.copy_(tensor)
            for module in self.modules():
                if isinstance(module, FastRowParallelLinear):
                    module.note_norm()
            return loaded | mine.keys()

        @classmethod
        def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
            return HANDLE[0]

        @classmethod
        def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
            return HANDLE[1]

        @classmethod
        def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
            return (get_temporal_copy_spec,)

    Served.__name__ = Served.__qualname__ = architecture
    return Served


def _make_fast(model: Any, vllm_config: VllmConfig) -> None:
    """Turns the down-projections that the config names into fast weights."""
    config = ttt_config(vllm_config)
    assert config is not None
    _refuse(config, vllm_config)
    layers = model.model.layers
    indices = config.resolve(len(layers)).layers
    assert isinstance(indices, tuple)
    size = sum(
        slot_bytes(layers[index].mlp.down_proj, config, vllm_config.model_config.dtype) for index in indices
    )
    handle = _handles(vllm_config, size, next(model.parameters()).device)
    shared = Source()
    layers[0].register_forward_pre_hook(shared.take, with_kwargs=True)
    for position, index in enumerate(indices):
        source, mlp = shared, layers[index].mlp
        if config.target == "hidden_states":
            source = Source()
            mlp.register_forward_pre_hook(source.take, with_kwargs=True)
        install(
            mlp.down_proj, LayerSettings(index, config, config.eta_of(position)), source, handle, vllm_config
        )
    if config.target == "gradient":
        _LOG.warning(
            "In-Place TTT: target='gradient' needs a backward pass, which vLLM lacks: requests read memories "
            "and write none"
        )
    _LOG.info(
        "In-Place TTT: %d slots of %.1f MB, fast weights of %d layers",
        handle.slots - 1,
        size / 1e6,
        len(indices),
    )


def _handles(vllm_config: VllmConfig, size: int, device: torch.device) -> SlotHandle:
    """Registers the slots' handles with vLLM and returns the first.

    There are as many handles as layers of the rarest kind of attention, since vLLM groups its caches by that
    number.

    Args:
        vllm_config: vLLM's settings.
        size: bytes of a slot in all layers.
        device: the device of the slots.
    """
    rarest = min(Counter(attention_specs(vllm_config)).values())
    slots = number_of_slots(
        vllm_config, size, room_for_slots(device, vllm_config.cache_config.gpu_memory_utilization)
    )
    handles = [SlotHandle(f"inplace_ttt.slots.{i}", slots, device) for i in range(rarest)]
    vllm_config.compilation_config.static_forward_context |= {handle.name: handle for handle in handles}
    return handles[0]


def _refuse(config: InPlaceTTTConfig, vllm_config: VllmConfig) -> None:
    """Raises InPlaceTTTError for settings that cannot be served yet."""
    parallel = vllm_config.parallel_config
    refused = {
        "preserve_row_norms": config.preserve_row_norms,
        "prompt_write": config.prompt_write is not None,
        "update_on_decode off": not config.update_on_decode,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA requests": vllm_config.lora_config is not None,
    }
    if held := [what for what, is_on in refused.items() if is_on]:
        raise InPlaceTTTError(
            f"{' and '.join(held)} cannot be served with fast weights yet; leave it out, or use "
            "inplace-ttt generate."
        )


def _without(weights: Iterable[tuple[str, Tensor]], mine: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the base's tensors, and puts those of the fast weights into `mine`."""
    for name, tensor in weights:
        if _NEW in name:
            mine[name] = tensor
        else:
            yield name, tensor


def __getattr__(name: str) -> type:
    if name not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _served(name))
