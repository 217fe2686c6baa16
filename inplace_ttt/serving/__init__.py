"""Converted models in vLLM: a package of its extension points, found through the entry point
`vllm.general_plugins`.

    engine      engine_settings.py   what vLLM is told besides
    scheduler   blocks.py            which request has which slot, by a block manager with a pool of its own
    each step   steps.py             which tokens of the batch are whose, and in which slot
                batch.py             what the batch's requests say of their fast weights
                (request_settings.py), and leave behind
    each layer  fast_linear.py       the down-projection, which is vLLM's own and the fast weight of training
                slots.py             the states and open chunks of all slots
    worker      worker.py            snapshots of slots (snapshots.py), by `collective_rpc`
    server      memories.py          which user's memory of which name is which snapshot
                http.py              memories in requests and under /v1/memories; the entry point
                `vllm.endpoint_plugins`

vLLM is imported here and nowhere else in the package, and this room by vLLM alone.
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM of the model classes and of the cache that they declare. vLLM calls this in each of its
    processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import inplace_ttt  # noqa: F401 - transformers knows the checkpoints' config from here on

    from . import blocks  # noqa: F401 - vLLM knows the blocks' manager from here on
    from .engine_settings import ServedConfig
    from .families import FAMILIES

    for architecture in FAMILIES:
        ModelRegistry.register_model(architecture, f"{__name__}.model:{architecture}")
        MODELS_CONFIG_MAP[architecture] = ServedConfig
