"""Counts the operations and bytes of the op on a GPU, kernel by kernel, without a GPU.

    python tools/gpu/count_kernels.py [--tokens 32768] [--rate 790] [--bandwidth 4.3]    # TFLOP/s, TB/s

Prints the tables of docs/kernels.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from inplace_ttt.kernels.operands import SLOTS_BYTES
from inplace_ttt.ops.benchmark import CHUNK_SIZES, WIDTHS, Shape


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of a kernel over a whole sequence. Each operand moves once."""

    operations: float
    bytes: float

    def milliseconds(self, rate: float, bandwidth: float) -> tuple[float, float]:
        return self.operations / rate / 1e9, self.bytes / bandwidth / 1e9


def walk(shape: Shape, reads_w0: bool, reads_all: bool) -> Work:
    """Counts one walk.

    It reads rows and writes slots. Between groups it writes the sum and reads it again. W0 is read once per
    group.
    """
    chunks = shape.tokens // shape.chunk_size
    matrix = shape.d * shape.h
    groups = -(-(chunks - 1) // max(SLOTS_BYTES // (2 * matrix), 1))
    rows = 2 * shape.tokens * (shape.d + shape.h)
    share = 1 if reads_all else (chunks - 1) / chunks
    moved = (
        rows
        + 2 * matrix * (chunks - 1)
        + 8 * matrix * (groups - 1)
        + (2 * matrix * groups if reads_w0 else 4 * matrix)
    )
    return Work(shape.product * share, moved)


def read(shape: Shape, all_chunks: bool = True) -> Work:
    """Counts one product by slot: it reads the rows and each slot once, and writes the results."""
    chunks = shape.tokens // shape.chunk_size
    share = 1 if all_chunks else (chunks - 1) / chunks
    return Work(
        shape.product * share, 2 * shape.tokens * (shape.d + shape.h) + 2 * shape.d * shape.h * chunks
    )


def kernels(shape: Shape) -> dict[str, Work]:
    return {
        "walk over W0 + ηS": walk(shape, reads_w0=True, reads_all=False),
        "O = Z E": read(shape),
        "the walk again": walk(shape, reads_w0=True, reads_all=False),
        "dZ = dO E": read(shape),
        "walk over R": walk(shape, reads_w0=False, reads_all=True),
        "dV = Z R": read(shape, all_chunks=False),
        "dZ += V R": read(shape, all_chunks=False),
    }


def materializing_passes(shape: Shape) -> float:
    """Returns the bytes of the public formulation's [chunks, d, h] tensors in 16 bits, forward and backward.

    Forward writes the deltas, then scales, concatenates and sums them, each with a read and a write, and
    reads the result. Backward writes its gradient. The reversed sum (two flips and a sum), the slice and the
    scale each read and write. Then it reads twice.
    """
    return 2 * shape.d * shape.h * (shape.tokens // shape.chunk_size) * (1 + 2 * 3 + 1 + 1 + 2 * 5 + 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rate", type=float, default=790, help="TFLOP/s of bf16 products")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    args = parser.parse_args()
    print("\n".join(tables(args.tokens, args.rate, args.bandwidth)))


def tables(tokens: int, rate: float, bandwidth: float) -> list[str]:
    lines = [
        "| model, C | a product | walk: compute, memory | read: compute, memory | bound | floor of all 7 | "
        "7 products in it "
        "| materializing moves |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (d, h) in WIDTHS.items():
        for chunk_size in CHUNK_SIZES:
            shape = Shape(d, h, tokens, chunk_size)
            times = {kernel: work.milliseconds(rate, bandwidth) for kernel, work in kernels(shape).items()}
            floor = sum(map(max, times.values()))
            (walk_compute, walk_memory), (read_compute, read_memory) = (
                times["walk over W0 + ηS"],
                times["O = Z E"],
            )
            bound = {True: "memory", False: "compute"}
            lines.append(
                f"| {name}, {chunk_size} | {shape.product / rate / 1e9:.2f} ms | {walk_compute:.2f}, "
                f"{walk_memory:.2f} | "
                f"{read_compute:.2f}, {read_memory:.2f} | {bound[walk_memory > walk_compute]}, "
                f"{bound[read_memory > read_compute]} | "
                f"{floor:.1f} ms | {7 * shape.product / rate / 1e9 / floor:.0%} | "
                f"{materializing_passes(shape) / bandwidth / 1e9:.1f} ms |"
            )
    lines += [
        "",
        "| model | 2dh / (d + h), in tokens |",
        "|---|---|",
    ]
    for name, (d, h) in WIDTHS.items():
        lines.append(f"| {name} | {2 * d * h // (d + h)} |")
    return lines


if __name__ == "__main__":
    main()
