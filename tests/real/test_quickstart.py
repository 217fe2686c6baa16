"""The README's first commands on the real model: they print what the README says they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.full]


def test_the_readmes_first_commands_print_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(
        r"^```bash\n(inplace-ttt convert.*?)^```$.*?^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    assert first is not None and (ROOT / ".cache" / "text").exists(), "run `make model text` first"
    for folder in (".cache", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", first[1]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(first[2])
