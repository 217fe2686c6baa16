"""Arguments of `inplace-ttt plan RECIPE`."""

from __future__ import annotations

import argparse
import re

from ...errors import shown
from ..arguments import path

EXAMPLES = """examples:
  inplace-ttt plan recipes/smollm2-demo-cpu.yaml
  inplace-ttt plan recipes/qwen3-4b-stage1-32k-8gpu.yaml --device-memory 80GB --set training.liger=false"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=path, metavar="RECIPE", help="YAML file, see recipes/README.md")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a setting: section.key=value; repeatable",
    )
    parser.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        help="device memory, such as 80GB; warns if the run does not fit",
    )


_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GB or 24GiB, got {shown(text)}")
    return int(float(match[1]) * _UNITS[match[2].upper()])
