"""One process of a run: `torchrun -m inplace_ttt.training RECIPE`, or started by DeepSpeed's launcher."""

import argparse
import atexit
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from ..errors import TRACEBACK, InPlaceTTTError, one_line, refused_by_system
from .loop.meeting import OtherFailed
from .loop.stopping import REFUSAL, end_with_launcher
from .recipe.recipe import load_recipe
from .run.worker import meet, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inplace_ttt.training", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting of the recipe"
    )
    parser.add_argument(
        "--from-scratch", action="store_true", help="start anew although the output has checkpoints"
    )
    parser.add_argument("--no-audit", action="store_true", help="skip the audit before the first step")
    # DeepSpeed's launcher adds this argument
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_with_launcher()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if os.environ.get("RANK", "0") != "0":
        logging.disable(logging.WARNING)
    _hide_bars()
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        with last_net():
            recipe = load_recipe(options.recipe, options.set)
            meeting = meet(recipe)
        speaks = True  # from here on, the process that fails first prints
        with meeting.failing_together(), last_net():
            run(recipe, meeting, resume=not options.from_scratch, audit=not options.no_audit)
    except OtherFailed as error:
        return error.exit_code
    except InPlaceTTTError as error:
        if speaks:
            _report(str(error))
        return error.exit_code
    return 0


def _report(refusal: str) -> None:
    """Passes the reason to the launcher, which prints it once all processes have ended.

    Without a launcher on this machine, it prints the reason itself.
    """
    file = os.environ.get(REFUSAL)
    try:
        if file is not None and not os.path.getsize(file):
            with open(file, "w", encoding="utf-8", errors="backslashreplace") as handed:
                handed.write(refusal)
            return
    except OSError:  # the launcher is on another machine, or has ended
        pass
    print(f"inplace-ttt train: {refusal}", file=sys.stderr)


def _hide_bars() -> None:
    """Hides the progress bars of data and weights unless stderr is a terminal.

    The steps of the run are always printed.
    """
    import datasets
    from transformers import logging as transformers_logging

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()


@contextmanager
def last_net() -> Iterator[None]:
    """Turns any error into one sentence, as on the command line.

    An error that gets here should have been refused earlier, at its cause.
    """
    try:
        yield
    except InPlaceTTTError:
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise InPlaceTTTError(
                f"there is not enough memory for this run ({one_line(error)}); inplace-ttt plan prints the "
                "memory that a run needs."
            ) from None
        if isinstance(error, OSError) and (reason := refused_by_system(error)) is not None:
            raise InPlaceTTTError(reason) from None
        raise InPlaceTTTError(
            f"unexpected {type(error).__name__}: {one_line(error)}; set {TRACEBACK}=1 to see where, and "
            "please report it."
        ) from None


def end(code: int) -> NoReturn:
    """Ends this process without shutting the interpreter down.

    During a shutdown, threads of a process group whose other processes have ended sometimes abort. A finished
    run would then be reported as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    end(code)
