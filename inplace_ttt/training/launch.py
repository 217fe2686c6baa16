"""Start a run's processes with DeepSpeed's launcher."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import InPlaceTTTError
from .packages import check_packages
from .recipe import Recipe

logger = logging.getLogger(__name__)


def launch(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Run `deepspeed --module inplace_ttt.training RECIPE …` to its end; gives its exit code. The children log to stderr."""
    check_packages(recipe)
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.parallel.processes)))
    here = str(Path(__file__).parents[2])  # the package as this process has it, installed or not
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environment.get("PYTHONPATH"))))
    _warn_of_locked_builds()
    port = _free_port()
    try:
        return subprocess.run(command(recipe, arguments, port), env=environment, stdout=sys.stderr, check=False).returncode
    finally:
        _remove_shared_memory(port)


def command(recipe: Recipe, arguments: Sequence[str], port: int) -> list[str]:
    """The launcher's command line; several nodes are those of the recipe's hostfile, which meet at a port of their own."""
    parallel = recipe.parallel
    launcher = shutil.which("deepspeed", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if launcher is None:
        raise InPlaceTTTError("DeepSpeed's launcher `deepspeed` is not on the PATH; pip install 'inplace-ttt[train]'.")
    line = [sys.executable, launcher, "--no_local_rank", "--log_level", "warning"]
    if parallel.hostfile is not None:
        hostfile = recipe.beside(parallel.hostfile)
        if not hostfile.exists():
            raise InPlaceTTTError(f"the hostfile {hostfile} does not exist; write a line `HOST slots={parallel.processes}` for each node.")
        line += ["--hostfile", str(hostfile), "--num_nodes", str(parallel.nodes)]
    else:
        line += ["--hostfile", os.devnull, "--master_port", str(port)]
    line += ["--num_accelerators", str(parallel.processes)]
    return [*line, "--module", "inplace_ttt.training", *arguments]


def _warn_of_locked_builds() -> None:
    """DeepSpeed compiles its operators at the first start; a lock that a killed start left is waited for without end, or a word."""
    from torch.utils.cpp_extension import get_default_build_root

    builds = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in builds.glob("**/lock"):
        logger.warning("%s is the lock of a build; if nothing else compiles now, delete it, or this run waits for it without end.", lock)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _remove_shared_memory(port: int) -> None:
    """What the processes that met at this port left behind: DeepSpeed's CPU reduction never frees its 66 MiB each."""
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        left.unlink(missing_ok=True)
