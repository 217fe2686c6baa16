"""Where the processes of a run wait for each other before their group opens: as long as it takes, but not for one that failed.

Tokenising, auditing and reading large files may take hours in one process, and a process group gives up on the others after
half an hour. So all of that comes before the group, and meets on the store that the group is then made from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from ..errors import NotSoError

_POLL = 0.1
"""Seconds between two looks at the store."""
_READY, _FAILED = "inplace-ttt/ready", "inplace-ttt/failed"


class Meeting:
    """The store that a run's processes share, and this one's place among them."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world

    @classmethod
    def by_environment(cls) -> Meeting:
        """By what the launcher put into the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
        store, rank, world = next(iter(dist.rendezvous("env://")))
        return cls(store, rank, world)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Each process does its part within it; none leaves before all have. Raises NotSoError where another one fails."""
        try:
            yield
        except BaseException as error:
            self.store.set(_FAILED, f"process {self.rank} of the run cannot start: {error}")
            raise
        try:
            self.store.add(_READY, 1)
            while self.store.add(_READY, 0) < self.world:
                if self.store.check([_FAILED]):
                    raise NotSoError(self.store.get(_FAILED).decode())
                time.sleep(_POLL)
        except (DistNetworkError, DistStoreError):
            raise NotSoError("process 0 of the run ended while others were waiting for it; its log says why.") from None

    def open_group(self, backend: str, timeout: timedelta) -> None:
        """The process group of all of them."""
        dist.init_process_group(
            backend, store=PrefixStore("inplace-ttt/group", self.store), rank=self.rank, world_size=self.world, timeout=timeout
        )
