"""The command line: `inplace-ttt VERB`. `options` has each verb's arguments and imports no torch; a verb is
imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from .. import __version__
from ..errors import TRACEBACK, InPlaceTTTError, one_line, refused_by_system
from ..files.json_files import json_text
from . import messages

VERBS = {
    "convert": "give a checkpoint fast weights",
    "info": "say what a converted checkpoint is",
    "generate": "read a text, write it into the fast weights, continue it",
    "serve": "serve many users at once by vLLM, each with memories by name",
    "audit": "hold a checkpoint or a recipe against the paper, item by item",
    "diagnose": "measure gradients and writes on a text, and say what is wrong with them",
    "plan": "say what a training run will take, and what in it will not fit or not train",
    "train": "continue a model's training by a recipe",
    "evaluate": "say whether writes help, and whether by what the document says",
    "ruler": "score long-context tasks of the RULER benchmark, TTT on, off and the base",
    "babilong": "score questions about facts scattered in a long text, as BABILong has them, TTT on, off "
    "and the base",
    "export": "write a converted checkpoint in another form",
    "import-official": "read a checkpoint of the public reference code",
    "bench": "time the op against the plain linear and the public formulation",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InPlaceTTTError(
            f"{message.removeprefix('argument ').replace(': must ', ' must ', 1)} (see {self.prog} --help)."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit code 0: done; 1: the thing it checks is not so; 2: bad input, one line on stderr.

    With --json stdout holds one JSON object in every case, an error's as {"error", "exit_code"}.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                # unwind, so that no half folder is left
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        _open_missing_streams()
    refuse = partial(messages.refuse, arguments, next((a for a in arguments if a in VERBS), None))
    try:
        args = _parsed(arguments)
        with messages.stdout_for_the_result(), messages.waiting():
            verb = importlib.import_module(f".{args.verb.replace('-', '_')}", __name__)
            result, code = verb.run(args)
        text = json_text(result) if args.json else verb.render(result)
        _print(text)
        return code
    except InPlaceTTTError as error:
        _trace()
        return refuse(str(error), error.exit_code)
    except KeyboardInterrupt:
        return refuse("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        _stop_writing()
        return 141
    except Exception as error:  # the last net: what gets here should have been refused where it was read
        _trace()
        # torch's, which need not be imported here
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return refuse(
                f"this machine has not enough memory for it ({one_line(error)}); take a smaller model, "
                "text or batch.",
                2,
            )
        if isinstance(error, OSError) and (reason := refused_by_system(error)) is not None:
            return refuse(reason, 2)
        return refuse(
            f"unexpected {type(error).__name__}: {one_line(error)}; set {TRACEBACK}=1 to see where, and "
            "please report it.",
            2,
        )


def _trace() -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exc()


def _open_missing_streams() -> None:
    """Where the caller has closed a standard stream, nothing else may take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the rest of the process


def _stop_writing() -> None:
    """Nobody reads stdout: what Python flushes at its end goes nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the verb and its options. Raises InPlaceTTTError if the arguments alone are wrong."""
    top = _Parser(
        prog="inplace-ttt", description="In-Place Test-Time Training for Hugging Face language models."
    )
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    for verb, summary in VERBS.items():
        parser = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if verb == wanted:
            options = importlib.import_module(f".options.{verb.replace('-', '_')}", __name__)
            parser.epilog = options.EXAMPLES
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            parser.set_defaults(check=lambda args: None)
            options.add_arguments(parser)
            parser.add_argument(
                "--json", action="store_true", help="print one JSON object on stdout and nothing else there"
            )
    args = top.parse_args(arguments)
    args.check(args)
    return args


def _print(text: str) -> None:
    try:
        messages.say(text, sys.stdout)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InPlaceTTTError(f"cannot write the result to standard output: {error.strerror}.") from None


Result = tuple[dict[str, Any], int]
"""What a verb's `run` gives: the JSON object and the exit code."""
