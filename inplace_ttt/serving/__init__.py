"""Converted models in vLLM: implementations of its extension points.

vLLM finds them through the entry point `vllm.general_plugins`.

    engine      engine_settings.py   additional engine settings
    scheduler   blocks.py            a block manager with its own pool gives each request a slot
    each step   steps.py             maps the batch's tokens to requests and slots
                batch.py             keeps the fast-weight settings of the batch's requests
                                     (request_settings.py), and snapshots of ended requests
    each layer  fast_linear.py       vLLM's own down-projection with the fast weight of training
                slots.py             states and open chunks of all slots
    worker      worker.py            snapshots of slots (snapshots.py), called through `collective_rpc`
    server      memories.py          maps a user and a memory's name to a snapshot
                http.py              memories in requests and under /v1/memories; entry point
                                     `vllm.endpoint_plugins`

No other part of `inplace_ttt` imports vLLM. These modules are imported by vLLM, and by the commands `serve`
(server.py) and `bench` (benchmark.py).
"""

from __future__ import annotations


def register() -> None:
    """Registers the model classes and their kind of cache with vLLM, which calls this in each process."""
    from vllm import ModelRegistry

    import inplace_ttt  # noqa: F401 - registers the checkpoints' config with transformers

    from . import blocks  # noqa: F401 - registers the block manager with vLLM
    from .engine_settings import ServedConfig
    from .families import FAMILIES
    from .vllm_names import MODELS_CONFIG_MAP

    for architecture in FAMILIES:
        ModelRegistry.register_model(architecture, f"{__name__}.model:{architecture}")
        MODELS_CONFIG_MAP[architecture] = ServedConfig
