"""Values that belong to the thread that runs a forward. torch's own modes are also per thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class UnderWay:
    """The forward that a thread is running.

    Attributes:
        open: the `ForwardContext` of a converted model's forward.
        armed: the `LayerCall` of the TTT layer whose attention has begun and whose down-projection has not.
        switched: dict from `ModelHooks` to True if the model's TTT was turned on, False if it was turned off.
        groups: dict from `ModelHooks` to the ranks that share the model's rows.
        text_forwards: number of following forwards that read text (`reading_text`).
        targets: targets [B, T, d] of the next forward, by layer.
    """

    # all attributes exist from the start, because a compiled graph requires that the attributes stay the same
    def __init__(self) -> None:
        self.open: Any = None
        self.armed: Any = None
        self.switched: Mapping[Any, bool] = {}
        self.groups: Mapping[Any, Any] = {}
        self.text_forwards: float = 0
        self.targets: Mapping[int, Any] | None = None


class _PerThread(threading.local):
    def __init__(self) -> None:
        # A compiled graph can change an object that the thread-local holds. Its changes to attributes of the
        # thread-local itself would be lost.
        self.under_way = UnderWay()


_per_thread = _PerThread()


def this_thread() -> UnderWay:
    """Returns the values of the current thread."""
    return _per_thread.under_way
