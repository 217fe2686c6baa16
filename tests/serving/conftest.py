"""These tests run where vLLM is installed: `make test-serving` makes such an environment."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
