"""transformers' own tests belong to one version of it; with another one installed they are not collected."""

from importlib.metadata import version

import pytest
from get_transformers_tests import ARCHIVES

collect_ignore = [] if version("transformers") in ARCHIVES else ["test_model_mixin.py"]


def pytest_configure(config: pytest.Config) -> None:
    for marker in [
        "slow",
        "accelerate_tests",
        "flash_attn_test",
        "flash_attn_3_test",
        "flash_attn_4_test",
        "torch_compile_test",
    ]:
        config.addinivalue_line("markers", f"{marker}: transformers' own")
