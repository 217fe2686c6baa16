"""Separates exceptions of the model from exceptions of the probe itself."""

from __future__ import annotations

import traceback

from torch import nn

_AUDIT = __name__.rpartition(".")[0] + "."


def is_the_probes(error: BaseException) -> bool:
    """Returns True if the audit's own code raised the error, and not a module that it called.

    The search goes from the innermost frame outwards, and skips frames of torch itself.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_globals.get("__name__", "")
        if frame.f_code is nn.Module._call_impl.__code__:
            return False
        if name.partition(".")[0] != "torch":
            return name.startswith(_AUDIT)
    return False
