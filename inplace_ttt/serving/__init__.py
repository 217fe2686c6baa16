"""Converted models in vLLM: a package of its extension points, found through the entry point `vllm.general_plugins`.

    scheduler   blocks.py       which request has which slot, by a block manager with a pool of its own
    each step   steps.py        which tokens of the batch are whose, and in which slot
    each layer  fast_linear.py  the down-projection, which is vLLM's own and the fast weight of training
                slots.py        the states and open chunks of all slots

vLLM is imported here and nowhere else in the package, and this room by vLLM alone.
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM of the model classes and of the cache that they declare. vLLM calls this in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig

    import inplace_ttt  # noqa: F401 - transformers knows the checkpoints' config from here on

    from . import blocks  # noqa: F401 - vLLM knows the blocks' manager from here on
    from .families import FAMILIES

    for architecture in FAMILIES:
        ModelRegistry.register_model(architecture, f"{__name__}.model:{architecture}")
        # vLLM takes a model whose layer_types name attention alone for one without a state, and leaves these settings out.
        MODELS_CONFIG_MAP[architecture] = MambaModelConfig
