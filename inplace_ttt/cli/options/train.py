"""Arguments of `inplace-ttt train RECIPE`."""

from __future__ import annotations

import argparse

from ..arguments import path, whole

EXAMPLES = """examples:
  inplace-ttt train recipes/smollm2-demo-cpu.yaml
  inplace-ttt train recipes/smollm2-demo-cpu.yaml --num-processes 1 --set training.steps=20 \\
    --set output=runs/longer

a run whose output has a complete checkpoint resumes from it. SIGTERM, SIGUSR1 or SIGHUP
ends it with a checkpoint and exit code 143.
The same without this command, for another launcher:
  torchrun --nproc-per-node 2 -m inplace_ttt.training recipes/smollm2-demo-cpu.yaml

exit code: 0 done, 1 the audit or a check of losses, gradients and writes stopped the run, 2 bad input,
130 interrupted, 137 killed, 143 stopped by a signal"""


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
        "--num-processes",
        type=whole(1, 65536),
        metavar="N",
        help="processes per node (default: parallel.nproc_per_node)",
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="start from the beginning although the output has checkpoints",
    )
    parser.add_argument("--no-audit", action="store_true", help="skip the audit before the first step")
