"""Stops a process of a run: with a checkpoint after a signal, or when its launcher is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

LAUNCHER = "INPLACE_TTT_LAUNCHER"
"""Environment variable: the process id of `inplace-ttt train`.

That process has locked the output, and ends together with its children.
"""
REFUSAL = "INPLACE_TTT_REFUSAL"
"""Environment variable: the path of a file that `inplace-ttt train` has made.

A process writes the reason of a refusal there instead of printing it.
"""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that a signal stopped. The same command resumes it."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run.

Schedulers send SIGTERM or SIGUSR1 before they kill. A terminal sends SIGHUP when it closes.
"""
_POLL = 0.5
_LAUNCHERS = (LAUNCHER, "TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Variables that `inplace-ttt train`, torchrun and DeepSpeed's launcher set for their children.

These launchers watch over their children. A shell from which a process was started by hand may exit first.
"""


def end_with_launcher() -> None:
    """Starts a thread that kills this process when its launcher is gone, for any reason.

    A process that was started by hand gets no such thread.
    """
    if not any(name in os.environ for name in _LAUNCHERS):
        return
    parent = int(os.environ.get(LAUNCHER) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()


@contextmanager
def on_signals(action: Callable[[], None]) -> Iterator[None]:
    """Makes each of `SIGNALS` call `action` inside the block.

    A signal that is ignored, as under nohup, stays ignored. Outside the main thread nothing is caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: action()) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping(TrainerCallback):
    """Saves a checkpoint at the end of the step after one of `SIGNALS`, and ends training.

    All processes must stop after the same step, or the others would wait forever in a collective. So the
    trainer sums `asked` over all processes together with the loss, and sets `agreed`. transformers has
    `enable_jit_checkpoint`, but there each process stops when its own timer finds the signal.

    Attributes:
        every: a run can resume only after a multiple of this number of steps.
        asked: this process received a signal.
        agreed: some process received one.
        stopped: training ended early.
    """

    def __init__(self, every: int = 1) -> None:
        self.every, self.asked, self.agreed, self.stopped = every, False, False, False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records the signals inside the block; outside it, they end the process."""
        with on_signals(lambda: setattr(self, "asked", True)):
            yield

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agreed and state.global_step % self.every == 0:
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False
