"""The names of vLLM that it may move without notice: all that we use, in one table.

`tests/serving/test_vllm_names.py` names those that another version of vLLM lacks. Modules import them from
here, and each is looked up at its first use, since a worker does not need the server's.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import InPlaceTTTError

TESTED = "0.32.0"
"""The version of vLLM under which `make test-serving` runs."""

_ATTENTION = "vllm.v1.attention.backend"
_LINEAR = "vllm.v1.attention.backends.linear_attn"
_PROCESSORS = "vllm.v1.sample.logits_processor"
_CACHE = "vllm.v1.kv_cache_interface"
_CONFIGS = "vllm.model_executor.models.config"
_CLASSES = "vllm.model_executor.models.interfaces"
_ARGUMENTS = "vllm.entrypoints.launchers.cli_args"

NAMES: dict[str, tuple[str, str]] = {
    # the engine's settings
    "MODELS_CONFIG_MAP": (_CONFIGS, ""),
    "MambaModelConfig": (_CONFIGS, "verify_and_update_config"),
    "CompilationConfig": ("vllm.config", "_attention_ops splitting_ops static_forward_context"),
    "VllmConfig": ("vllm.config", "use_v2_model_runner compilation_config additional_config"),
    # a model and its layers
    "HasInnerState": (_CLASSES, ""),
    "IsHybrid": (_CLASSES, "get_mamba_state_shape_from_config get_mamba_state_copy_func"),
    "RowParallelLinear": ("vllm.model_executor.layers.linear", "forward"),
    "get_temporal_copy_spec": ("vllm.model_executor.layers.mamba.mamba_utils", ""),
    "get_forward_context": ("vllm.forward_context", ""),
    # slots as blocks of a cache
    "AttentionLayerBase": ("vllm.model_executor.layers.attention_layer_base", "get_kv_cache_spec"),
    "MambaBase": (
        "vllm.model_executor.layers.mamba.abstract",
        "bind_kv_cache mamba_type get_attn_backend get_state_shape get_state_dtype get_kv_cache_spec",
    ),
    "MambaAttentionBackendEnum": ("vllm.v1.attention.backends.registry", "LINEAR"),
    "KVCacheSpec": (_CACHE, "block_size page_size_bytes"),
    "MambaSpec": (_CACHE, "page_size_padded"),
    "register_kv_cache_spec": ("vllm.v1.kv_cache_spec_registry", ""),
    "BlockPool": ("vllm.v1.core.block_pool", "free_blocks get_num_free_blocks"),
    "KVCacheBlock": ("vllm.v1.core.kv_cache_utils", ""),
    "MambaManager": (
        "vllm.v1.core.single_type_kv_cache_manager",
        "get_num_blocks_to_allocate pop_blocks_for_free",
    ),
    # steps and the batch
    "AttentionBackend": (_ATTENTION, ""),
    "AttentionCGSupport": (_ATTENTION, "UNIFORM_SINGLE_TOKEN_DECODE"),
    "CommonAttentionMetadata": (_ATTENTION, "seq_lens seq_lens_cpu_upper_bound query_start_loc_cpu"),
    "LinearAttentionBackend": (_LINEAR, "get_name get_builder_cls"),
    "LinearAttentionMetadata": (_LINEAR, "state_indices_tensor seq_lens"),
    "LinearAttentionMetadataBuilder": (_LINEAR, "build build_for_cudagraph_capture _cudagraph_support"),
    "BatchUpdate": (_PROCESSORS, "removed added moved"),
    "LogitsProcessor": (_PROCESSORS, "update_state apply is_argmax_invariant validate_params"),
    "MoveDirectionality": (_PROCESSORS, "SWAP"),
    # the server, and the benchmark
    "LLMEngine": ("vllm.v1.engine.llm_engine", "from_engine_args add_request step"),
    "EngineClient": ("vllm.engine.protocol", "collective_rpc generate"),
    "RequestOutputKind": ("vllm.sampling_params", "DELTA"),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", ""),
    "cli_env_setup": ("vllm.entrypoints.serve.utils.api_utils", ""),
    "configure_logging_from_args": ("vllm.logger", ""),
    "make_arg_parser": (_ARGUMENTS, ""),
    "run_server": ("vllm.entrypoints.launchers.api_server.entry", ""),
    "validate_parsed_serve_args": (_ARGUMENTS, ""),
}
"""By name: the module, and the attributes that we use or override."""


def found(name: str) -> Any:
    """Returns the object of vLLM with a name of the table.

    Raises:
        InPlaceTTTError: if this version of vLLM lacks it, or an attribute of it.
    """
    module, attributes = NAMES[name]
    try:
        value = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError):
        raise InPlaceTTTError(_lacks(f"{module}.{name}")) from None
    for attribute in attributes.split():
        if not _has(value, attribute):
            raise InPlaceTTTError(_lacks(f"{module}.{name}.{attribute}"))
    return value


def _has(value: Any, attribute: str) -> bool:
    annotated = (getattr(base, "__annotations__", {}) for base in getattr(value, "__mro__", ()))
    return hasattr(value, attribute) or any(attribute in names for names in annotated)


def _lacks(name: str) -> str:
    import vllm

    return f"vLLM {vllm.__version__} lacks {name}; install vLLM {TESTED} to serve fast weights."


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, found(name))
