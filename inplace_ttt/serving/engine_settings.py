"""Settings of vLLM's engine for converted models."""

from __future__ import annotations

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MambaModelConfig

from ..config import InPlaceTTTConfig

_LOG = init_logger(f"vllm.{__name__}")
_BATCH = f"{__package__}.batch:Batch"
WORKER = f"{__package__}.worker.MemoryWorker"
ADVANCE = "inplace_ttt::advance"
"""The operator that reads and writes the slots of a step."""


def ttt_config(vllm_config: VllmConfig) -> InPlaceTTTConfig | None:
    """Returns the TTT config of the model that is served; None for a model without fast weights."""
    entry = getattr(vllm_config.model_config.hf_config, "inplace_ttt", None)
    return None if entry is None else InPlaceTTTConfig.from_dict(entry["config"])


class ServedConfig(MambaModelConfig):
    """Applies the settings of models with a state, and those of this package.

    vLLM itself applies `MambaModelConfig` only if `layer_types` names other layers than attention.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().verify_and_update_config(vllm_config)
        given = vllm_config.model_config.logits_processors or []
        vllm_config.model_config.logits_processors = [*(given if _BATCH in given else [*given, _BATCH])]
        _split_graphs(vllm_config.compilation_config)
        vllm_config.parallel_config.worker_extension_cls = (
            vllm_config.parallel_config.worker_extension_cls or WORKER
        )


def _split_graphs(compilation: CompilationConfig) -> None:
    """Leaves the fast weights' operator out of graphs, as vLLM does with attention.

    A graph that contains it would keep writing the slots of the step in which it was recorded.
    """
    if compilation.splitting_ops is None:
        # vLLM later splits at these operators, if it compiles in pieces
        object.__setattr__(compilation, "_attention_ops", [*CompilationConfig._attention_ops, ADVANCE])
    elif ADVANCE not in compilation.splitting_ops:
        compilation.splitting_ops = [*compilation.splitting_ops, ADVANCE]
    mode = compilation.cudagraph_mode
    if mode is None or mode.has_full_cudagraphs():
        if mode is not None:
            _LOG.warning(
                "In-Place TTT: cudagraph_mode=PIECEWISE replaces %s, since fast weights cannot be recorded.",
                mode.name,
            )
        # vLLM turns graphs off where it does not compile in pieces
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
