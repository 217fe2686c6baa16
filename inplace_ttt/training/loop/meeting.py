"""A meeting point for the processes of a run before their process group opens.

Tokenizing, auditing and reading large files may take hours in one process, and a process group times out
after half an hour. So this work is done before the group opens. Meanwhile, the other processes wait at the
store from which the group is made later. They wait without limit, unless one of them fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from ...errors import InPlaceTTTError

_POLL = 0.1
"""Seconds between two checks of the store."""
_FAREWELL = 2.0
"""Seconds that process 0, which serves the store, waits for the others after a failure.

They read from the store that the run has failed.
"""
_FAILURES, _EXIT_CODE, _HEARD, _PARTED = "failures", "exit-code", "heard", "parted"
_GONE = (DistNetworkError, DistStoreError)


class OtherFailed(InPlaceTTTError):
    """Another process of the run has failed and printed the reason.

    This process prints nothing and ends with the same exit code.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of the run has failed, and printed the reason.")
        self.exit_code = exit_code


class Meeting:
    """The store that a run's processes share, and this process's rank.

    Args:
        store: the shared store.
        rank: rank of this process.
        world: number of processes.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = PrefixStore("inplace-ttt", store), rank, world

    @classmethod
    def by_environment(cls) -> Meeting:
        """Joins the run of the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
        store, rank, world = next(iter(dist.rendezvous("env://")))
        return cls(store, rank, world)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Wraps all work of a process. Only the process that fails first raises its own error.

        Raises:
            OtherFailed: in place of the error, if another process failed before.
        """
        try:
            yield
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
            first = self._first_to_fail(code if isinstance(code, int) else 1)
            if first is None or isinstance(error, OtherFailed):
                raise
            raise OtherFailed(first) from None

    def _first_to_fail(self, code: int) -> int | None:
        """Returns the exit code of the process that failed before this one.

        None if this one is the first, or process 0 is gone.
        """
        first = None
        with suppress(*_GONE):
            if self.store.add(_FAILURES, 1) == 1:
                self.store.set(_EXIT_CODE, str(code))
            else:
                first = int(self.store.get(_EXIT_CODE))
            # only after the answer: process 0 may end, and with it the store, once all have reported
            self.store.add(_HEARD, 1)
            if self.rank == 0:
                _until(lambda: self.store.add(_HEARD, 0) >= self.world, _FAREWELL)
        return first

    def gather(self, name: str, value: Any = None) -> list[Any]:
        """Gathers a value from every process, once all have called it.

        Args:
            name: a name that no other call uses.
            value: plain JSON values.

        Returns:
            The values by rank.

        Raises:
            OtherFailed: if a process has failed.
        """
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        try:
            self.store.set(keys[self.rank], json.dumps(value))
            while not self.store.check(keys):
                if self.store.check([_EXIT_CODE]):
                    raise OtherFailed(int(self.store.get(_EXIT_CODE)))
                time.sleep(_POLL)
            return [json.loads(held) for held in self.store.multi_get(keys)]
        except _GONE:
            raise OtherFailed(1) from None

    def part(self) -> None:
        """Ends the meeting of processes that need no process group.

        Process 0, which serves the store, waits until the others no longer need it.
        """
        with suppress(*_GONE):
            self.store.add(_PARTED, 1)
            if self.rank == 0:
                _until(lambda: self.store.add(_PARTED, 0) >= self.world, _FAREWELL)

    def open_group(self, backend: str, timeout: timedelta) -> None:
        """Opens the process group of all processes."""
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=timeout,
        )


def _until(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(_POLL / 2)
