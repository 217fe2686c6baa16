"""Tell an exception of the model from one of the probe itself."""

from __future__ import annotations

import traceback

from torch import nn

_AUDIT = __name__.rpartition(".")[0] + "."


def is_the_probes(error: BaseException) -> bool:
    """True where the audit's own code raised it, and no module that it called.

    The frames are looked at from the inside out; those of torch itself are nobody's.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_globals.get("__name__", "")
        if frame.f_code is nn.Module._call_impl.__code__:
            return False
        if name.partition(".")[0] != "torch":
            return name.startswith(_AUDIT)
    return False
