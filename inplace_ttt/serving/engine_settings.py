"""What vLLM is told when it makes an engine for one of our models."""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MambaModelConfig

_LOG = init_logger(f"vllm.{__name__}")
_BATCH = f"{__package__}.batch:Batch"
WORKER = f"{__package__}.worker.MemoryWorker"


class ServedConfig(MambaModelConfig):
    """vLLM takes a model whose layer_types name attention alone for one without a state, and leaves
    `MambaModelConfig`'s settings out."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().verify_and_update_config(vllm_config)
        given = vllm_config.model_config.logits_processors or []
        vllm_config.model_config.logits_processors = [*(given if _BATCH in given else [*given, _BATCH])]
        if vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE):
            _LOG.warning(
                "In-Place TTT: without CUDA graphs: a graph would go on writing the slots of the step that "
                "it was recorded in."
            )
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.parallel_config.worker_extension_cls = (
            vllm_config.parallel_config.worker_extension_cls or WORKER
        )
