"""Starts a run's processes and ends with them.

On one machine it starts them itself. On several machines it uses DeepSpeed's launcher or torchrun.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ...errors import InPlaceTTTError, NotSoError, how_to_install
from ..loop.stopping import LAUNCHER, REFUSAL, on_signals
from ..recipe.packages import check_packages
from ..recipe.recipe import Recipe

logger = logging.getLogger(__name__)

_POLL = 0.1
_GRACE = 10.0
"""Seconds that the other processes of a run get to end by themselves after one has failed."""


def launch(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Runs `python -m inplace_ttt.training RECIPE …` in as many processes as the recipe asks for.

    The children log to stderr. A signal to stop is passed on to them, and they end with a checkpoint. An
    interruption (Ctrl-C) ends them at once.

    Args:
        recipe: the run's recipe.
        arguments: command-line arguments of every process.

    Returns:
        The exit code of the run.

    Raises:
        InPlaceTTTError: if the run was refused; the message is the reason.
    """
    check_packages(recipe)
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
        environment.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.parallel.nproc_per_node))
        )
    here = str(Path(__file__).parents[3])  # the children import this process's package, installed or not
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environment.get("PYTHONPATH"))))
    _warn_of_locked_builds()
    with tempfile.NamedTemporaryFile() as refusal:
        environment[REFUSAL] = refusal.name
        code = _started(recipe, arguments, environment)
        reason = Path(refusal.name).read_text(encoding="utf-8")
    if code and reason:
        raise (NotSoError if code == NotSoError.exit_code else InPlaceTTTError)(reason)
    return code


def _started(recipe: Recipe, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the exit code of the run's processes here, or of the launcher that the recipe names."""
    if not recipe.parallel.starts_itself:
        launcher = {"torchrun": by_torchrun, "deepspeed": by_deepspeed}[recipe.parallel.launcher]
        return _run_all([(launcher(recipe, arguments), environment)])
    port = _free_port()
    line = [sys.executable, "-u", "-m", "inplace_ttt.training", *arguments]
    try:
        return _run_all(
            [(line, {**environment, **place}) for place in one_node(recipe.parallel.nproc_per_node, port)]
        )
    finally:
        _remove_shared_memory(port)


def one_node(processes: int, port: int) -> Iterator[dict[str, str]]:
    """Yields the environment variables of each process on this machine.

    They hold its rank, and the id of the process with which it ends.

    Args:
        processes: number of processes.
        port: free port of the store.

    Raises:
        InPlaceTTTError: if the machine has fewer devices than processes.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else processes
    if processes > devices:
        raise InPlaceTTTError(
            f"the recipe is for {processes} devices, but this machine has {devices}; set "
            "parallel.nproc_per_node."
        )
    common = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(processes))
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHER: str(os.getpid())}
    for rank in range(processes):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def by_torchrun(recipe: Recipe, arguments: Sequence[str]) -> list[str]:
    """Returns the command line of torchrun on one node.

    Args:
        recipe: the run's recipe.
        arguments: command-line arguments of every process.

    Raises:
        InPlaceTTTError: if there are several nodes and the recipe lacks their meeting point.
    """
    parallel = recipe.parallel
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(parallel.nnodes),
        "--nproc-per-node",
        str(parallel.nproc_per_node),
    ]
    if parallel.nnodes == 1 and parallel.rdzv_endpoint is None:
        line += ["--standalone"]
    elif parallel.rdzv_endpoint is None:
        raise InPlaceTTTError(
            "several nodes need parallel.rdzv_endpoint, HOST:PORT of one of them, where torchrun's agents "
            "meet."
        )
    else:
        job = os.environ.get("SLURM_JOB_ID", "inplace-ttt")
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", parallel.rdzv_endpoint, "--rdzv-id", job]
    return [*line, "-m", "inplace_ttt.training", *arguments]


def by_deepspeed(recipe: Recipe, arguments: Sequence[str]) -> list[str]:
    """Returns the command line of DeepSpeed's launcher, which starts the nodes of the recipe's hostfile.

    The nodes meet at a port that the launcher chooses.

    Args:
        recipe: the run's recipe.
        arguments: command-line arguments of every process.

    Raises:
        InPlaceTTTError: if the launcher or the hostfile is missing.
    """
    parallel = recipe.parallel
    launcher = shutil.which(
        "deepspeed", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    )
    if launcher is None:
        raise InPlaceTTTError(
            f"DeepSpeed's launcher `deepspeed` is not on the PATH; {how_to_install('train')}."
        )
    if parallel.hostfile is None:
        raise InPlaceTTTError(
            f"{parallel.nnodes} nodes need parallel.hostfile, or launcher: torchrun and inplace-ttt train "
            "on each (docs/launch.md)."
        )
    hostfile = recipe.beside(parallel.hostfile)
    if not hostfile.exists():
        raise InPlaceTTTError(
            f"the hostfile {hostfile} does not exist; write a line `HOST slots={parallel.nproc_per_node}` "
            "for each node."
        )
    line = [
        sys.executable,
        launcher,
        "--no_local_rank",
        "--log_level",
        "warning",
        "--hostfile",
        str(hostfile),
    ]
    line += ["--num_nodes", str(parallel.nnodes), "--num_accelerators", str(parallel.nproc_per_node)]
    return [*line, "--module", "inplace_ttt.training", *arguments]


def _run_all(lines: list[tuple[list[str], Mapping[str, str]]]) -> int:
    """Runs commands in parallel, each in a session of its own.

    A terminal's Ctrl-C then reaches this process alone.
    """
    processes: list[subprocess.Popen[bytes]] = []
    asked = threading.Event()
    with on_signals(asked.set):
        try:
            for line, environment in lines:
                processes.append(
                    subprocess.Popen(line, env=environment, stdout=sys.stderr, start_new_session=True)
                )
            return _wait(processes, asked)
        finally:
            for process in processes:
                if process.poll() is None:  # not yet reaped, so the process id cannot belong to another
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], asked: threading.Event) -> int:
    """Returns the exit code of the first process that fails, once all have ended; 0 if none fails."""
    code, until, passed_on = 0, float("inf"), False
    while sum(process.poll() is None for process in processes) and time.monotonic() < until:
        if asked.is_set() and not passed_on:
            passed_on = True
            for process in processes:
                process.terminate()
        if not code and (code := _first_failure(processes)):
            until = time.monotonic() + _GRACE
        time.sleep(_POLL)
    return code or _first_failure(processes)


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int:
    for rank, process in enumerate(processes):
        if process.returncode:
            if process.returncode in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
                name = signal.Signals(-process.returncode).name
                logger.warning(
                    "process %d of the run was ended by %s%s",
                    rank,
                    name,
                    ": no memory left?" * (name == "SIGKILL"),
                )
            return process.returncode if process.returncode > 0 else 128 - process.returncode
    return 0


def _warn_of_locked_builds() -> None:
    """Warns of locks that a killed start left behind.

    DeepSpeed compiles its operators at the first start. It waits for such a lock without end or message.
    """
    from torch.utils.cpp_extension import get_default_build_root

    builds = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in builds.glob("**/lock"):
        logger.warning(
            "%s is the lock of a build; delete it if nothing else compiles now, or this run will wait for it "
            "without end.",
            lock,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _remove_shared_memory(port: int) -> None:
    """Removes the shared memory of the processes that met at this port.

    DeepSpeed's CPU reduction never frees its 66 MiB per process.
    """
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        left.unlink(missing_ok=True)
