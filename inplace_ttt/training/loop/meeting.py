"""Where the processes of a run wait for each other before their group opens: as long as it takes, but not for
one that failed.

Tokenising, auditing and reading large files may take hours in one process, and a process group gives up on
the others after half an hour. So all of that comes before the group, and meets on the store that the group is
then made from.
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
"""Seconds between two looks at the store."""
_FAREWELL = 2.0
"""Seconds for which process 0, whose store it is, waits for the others to hear that the run has failed."""
_FAILURES, _EXIT_CODE, _HEARD, _PARTED = "failures", "exit-code", "heard", "parted"
_GONE = (DistNetworkError, DistStoreError)


class OtherFailed(InPlaceTTTError):
    """Another process of the run has failed, and says why; this one ends with the same exit code and says
    nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of the run has failed, and says why.")
        self.exit_code = exit_code


class Meeting:
    """The store that a run's processes share, and this one's place among them."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = PrefixStore("inplace-ttt", store), rank, world

    @classmethod
    def by_environment(cls) -> Meeting:
        """By what the launcher put into the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
        store, rank, world = next(iter(dist.rendezvous("env://")))
        return cls(store, rank, world)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around all that a process does. Of those that fail the first one's error is raised; in the others
        it is an OtherFailed."""
        try:
            yield
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
            first = self._first_to_fail(code if isinstance(code, int) else 1)
            if first is None or isinstance(error, OtherFailed):
                raise
            raise OtherFailed(first) from None

    def _first_to_fail(self, code: int) -> int | None:
        """The exit code of the process that failed before this one; None where there is none, or where
        process 0 is gone."""
        first = None
        with suppress(*_GONE):
            if self.store.add(_FAILURES, 1) == 1:
                self.store.set(_EXIT_CODE, str(code))
            else:
                first = int(self.store.get(_EXIT_CODE))
            # not before this one knows: process 0 may be gone before the store has answered
            self.store.add(_HEARD, 1)
            if self.rank == 0:
                _until(lambda: self.store.add(_HEARD, 0) >= self.world, _FAREWELL)
        return first

    def gather(self, name: str, value: Any = None) -> list[Any]:
        """What every process gives (plain JSON values), by rank; returns when all have come. A name serves
        once.

        Raises OtherFailed where a process has failed.
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
        """For processes that end without a group: process 0, whose store it is, waits until the others need
        it no more."""
        with suppress(*_GONE):
            self.store.add(_PARTED, 1)
            if self.rank == 0:
                _until(lambda: self.store.add(_PARTED, 0) >= self.world, _FAREWELL)

    def open_group(self, backend: str, timeout: timedelta) -> None:
        """The process group of all of them."""
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
