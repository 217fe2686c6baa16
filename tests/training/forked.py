"""Processes that start in a moment, with an environment and a log of their own."""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from forkserver import FORKSERVER

from inplace_ttt.training.run.launch import _remove_shared_memory


class Forked:
    """Processes that call a function of no arguments, each in an environment of its own; what they print goes
    into one log."""

    def __init__(
        self, call: Callable[[], Any], environments: list[Mapping[str, str]], largest_file: int | None = None
    ) -> None:
        reader, writer = FORKSERVER.Pipe(duplex=False)
        self.processes: list[Any] = [
            FORKSERVER.Process(target=_run, args=(call, dict(environment), writer, largest_file), daemon=True)
            for environment in environments
        ]
        self.ports = {
            int(environment["MASTER_PORT"]) for environment in environments if "MASTER_PORT" in environment
        }
        for process in self.processes:
            process.start()
        writer.close()
        self._log: list[bytes] = []
        self._reading = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._reading.start()

    def _read(self, reader: Connection) -> None:
        while part := os.read(reader.fileno(), 1 << 16):
            self._log.append(part)

    def is_running(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """End them, and remove what DeepSpeed's CPU reduction leaves of them in shared memory."""
        for process in self.processes:
            process.kill()
            process.join()
        for port in self.ports:
            _remove_shared_memory(port)

    def wait(self, seconds: float = 300) -> tuple[int, str]:
        """The first exit code that is not 0, 124 after so many seconds, and the log. If one process fails,
        the others are ended."""
        until = time.monotonic() + seconds
        while (
            self.is_running()
            and time.monotonic() < until
            and not any(process.exitcode for process in self.processes)
        ):
            time.sleep(0.02)
        codes = [process.exitcode for process in self.processes]
        if self.is_running() and not any(codes):
            codes.append(124)
        time.sleep(0.2 if any(codes) else 0)  # the others may be about to say something too
        self.kill()
        self._reading.join(10)
        return next((code for code in codes if code), 0), b"".join(self._log).decode(errors="replace")


def _run(
    call: Callable[[], Any], environment: dict[str, str], output: Connection, largest_file: int | None
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.exit(call())
