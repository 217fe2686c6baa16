"""How a process of a run ends when it is told to: with a checkpoint after a signal, and never later than what
started it."""

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
"""Environment variable: the process id of `inplace-ttt train`, which holds the output and ends with its
children."""
REFUSAL = "INPLACE_TTT_REFUSAL"
"""Environment variable: a file of `inplace-ttt train`, into which a process writes why the run is refused
instead of printing it."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that a signal stopped: the same command goes on where it was."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to stop: schedulers send SIGTERM or SIGUSR1 before they kill, a terminal sends SIGHUP when
it closes."""
_POLL = 0.5
_LAUNCHERS = (LAUNCHER, "TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Who sets one of these (we, torchrun, DeepSpeed) watches over its children; a shell that starts a process by
hand may leave before it."""


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


@contextmanager
def on_signals(action: Callable[[], None]) -> Iterator[None]:
    """Within it each of `SIGNALS` calls `action`; one that is ignored, as under nohup, stays so. Only the
    main thread can catch them."""
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
    """One of `SIGNALS` while a run trains: a checkpoint at the end of the step, then the end.

    `asked` is this process's own signal. All processes have to stop after the same step, or those that go on
    wait for ever in a
    collective: the trainer sums what each was asked with the loss, and says so by `agreed`. (transformers'
        own
    `enable_jit_checkpoint` stops each process where its own timer finds it.)

    every: steps after which a run can be gone on from.
    """

    def __init__(self, every: int = 1) -> None:
        self.every, self.asked, self.agreed, self.stopped = every, False, False, False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it the signals are noted; around it the process ends by them."""
        with on_signals(lambda: setattr(self, "asked", True)):
            yield

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agreed and state.global_step % self.every == 0:
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False
