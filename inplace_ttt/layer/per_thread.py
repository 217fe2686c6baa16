"""What belongs to the thread that runs a forward, as torch's own modes do."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .forward_context import ForwardContext
    from .hooks import LayerCall, ModelHooks


class UnderWay:
    """open: a converted model's forward. armed: the TTT layer whose attention has run and whose
    down-projection has not. switched: models whose TTT is turned on or off. groups: the ranks that share a model's rows.
    text_forwards: how many of the next are of text, see `reading_text`."""

    def __init__(self) -> None:  # all of it from the start: a graph holds for objects that have the same attributes
        self.open: ForwardContext | None = None
        self.armed: LayerCall | None = None
        self.switched: Mapping[ModelHooks, bool] = {}
        self.groups: Mapping[ModelHooks, ProcessGroup | None] = {}
        self.text_forwards: float = 0


class _PerThread(threading.local):
    def __init__(self) -> None:
        # torch.compile keeps what a graph leaves in an object that a thread holds, and forgets what it leaves in the thread itself
        self.under_way = UnderWay()


_per_thread = _PerThread()


def this_thread() -> UnderWay:
    """What is under way in the thread that asks."""
    return _per_thread.under_way
