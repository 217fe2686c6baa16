"""Compile the kernels for GPUs that are not there, and report what ptxas says: run as a script, without the
interpreter.

python tests/triton_kernels/ahead_of_time.py [--all]    # one JSON object a line; in bfloat16, unclipped;
--all: everything
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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inplace_ttt.kernels import conv, factor, gram, indexed_reads, walk
from inplace_ttt.kernels import products as grouped
from inplace_ttt.kernels.halves import halves_kernel
from inplace_ttt.kernels.schedule import FIELDS
from inplace_ttt.kernels.tuning import Tile, tiles

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: set[str], arch: int, tile: Tile
) -> dict[str, Any]:
    """What one kernel takes on one architecture, how many run at a time, its tensor-core and copy
    instructions."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=places)
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
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
        machine_code = subprocess.run(
            [nvdisasm, "-c", Path(folder, "kernel.cubin")], capture_output=True, text=True, check=True
        ).stdout
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    loop = re.search(r"scf\.for .*?dot_wait .*?pendings = (\d+)", binary.asm["ttgir"], re.DOTALL)
    asked = re.search(
        r"scf\.if (?:(?!scf\.).)*?%base\[(?:(?!dot_wait|local_to_global).)*?dot_wait",
        binary.asm["ttgir"],
        re.DOTALL,
    )
    return {
        "registers": registers,
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),  # type: ignore[index]
        "spills_in_loop": spills_in_loop(machine_code.splitlines()),
        "shared_bytes": binary.metadata.shared,
        # of a Hopper multiprocessor's 65,536 registers and 228 KiB, of which a program takes 1 KiB more than
        # it asks for
        "programs": min(
            65536 // (-(-registers // 8) * 8 * 32 * tile.warps),
            (228 << 10) // (binary.metadata.shared + 1024),
        ),
        "in_flight": int(loop[1]) if loop else 0,  # products that one iteration leaves to the next
        # W0 is asked for before the chunk's last product is waited for
        "base_while_multiplying": bool(asked),
        "wgmma": binary.asm["ptx"].count("wgmma.mma_async"),
        "mma": binary.asm["ptx"].count("mma.sync"),
        "tma": binary.asm["ptx"].count("cp.async.bulk.tensor"),
    }


