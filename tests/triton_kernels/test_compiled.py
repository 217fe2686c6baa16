"""The kernels compile for a GPU that is not there: no spill where it counts, room in shared memory, the
instructions meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


@pytest.mark.full
def test_for_hopper_and_ampere() -> None:
    script = Path(__file__).with_name("ahead_of_time.py")
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {
        "walk",
        "lead",
        "products",
        "squared_norms",
        "inner_products",
        "convolve",
        "taps_gradient",
        "leaf",
        "halves",
        "indexed_reads",
    }
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[row["arch"]], row
        if row["kernel"] != "walk":
            assert row["spilled_bytes"] == 0 or (
                row["kernel"] == "leaf" and row["halves"] and row["spilled_bytes"] < 700
            ), row
            assert row["kernel"] not in ("products", "squared_norms") or row["in_flight"] == 1, row
            continue
        # chunks that are no whole tiles, or rows that are no whole vectors
        if row["arch"] == 90 and not row["by_tile"]:
            assert row["spilled_bytes"] < 100 and row["spills_in_loop"] == 0 and row["wgmma"] > 0, row
            continue
        # the largest tiles spill while they load what they resume from, once a stretch
        assert row["spilled_bytes"] < 700 and row["spills_in_loop"] <= 8, row
        if row["arch"] == 80:
            assert row["mma"] > 0, row
            continue
        assert row["wgmma"] > 0 and row["tma"] > 0, row
        assert row["base_while_multiplying"] or row["mode"] != "weight", row
        # one product runs while the next is prepared; the second candidate leaves room for a second program
        assert row["in_flight"] == 1, row
        assert row["mode"] not in ("weight", "state") or row["candidate"] != 1 or row["programs"] == 2, row
