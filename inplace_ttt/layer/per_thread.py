"""What belongs to the thread that runs a forward, as torch's own modes do."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class UnderWay:
    """The forward that a thread is in, by values of the files above this one.

    open: the `ForwardContext` of a converted model's forward. armed: the `LayerCall` of the TTT layer whose
        attention has run and whose
    down-projection has not. switched: `ModelHooks` of models whose TTT is turned on or off. groups: by
    `ModelHooks`, the ranks that share a model's rows. text_forwards: how many of the next forwards are of
    text, see `reading_text`. targets: by layer, targets [B, T, d] that the next forward takes.
    """

    # all of it from the start: a graph holds for objects that have the same attributes
    def __init__(self) -> None:
        self.open: Any = None
        self.armed: Any = None
        self.switched: Mapping[Any, bool] = {}
        self.groups: Mapping[Any, Any] = {}
        self.text_forwards: float = 0
        self.targets: Mapping[int, Any] | None = None


class _PerThread(threading.local):
    def __init__(self) -> None:
        # torch.compile keeps what a graph leaves in an object that a thread holds, and forgets what it leaves
        # in the thread itself
        self.under_way = UnderWay()


_per_thread = _PerThread()


def this_thread() -> UnderWay:
    """What is under way in the thread that asks."""
    return _per_thread.under_way