def spills_in_loop(lines: Sequence[str]) -> int:
    """Loads and stores of spilled registers in the shortest stretch of machine code that is gone through
    again and multiplies."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    back = (
        (labels.get(match[1], end), end)
        for end, line in enumerate(lines)
        if (match := re.search(r"BRA `\((\.L_x_\d+)\)", line))
    )
    loops = [lines[start:end] for start, end in back if any("MMA" in line for line in lines[start:end])]
    return sum("STL" in line or "LDL" in line for line in min(loops, key=len, default=[]))


def walks(arch: int, dtypes: Sequence[torch.dtype], everything: bool) -> Iterator[dict[str, Any]]:
    """What a chunk reads from W0 or a state, what reaches a write (gradient: with the last state's), and W0's
    gradient alone; by pointer too where descriptors are the rule, which is how chunks that are not whole
    tiles go."""
    modes = {
        "weight": (False, True),
        "state": (False, False),
        "writes": (True, False),
        "gradient": (True, True),
        "sum": (True, False),
    }
    for dtype, clipped, by_pointer, (mode, (backward, base)) in itertools.product(
        dtypes, (False, True), (False, True), modes.items()
    ):
        copies = arch >= 90 and dtype != torch.float32
        if (clipped and mode == "sum") or (by_pointer and not copies):
            continue
        if not everything and (
            clipped or (mode == "sum" and arch == 80) or (by_pointer and mode not in ("weight", "gradient"))
        ):
            continue
        two_sums = (clipped and not backward) or mode == "gradient"
        for (number, tile), tail in itertools.product(
            enumerate(tiles(dtype, divmod(arch, 10), two_sums=two_sums, by_pointer=by_pointer or not copies)),
            (False, True),
        ):
            by_tile, short, part = copies and not by_pointer, NAMES[dtype], tile.columns // tile.parts
            if tail and not (by_tile and mode in ("writes", "gradient")):
                continue
            base_by_tile = by_tile and mode == "weight"
            types = dict.fromkeys(("start", "carry", "final", "factors", "total"), "*fp32") | {
                "scale": "fp32"
            }
            types |= dict.fromkeys(
                ("a", "b", "a_rows", "b_rows", "slots", "base"), f"*{short}"
            ) | dict.fromkeys(("table", "bounds"), "*i32")
            types |= {"base": "*fp32"} if mode == "gradient" else {}
            if by_tile:
                types |= {
                    "a": f"tensordesc<{short}[{tile.depth}, {tile.rows}]>",
                    "b": f"tensordesc<{short}[{tile.depth}, {tile.columns}]>",
                    "slots": f"tensordesc<{short}[1, {tile.rows}, {part}]>",
                } | ({"base": f"tensordesc<{short}[{tile.rows}, {part}]>"} if base_by_tile else {})
            constants: dict[str, Any] = dict(
                BACKWARD=backward, HAS_SLOTS=mode != "sum", HAS_BASE=base, BASE_BY_TILE=base_by_tile,
                DITHER=not backward and dtype != torch.float32, CLIPPED=clipped, ADDS=backward, HAS_TAIL=tail, BY_TILE=by_tile,
                DTYPE=getattr(triton.language, str(dtype).removeprefix("torch.")), PRECISION="ieee" if dtype == torch.float32 else "tf32",
                FIELDS=FIELDS, BD=tile.rows, BH=tile.columns, BK=tile.depth, PARTS=tile.parts,
            )  # fmt: skip
            absent = {
                "base": not base, "slots": mode == "sum", "factors": not clipped, "total": not backward, "a": not by_tile,
                "b": not by_tile, "a_rows": by_tile and not tail, "b_rows": by_tile and not tail,
            }  # fmt: skip
            constants |= {name: None for name, is_so in absent.items() if is_so}
            aligned = {"start", "carry", "final", "total", "d", "h", "a_stride", "b_stride"} | {
                "a_rows",
                "b_rows",
            }
            found = compiled(walk.walk_kernel, types, constants, aligned - constants.keys(), arch, tile)
            yield {
                "kernel": "walk", "arch": arch, "dtype": short, "mode": mode, "clipped": clipped, "by_tile": by_tile, "tail": tail,
                "candidate": number, **found,
            }  # fmt: skip


def leads(arch: int, dtypes: Sequence[torch.dtype], _: bool) -> Iterator[dict[str, Any]]:
    for dtype, backward in itertools.product(dtypes, (False, True)):
        types = {
            "start": "*fp32",
            "slots": f"*{NAMES[dtype]}",
            "base": "*fp32" if backward else f"*{NAMES[dtype]}",
        }
        types |= {"factors": "*fp32", "table": "*i32", "scale": "fp32"}
        constants = dict(
            HAS_START=not backward, HAS_BASE=True, DITHER=not backward and dtype != torch.float32, SCALED=backward,
            DTYPE=getattr(triton.language, str(dtype).removeprefix("torch.")), BD=32, BH=64,
        )  # fmt: skip
        found = compiled(
            walk.lead_kernel, types, constants, {"start", "slots", "base", "d", "h"}, arch, Tile(0, 0, 0)
        )
        yield {"kernel": "lead", "arch": arch, "dtype": NAMES[dtype], "backward": backward, **found}


def products(arch: int, dtypes: Sequence[torch.dtype], _: bool) -> Iterator[dict[str, Any]]:
    """Reads of each direction, and scores and what they are combined with."""
    uses = {
        "read": dict(MODE=0, REACH=0), "read back": dict(MODE=0, REACH=0, ADD=True), "scores": dict(MODE=1, REACH=0, EARLIER=True),
        "both": dict(MODE=1, REACH=0, EARLIER=True, MIRRORED=True), "Gram": dict(MODE=1, REACH=0, HAS_FACTORS=True),
        "combine": dict(MODE=2, REACH=1, ADD=True), "combine turned": dict(MODE=2, REACH=2),
    }  # fmt: skip
    for dtype, (name, use) in itertools.product(dtypes, uses.items()):
        shape = grouped.shape_for(dtype, interpreted=False)
        given = dict(EARLIER=False, MIRRORED=False, HAS_FACTORS=False, ADD=False) | use
        constants = given | {
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "B": shape.side,
            "BK": shape.deep,
        }
        constants |= {"a_m": 1} if name == "combine turned" else {"a_k": 1}
        constants |= {"b_k": 1} if name == "read" or use["MODE"] == 1 else {"b_n": 1}
        constants |= {} if constants["HAS_FACTORS"] else {"factors": None}
        types = dict.fromkeys("abc", f"*{NAMES[dtype]}") | {
            "tiles": "*i32",
            "factors": "*fp32",
            "alpha": "fp32",
        }
        aligned = {
            "a",
            "b",
            "c",
            "columns",
            "deep",
            "a_lead",
            "a_m",
            "a_k",
            "b_lead",
            "b_k",
            "b_n",
            "c_lead",
        } - constants.keys()
        found = compiled(
            grouped.products_kernel,
            types,
            constants,
            aligned,
            arch,
            Tile(0, 0, 0, 1, shape.warps, shape.stages),
        )
        yield {"kernel": "products", "arch": arch, "dtype": NAMES[dtype], "use": name, **found}


def grams(arch: int, dtypes: Sequence[torch.dtype], _: bool) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        for number, tile in enumerate(tiles(dtype, divmod(arch, 10), square=True)):
            types = {"a": f"*{NAMES[dtype]}", "b": f"*{NAMES[dtype]}", "starts": "*i32", "out": "*fp32"}
            constants = {
                "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
                "B": tile.rows,
                "BK": tile.depth,
            }
            aligned = {"a", "b", "d", "h", "a_stride", "b_stride"}
            found = compiled(gram.squared_norms_kernel, types, constants, aligned, arch, tile)
            yield {
                "kernel": "squared_norms",
                "arch": arch,
                "dtype": NAMES[dtype],
                "candidate": number,
                **found,
            }
        found = compiled(
            gram.inner_products_kernel,
            types,
            {"BT": 16, "BC": 128},
            {"a", "b", "n", "a_stride", "b_stride"},
            arch,
            Tile(0, 0, 0),
        )
        yield {"kernel": "inner_products", "arch": arch, "dtype": NAMES[dtype], **found}


def convolutions(arch: int, dtypes: Sequence[torch.dtype], _: bool) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        types = dict.fromkeys(("x", "conv", "out", "d_out"), f"*{NAMES[dtype]}") | {
            "ids": "*i32",
            "parts": "*fp32",
        }
        shape = {"TAPS": 5, "BT": conv._TOKENS, "BC": conv._CHANNELS}
        for reverse in (False, True):
            aligned = {"x", "out", "d", "x_row", "x_token"}
            found = compiled(
                conv.convolve_kernel, types, {**shape, "REVERSED": reverse}, aligned, arch, Tile(0, 0, 0)
            )
            yield {"kernel": "convolve", "arch": arch, "dtype": NAMES[dtype], "reverse": reverse, **found}
        aligned = {"x", "d_out", "d", "x_row", "x_token", "g_row", "g_token"}
        found = compiled(
            conv.taps_gradient_kernel,
            types,
            {**shape, "TAPS_ROOM": 8, "BT": conv._TOKENS_OF_TAPS, "BLOCKS": 64},
            aligned,
            arch,
            Tile(0, 0, 0),
        )
        yield {"kernel": "taps_gradient", "arch": arch, "dtype": NAMES[dtype], **found}


def inverse_factors(arch: int, dtypes: Sequence[torch.dtype], _: bool) -> Iterator[dict[str, Any]]:
    """Whatever the dtype of keys: the sums are float32."""
    aligned = {"matrices", "inverses", "a_matrix", "a_row", "x_matrix", "x_row"}
    types = {"matrices": "*fp32", "inverses": "*fp32"}
    for both, warps in ((False, 4), (True, 8)):
        constants = {"HALVES": both, "B": 64}
        found = compiled(factor.leaf_kernel, types, constants, aligned, arch, Tile(0, 0, 0, 1, warps))
        yield {"kernel": "leaf", "arch": arch, "halves": both, **found}
    types = {"x": "*fp32", "high": "*bf16", "low": "*bf16"}
    found = compiled(
        halves_kernel, types, {"B": 2048}, {"x", "high", "low", "numbers", "x_matrix"}, arch, Tile(0, 0, 0)
    )
    yield {"kernel": "halves", "arch": arch, **found}


def indexed(arch: int, dtypes: Sequence[torch.dtype], _: bool) -> Iterator[dict[str, Any]]:
    rows, columns = indexed_reads.tile(interpreted=False)
    constants = {"HAS_FACTORS": False, "BD": rows, "BR": columns}
    aligned = {"out", "z", "maps", "d", "r", "out_stride", "z_stride", "map_stride"}
    for dtype in dtypes:
        types = dict.fromkeys(("out", "z", "maps"), f"*{NAMES[dtype]}")
        types |= {"places": "*i64", "rows": "*i64", "factors": "*fp32", "scale": "fp32"}
        kernel = indexed_reads.indexed_reads_kernel
        found = compiled(kernel, types, constants, aligned, arch, Tile(0, 0, 0))
        yield {"kernel": "indexed_reads", "arch": arch, "dtype": NAMES[dtype], **found}


if __name__ == "__main__":
    everything = "--all" in sys.argv
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if everything else [torch.bfloat16]
    for arch, kind in itertools.product(
        (80, 90), (convolutions, grams, indexed, inverse_factors, leads, products, walks)
    ):
        if everything or arch == 90 or kind is walks:
            for row in kind(arch, dtypes, everything):
                print(json.dumps(row), flush=True)
