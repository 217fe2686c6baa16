"""Compile the kernels for GPUs that are not there, and report what ptxas says: run as a script, without the interpreter.

python tests/kernels/ahead_of_time.py    # one JSON object a line
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inplace_ttt_kernels import walk
from inplace_ttt_kernels.tuning import Tile, tiles

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: set[str], arch: int, tile: Tile) -> dict[str, Any]:
    """Registers, spills, shared memory and the tensor-core and copy instructions of one kernel for one architecture."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=places)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": tile.warps, "num_stages": tile.stages})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(binary.asm["ptx"])
        ptxas = Path(triton.__path__[0], "backends", "nvidia", "bin", "ptxas")
        target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [ptxas, "-v", f"-arch={target}", ptx, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),  # type: ignore[index]
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),  # type: ignore[index]
        "shared_bytes": binary.metadata.shared,
        "wgmma": binary.asm["ptx"].count("wgmma.mma_async"),
        "mma": binary.asm["ptx"].count("mma.sync"),
        "tma": binary.asm["ptx"].count("cp.async.bulk.tensor"),
    }


def walks(arch: int) -> Iterator[dict[str, Any]]:
    modes = {"state": (False, False), "weight": (True, True), "gradient": (True, False)}
    for dtype, clipped, (mode, (base, dither)) in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True), modes.items()):
        for number, tile in enumerate(tiles(dtype, divmod(arch, 10), two_sums=clipped)):
            by_tile, short, part = arch >= 90 and dtype != torch.float32, NAMES[dtype], tile.columns // tile.parts
            types = {name: "*fp32" for name in ("start", "carry", "factors")} | {name: f"*{short}" for name in ("a", "b", "slots", "base")}
            types |= {"scale": "fp32"} | ({} if mode != "gradient" else {"base": "*fp32"})
            if by_tile:
                types |= {
                    "a": f"tensordesc<{short}[{tile.depth}, {tile.rows}]>",
                    "b": f"tensordesc<{short}[{tile.depth}, {tile.columns}]>",
                    "slots": f"tensordesc<{short}[1, {tile.rows}, {part}]>",
                    "base": f"tensordesc<{types['base'][1:]}[{tile.rows}, {part}]>",
                }
            constants: dict[str, Any] = dict(
                HAS_BASE=base, DITHER=dither and dtype != torch.float32, CLIPPED=clipped, BY_TILE=by_tile,
                DTYPE=getattr(triton.language, str(dtype).removeprefix("torch.")), PRECISION="ieee" if dtype == torch.float32 else "tf32",
                BD=tile.rows, BH=tile.columns, BK=tile.depth, PARTS=tile.parts,
            )  # fmt: skip
            if not base:
                constants["base"] = None
            if not clipped:
                constants["factors"] = None
            aligned = {"start", "carry", "d", "h", "a_stride", "b_stride"} | ({"slots", "a", "b"} if not by_tile else set())
            found = compiled(walk.walk_kernel, types, constants, aligned, arch, tile)
            yield {"kernel": "walk", "arch": arch, "dtype": short, "mode": mode, "clipped": clipped, "candidate": number, **found}


if __name__ == "__main__":
    for arch in (80, 90):
        for row in walks(arch):
            print(json.dumps(row), flush=True)
