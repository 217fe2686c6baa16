"""Values that belong to the thread that runs a forward, as torch's own modes do."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class UnderWay:
    """The forward that a thread is running.

    Attributes:
        open: the `ForwardContext` of a converted model's forward.
        armed: the `LayerCall` of the TTT layer whose attention has begun and whose down-projection has not.
        switched: for models whose TTT was turned on or off, by `ModelHooks`: True if it is on.
        groups: the ranks that share a model's rows, by `ModelHooks`.
        text_forwards: number of the next forwards that read text, see `reading_text`.
        targets: targets [B, T, d] of the next forward, by layer.
    """

    # all attributes exist from the start: a compiled graph is valid for objects with the same attributes
    def __init__(self) -> None:
        self.open: Any = None
        self.armed: Any = None
        self.switched: Mapping[Any, bool] = {}
        self.groups: Mapping[Any, Any] = {}
        self.text_forwards: float = 0
        self.targets: Mapping[int, Any] | None = None


class _PerThread(threading.local):
    def __init__(self) -> None:
        # a compiled graph's changes to an object that the thread holds persist; its changes to attributes of
        # the thread-local itself are lost
        self.under_way = UnderWay()


_per_thread = _PerThread()


def this_thread() -> UnderWay:
    """Returns the values of the current thread."""
    return _per_thread.under_way
