"""How a process of a run ends when it is told to: with a checkpoint after a signal, and never later than what started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

LAUNCHER = "INPLACE_TTT_LAUNCHER"
"""Environment variable: the process id of `inplace-ttt train`, which holds the output and ends with its children."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM stopped: the same command goes on where it was."""
_POLL = 0.5
_LAUNCHERS = (LAUNCHER, "TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Who sets one of these (we, torchrun, DeepSpeed) watches over its children; a shell that starts a process by hand may leave before it."""


def end_with_launcher() -> None:
    """A thread that ends this process when the launcher that started it is gone, however it went."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return
    parent = int(os.environ.get(LAUNCHER) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()


class Stopping(TrainerCallback):
    """SIGTERM while a run trains: a checkpoint at the end of the step, then the end.

    `asked` is this process's own signal. All processes have to stop after the same step, or those that go on wait for ever in a
    collective: the trainer sums what each was asked with the loss, and says so by `agreed`. (transformers' own
    `enable_jit_checkpoint` stops each process where its own timer finds it.)

    every: steps after which a run can be gone on from.
    """

    def __init__(self, every: int = 1) -> None:
        self.every, self.asked, self.agreed, self.stopped = every, False, False, False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it SIGTERM is noted; around it the process ends by it."""
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agreed and state.global_step % self.every == 0:
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False
