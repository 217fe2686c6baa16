"""Where the tests' processes are forked from: one process that has imported everything once, which takes some
ten seconds.

Of each test process there is one, and the first fork starts it: so what any of them needs is named here.
"""

import multiprocessing
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "accelerate.utils.deepspeed",
        "datasets",
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "inplace_ttt.training.run.worker",
        "peft",
        "torch._inductor.utils",
        "torch.distributed.fsdp",
        "transformers.integrations.deepspeed",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mistral.modeling_mistral",
    ]
)
