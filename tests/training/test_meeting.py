"""Processes that wait for each other before their group opens, and fail together."""

import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import Store, TCPStore

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.training.loop.arguments import open_group
from inplace_ttt.training.loop.meeting import Meeting, OtherFailed
from inplace_ttt.training.recipe.recipe import load_recipe

from .forked import Forked
from .recipes import write_recipe
from .runs import environments


def meet(
    world: int, act: Callable[[Meeting], Any], patience: float = 30
) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """What each of so many processes gives back, or fails with. They give up on the store after `patience`
    seconds."""
    limit = timedelta(seconds=patience)
    first = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    others = [
        TCPStore("127.0.0.1", first.port, None, False, limit, wait_for_workers=False)
        for _ in range(world - 1)
    ]
    given: dict[int, Any] = {}
    failed: dict[int, BaseException] = {}

    def process(rank: int, store: TCPStore) -> None:
        meeting = Meeting(store, rank, world)
        try:
            with meeting.failing_together():
                given[rank] = act(meeting)
        except BaseException as error:
            failed[rank] = error

    stores = [first, *others]  # held: process 0's store serves the others until the last has left
    threads = [threading.Thread(target=process, args=pair) for pair in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return given, failed


def test_a_wait_is_longer_than_any_time_out() -> None:
    """One process prepares for three times what a store or a group would wait; no other goes on without it,
    nor gives up."""

    def prepare(meeting: Meeting) -> tuple[float, list[Any]]:
        time.sleep(3 if meeting.rank == 1 else 0)
        return time.perf_counter(), meeting.gather("prepared", {"rank": meeting.rank})

    began = time.perf_counter()
    given, failed = meet(3, prepare, patience=1)
    assert not failed and time.perf_counter() - began >= 3
    assert (
        all(values == [{"rank": 0}, {"rank": 1}, {"rank": 2}] for _, values in given.values())
        and len(given) == 3
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_waits_for_one_that_failed(failing: int) -> None:
    """It alone says why, whichever it is; the others end with its exit code."""

    def prepare(meeting: Meeting) -> None:
        if meeting.rank == failing:
            raise InPlaceTTTError("there is no file x.")
        meeting.gather("prepared")

    _, failed = meet(2, prepare)
    assert str(failed[failing]) == "there is no file x." and not isinstance(failed[failing], OtherFailed)
    other = failed[1 - failing]
    assert isinstance(other, OtherFailed) and other.exit_code == 2


def test_of_many_that_fail_one_speaks() -> None:
    def prepare(meeting: Meeting) -> None:
        raise SystemExit(143)

    _, failed = meet(4, prepare)
    silent = [error for error in failed.values() if isinstance(error, OtherFailed)]
    assert len(failed) == 4 and len(silent) == 3 and {error.exit_code for error in silent} == {143}


def test_one_speaks_although_another_hears_late() -> None:
    """Process 0, whose store it is, stays until the others know that they are not to speak."""
    code, log = Forked(fail_hearing_late, environments(2)).wait()
    assert code == 2 and (log.count("FAILED"), log.count("OTHER")) == (1, 1), log


class Late:
    """A store whose answers come late, as to a process that is kept from running."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, key: str) -> bytes:
        time.sleep(0.5)
        return self.store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def fail_hearing_late() -> int:
    meeting = Meeting.by_environment()
    if meeting.rank == 1:
        time.sleep(0.5)  # process 0 is the first to fail
        meeting.store = Late(meeting.store)  # type: ignore[assignment]
    try:
        with meeting.failing_together():
            raise InPlaceTTTError("there is no file x.")
    except InPlaceTTTError as error:
        print("OTHER" if isinstance(error, OtherFailed) else "FAILED", flush=True)
        if meeting.rank == 0:
            os._exit(0)  # the store is gone at once; and nobody ends the other for it
        return error.exit_code


def test_the_timeout_is_the_recipes(tmp_path: Path) -> None:
    """Also in the group of its own in which DeepSpeed reduces gradients: one process never comes, and the
    other says so at once."""
    write_recipe(tmp_path, parallel={"nproc_per_node": 2, "timeout_minutes": 0.02})
    code, log = Forked(
        functools.partial(wait_in_deepspeeds_group, str(tmp_path / "tiny.yaml")), environments(2)
    ).wait()
    assert code == 3 and "WAITED" in log, log
    assert 1 <= float(log.split("WAITED ")[1].split()[0]) < 10


def wait_in_deepspeeds_group(recipe: str) -> int:
    open_group(Meeting.by_environment(), load_recipe(recipe))
    group = groups._clone_world_group()
    if os.environ["RANK"] == "1":
        time.sleep(60)
    began = time.perf_counter()
    try:
        dist.barrier(group)
    except RuntimeError:
        print("WAITED", time.perf_counter() - began)
        return 3
    return 0
