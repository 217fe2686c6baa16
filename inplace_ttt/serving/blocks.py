"""Allocation of slots to requests: the fast weights' part of vLLM's scheduler.

vLLM allocates to every request a block of each kind of cache. It frees the block when the request ends, is
preempted or aborted. Here, block n stands for slot n of the layers' own tensors (`slots.py`), which hold the
states. So the block uses no memory of the cache, and blocks keep the size that attention needs. The pool has
one block per slot. A request waits until a slot is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import distributed
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from ..errors import InPlaceTTTError
from .steps import SlotBackend
from .vllm_names import (
    AttentionBackend,
    AttentionLayerBase,
    BlockPool,
    KVCacheBlock,
    KVCacheSpec,
    MambaAttentionBackendEnum,
    MambaBase,
    MambaManager,
    MambaSpec,
    VllmConfig,
    register_kv_cache_spec,
)

_LOG = init_logger(f"vllm.{__name__}")

HANDLE = ((1,),), (torch.int64,)
"""Shapes and dtypes of a slot's block, as declared to vLLM."""


SETTING = "inplace_ttt_slots"
"""Key in vLLM's `additional_config`: the number of slots."""


def number_of_slots(vllm_config: VllmConfig, slot_bytes: int, room: int) -> int:
    """Returns the number of slots, including slot 0, which no request gets.

    By default there is one slot per request that may run at once, or as many as fit. With prefix caching a
    request needs two: one for the state that a step starts from, and one for the state after it.

    Args:
        vllm_config: vLLM's settings.
        slot_bytes: bytes of a slot in all layers.
        room: bytes that the slots may use.

    Raises:
        InPlaceTTTError: if the number in `additional_config` is too small or not a whole number, or if no
            request fits.
    """
    each = 1 if vllm_config.cache_config.mamba_cache_mode == "none" else 2
    asked = dict(vllm_config.additional_config or {}).get(SETTING)
    if asked is not None:
        if not isinstance(asked, int) or asked < each:
            raise InPlaceTTTError(
                f"{SETTING} of --additional-config must be a whole number of at least {each}, got {asked!r}."
            )
        return 1 + asked
    wanted = each * vllm_config.scheduler_config.max_num_seqs
    fit = room // slot_bytes - 1
    if fit < each:
        raise InPlaceTTTError(
            f"a request's fast weights need {each * slot_bytes / 1e9:.2f} GB, but {room / 1e9:.2f} GB are "
            "free for them; raise --gpu-memory-utilization, or convert with the preset ridge, whose state is "
            "smaller."
        )
    if fit < wanted:
        _LOG.warning(
            "In-Place TTT: %.1f GB hold the fast weights of %d requests at once, not of %d; others wait "
            "(%s of --additional-config sets the number of slots)",
            room / 1e9,
            fit // each,
            wanted // each,
            SETTING,
        )
    return 1 + min(wanted, fit)


def room_for_slots(device: torch.device, share_used: float) -> int:
    """Returns the bytes that slots may use: half of the memory that the weights leave.

    The other half is for the KV cache and activations. Ranks of tensor parallelism agree on the least.

    Args:
        device: the device of the slots.
        share_used: vLLM's `gpu_memory_utilization`.
    """
    if device.type == "cpu":
        left = psutil.virtual_memory().available
    else:
        free, total = torch.cuda.mem_get_info(device)
        left = max(int(free - (1 - share_used) * total), 0)
    least = torch.tensor(left // 2)
    group = get_tp_group()
    if group.world_size > 1:
        distributed.all_reduce(least, distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)


class SlotManager(MambaManager):
    """Allocates blocks of its own pool: block n is slot n, and no request gets block 0."""

    def __init__(self, kv_cache_spec: SlotSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        self.device_pool = block_pool
        own = BlockPool(kv_cache_spec.slots, block_pool.enable_caching, block_pool.hash_block_size)
        super().__init__(kv_cache_spec, own, **kwargs)

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Returns 0 blocks of the device's pool, or more than it has while too few slots are free."""
        needed = super().get_num_blocks_to_allocate(*args, **kwargs)
        return 0 if needed <= self.block_pool.get_num_free_blocks() else self.device_pool.num_gpu_blocks + 1

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Frees the request's slots here. Returns no blocks, since the caller would free them to the
        device's pool."""
        self.block_pool.free_blocks(reversed(super().pop_blocks_for_free(request_id)))
        return []


@register_kv_cache_spec(manager_class=SlotManager)
@dataclass(frozen=True, kw_only=True)
class SlotSpec(MambaSpec):
    """The kind of cache as which vLLM allocates slots.

    Attributes:
        slots: the number of slots, including slot 0.
    """

    slots: int


class SlotHandle(MambaBase):
    """Represents the slots among the layers to which vLLM allocates blocks.

    Its own tensor holds eight bytes per block: the number of the slot that has the block's state. With prefix
    caching, vLLM copies this number from the block that a step starts from to the block that the step fills.
    The new block then names the other slot.
    """

    def __init__(self, name: str, slots: int, device: torch.device) -> None:
        self.name, self.slots = name, slots
        self.kv_cache = (torch.arange(slots, device=device)[:, None],)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Ignores vLLM's memory, which is not used."""

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        return SlotBackend

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return HANDLE[0]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return HANDLE[1]

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = super().get_kv_cache_spec(vllm_config)
        assert isinstance(spec, MambaSpec)
        known = {name: getattr(spec, name) for name in MambaSpec.__dataclass_fields__}
        # vLLM's layers share pages of one size
        page = max(other.page_size_bytes for other in attention_specs(vllm_config))
        return SlotSpec(**{**known, "page_size_padded": page}, slots=self.slots)


def attention_specs(vllm_config: VllmConfig) -> list[KVCacheSpec]:
    """Returns the cache specs of the attention layers."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    attention = [
        layer
        for layer in layers
        if isinstance(layer, AttentionLayerBase) and not isinstance(layer, SlotHandle)
    ]
    return [spec for layer in attention if (spec := layer.get_kv_cache_spec(vllm_config)) is not None]
