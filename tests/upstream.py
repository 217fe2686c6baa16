"""What older transformers cannot do with unconverted models either: tests of it are left out there, so that
what fails is ours."""

import pytest
import transformers
from packaging.version import Version


def before(version: str) -> bool:
    """Whether the installed transformers is older."""
    return Version(transformers.__version__) < Version(version)


def needs(version: str, what: str) -> None:
    """Skip the rest of the test where transformers is older than `version`, the oldest that was seen to do
    it; `what` fails before."""
    if before(version):
        pytest.skip(f"in transformers {transformers.__version__} {what}, in unconverted models too")
