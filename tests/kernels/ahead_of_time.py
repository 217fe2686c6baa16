"""Compile the kernels for GPUs that are not there, and report what ptxas says: run as a script, without the interpreter.

python tests/kernels/ahead_of_time.py [--all]    # one JSON object a line; in bfloat16, unclipped; --all: everything
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from inplace_ttt_kernels import conv, gram, walk
from inplace_ttt_kernels.tuning import Tile, tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: set[str], arch: int, tile: Tile) -> dict[str, Any]:
    """What one kernel takes on one architecture, how many run at a time, its tensor-core and copy instructions."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=places)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": tile.warps, "num_stages": tile.stages})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(binary.asm["ptx"])
        target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        # The assemblers that Triton brings differ in the PTX versions they know.
        for ptxas in sorted(Path(triton.__path__[0], "backends", "nvidia", "bin").glob("ptxas*")):
            command = [ptxas, "-v", f"-arch={target}", ptx, "-o", Path(folder, "kernel.cubin")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "Unsupported .version" not in done.stderr:
                break
        done.check_returncode()
        said = done.stderr
        nvdisasm = Path(triton.__path__[0], "backends", "nvidia", "bin", "nvdisasm")
        machine_code = subprocess.run([nvdisasm, "-c", Path(folder, "kernel.cubin")], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    loop = re.search(r"scf\.for .*?dot_wait .*?pendings = (\d+)", binary.asm["ttgir"], re.DOTALL)
    return {
        "registers": registers,
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),  # type: ignore[index]
        "spills_in_loop": spills_in_loop(machine_code.splitlines()),
        "shared_bytes": binary.metadata.shared,
        # of a Hopper multiprocessor's 65,536 registers and 228 KiB, of which a program takes 1 KiB more than it asks for
        "programs": min(65536 // (-(-registers // 8) * 8 * 32 * tile.warps), (228 << 10) // (binary.metadata.shared + 1024)),
        "in_flight": int(loop[1]) if loop else 0,  # products that one iteration leaves to the next
        "wgmma": binary.asm["ptx"].count("wgmma.mma_async"),
        "mma": binary.asm["ptx"].count("mma.sync"),
        "tma": binary.asm["ptx"].count("cp.async.bulk.tensor"),
    }


def spills_in_loop(lines: Sequence[str]) -> int:
    """Loads and stores of spilled registers in the shortest stretch of machine code that is gone through again and multiplies."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    back = ((labels.get(match[1], end), end) for end, line in enumerate(lines) if (match := re.search(r"BRA `\((\.L_x_\d+)\)", line)))
    loops = [lines[start:end] for start, end in back if any("MMA" in line for line in lines[start:end])]
    return sum("STL" in line or "LDL" in line for line in min(loops, key=len, default=[]))


def walks(arch: int, dtypes: Sequence[torch.dtype]) -> Iterator[dict[str, Any]]:
    modes = {"weight": (True, True), "state": (False, False), "sum": (False, False), "gradient": (True, False)}
    for dtype, clipped, (mode, (base, dither)) in itertools.product(dtypes, (False, True), modes.items()):
        if clipped and mode == "gradient":  # factors are for writes
            continue
        for number, tile in enumerate(tiles(dtype, divmod(arch, 10), two_sums=clipped or mode == "gradient")):
            by_tile, short, part = arch >= 90 and dtype != torch.float32, NAMES[dtype], tile.columns // tile.parts
            base_by_tile = by_tile and mode == "weight"
            types = dict.fromkeys(("start", "carry", "factors"), "*fp32") | dict.fromkeys(("a", "b", "slots", "base"), f"*{short}")
            types |= {"scale": "fp32"} | ({} if mode != "gradient" else {"base": "*fp32"})
            if by_tile:
                types |= {
                    "a": f"tensordesc<{short}[{tile.depth}, {tile.rows}]>",
                    "b": f"tensordesc<{short}[{tile.depth}, {tile.columns}]>",
                    "slots": f"tensordesc<{short}[1, {tile.rows}, {part}]>",
                } | ({"base": f"tensordesc<{short}[{tile.rows}, {part}]>"} if base_by_tile else {})
            constants: dict[str, Any] = dict(
                HAS_SLOTS=mode != "sum", HAS_BASE=base, BASE_BY_TILE=base_by_tile,
                DITHER=dither and dtype != torch.float32, CLIPPED=clipped, BY_TILE=by_tile,
                DTYPE=getattr(triton.language, str(dtype).removeprefix("torch.")), PRECISION="ieee" if dtype == torch.float32 else "tf32",
                BD=tile.rows, BH=tile.columns, BK=tile.depth, PARTS=tile.parts,
            )  # fmt: skip
            if not base:
                constants["base"] = None
            if mode == "sum":
                constants["slots"] = None
            if not clipped:
                constants["factors"] = None
            aligned = {"start", "carry", "d", "h", "a_stride", "b_stride"} | ({"a", "b"} if not by_tile else set())
            found = compiled(walk.walk_kernel, types, constants, aligned, arch, tile)
            yield {"kernel": "walk", "arch": arch, "dtype": short, "mode": mode, "clipped": clipped, "candidate": number, **found}


def grams(arch: int, dtypes: Sequence[torch.dtype]) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        for number, tile in enumerate(tiles(dtype, divmod(arch, 10), square=True)):
            types = {"a": f"*{NAMES[dtype]}", "b": f"*{NAMES[dtype]}", "starts": "*i64", "out": "*fp32"}
            constants = {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", "B": tile.rows, "BK": tile.depth}
            aligned = {"a", "b", "d", "h", "a_stride", "b_stride"}
            found = compiled(gram.squared_norms_kernel, types, constants, aligned, arch, tile)
            yield {"kernel": "squared_norms", "arch": arch, "dtype": NAMES[dtype], "candidate": number, **found}


def convolutions(arch: int, dtypes: Sequence[torch.dtype]) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        types = dict.fromkeys(("x", "conv", "out", "d_out"), f"*{NAMES[dtype]}") | {"ids": "*i32", "parts": "*fp32"}
        shape = {"TAPS": 5, "BT": conv._TOKENS, "BC": conv._CHANNELS}
        for reverse in (False, True):
            aligned = {"x", "out", "d", "x_row", "x_token"}
            found = compiled(conv.convolve_kernel, types, {**shape, "REVERSED": reverse}, aligned, arch, Tile(0, 0, 0))
            yield {"kernel": "convolve", "arch": arch, "dtype": NAMES[dtype], "reverse": reverse, **found}
        aligned = {"x", "d_out", "d", "x_row", "x_token", "g_row", "g_token"}
        found = compiled(conv.taps_gradient_kernel, types, {**shape, "BLOCKS": 32}, aligned, arch, Tile(0, 0, 0))
        yield {"kernel": "taps_gradient", "arch": arch, "dtype": NAMES[dtype], **found}


if __name__ == "__main__":
    everything = "--all" in sys.argv
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if everything else [torch.bfloat16]
    for arch, kind in itertools.product((80, 90), (convolutions, grams, walks)):
        if everything or arch == 90 or kind is walks:
            for row in kind(arch, dtypes):
                if everything or not row.get("clipped"):
                    print(json.dumps(row), flush=True)
