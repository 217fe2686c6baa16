"""Settings of vLLM's engine for converted models."""

from __future__ import annotations

import os

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from .vllm_names import CompilationConfig, MambaModelConfig, VllmConfig

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
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
        _choose_runner(vllm_config)
        given = vllm_config.model_config.logits_processors or []
        vllm_config.model_config.logits_processors = [*(given if _BATCH in given else [*given, _BATCH])]
        _split_graphs(vllm_config.compilation_config)
        vllm_config.parallel_config.worker_extension_cls = (
            vllm_config.parallel_config.worker_extension_cls or WORKER
        )


def _choose_runner(vllm_config: VllmConfig) -> None:
    """Chooses vLLM's first model runner, in this process and in its workers.

    The second one, its default on GPUs, does not inform `Batch` of the requests.
    """
    if os.environ.get(_RUNNER, "0") != "0":
        raise InPlaceTTTError(
            f"fast weights need vLLM's first model runner; leave {_RUNNER} out of the environment."
        )
    if vllm_config.use_v2_model_runner:
        os.environ[_RUNNER] = "0"


def _split_graphs(compilation: CompilationConfig) -> None:
    """Leaves the fast weights' operator out of graphs, as vLLM does with attention.

    Only a graph of a step of one token per request may contain it. vLLM records such graphs by themselves.
    """
    if compilation.splitting_ops is None:
        # vLLM later splits at these operators, if it compiles in pieces
        object.__setattr__(compilation, "_attention_ops", [*CompilationConfig._attention_ops, ADVANCE])
    elif ADVANCE not in compilation.splitting_ops:
        compilation.splitting_ops = [*compilation.splitting_ops, ADVANCE]
