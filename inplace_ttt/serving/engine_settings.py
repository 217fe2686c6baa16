"""Settings of vLLM's engine for converted models."""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MambaModelConfig

from ..config import InPlaceTTTConfig

_LOG = init_logger(f"vllm.{__name__}")
_BATCH = f"{__package__}.batch:Batch"
WORKER = f"{__package__}.worker.MemoryWorker"


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
        if vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE):
            _LOG.warning(
                "In-Place TTT: CUDA graphs are switched off: a graph would keep writing the slots of the "
                "step in which it was recorded."
            )
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.parallel_config.worker_extension_cls = (
            vllm_config.parallel_config.worker_extension_cls or WORKER
        )
