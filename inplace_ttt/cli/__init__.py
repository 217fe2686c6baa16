"""The command line: `inplace-ttt VERB`.

`options` holds the arguments of each verb and imports no torch. The module of a verb is imported when it
runs.
"""

from __future__ import annotations

import argparse
import difflib
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
from ..errors import TRACEBACK, InPlaceTTTError
from ..files.json_files import json_text
from . import messages

VERBS = {
    "convert": "give a checkpoint fast weights",
    "info": "print the settings and sizes of a converted checkpoint",
    "generate": "read a text, write it into the fast weights, continue it",
    "chat": "talk with a converted model that remembers, in a terminal, in a browser or through a pipe",
    "serve": "serve many users with vLLM, each with named memories",
    "audit": "compare a checkpoint or a recipe with the paper, item by item",
    "diagnose": "measure gradients and writes on a text, and report problems",
    "plan": "estimate the cost of a training run, and warn of parts that will not fit or not train",
    "train": "continue a model's training as a recipe describes",
    "evaluate": "measure the gain from writes on documents or on tasks (RULER, BABILong, lm-eval's)",
    "export": "write a converted checkpoint in another form",
    "import-reference": "convert a checkpoint of the reference code",
    "bench": "time the fast-weight op against a plain linear layer and the reference formulation",
}


_EXIT_CODES = "exit code: 0 done, 2 bad input"
"""Exit codes of a verb whose examples do not list its own."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise InPlaceTTTError(
            f"{message.removeprefix('argument ').replace(': must ', ' must ', 1)} (see {self.prog} --help)."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    With --json, stdout always gets one JSON object. For an error it is {"error", "exit_code"}.

    Args:
        arguments: the command's arguments (default: those in `sys.argv`).

    Returns:
        Exit code. 0: done. 1: a check failed. 2: bad input, with one line on stderr.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                # unwind the stack, so that temporary folders are removed
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        _open_missing_streams()
    refuse = partial(messages.refuse, arguments, next((a for a in arguments if a in VERBS), None))
    try:
        args = _parsed(arguments)
        with messages.stdout_for_the_result() as args.stdout, messages.waiting():
            verb = importlib.import_module(f".{args.verb.replace('-', '_')}", __name__)
            result, code = verb.run(args)
        text = json_text(result) if args.json else verb.render(result)
        if text is not None:  # a verb may have printed its result already
            _print(text)
        return code
    except InPlaceTTTError as error:
        _trace()
        return refuse(str(error), error.exit_code)
    except KeyboardInterrupt:
        return refuse("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _stop_writing()
        return 141
    except Exception as error:  # an input error that was not detected where the input was read
        _trace()
        return refuse(messages.sentence_of(error), 2)


def _trace() -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exc()


def _open_missing_streams() -> None:
    """Opens the null device for standard streams that are closed, so no other file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the rest of the process


def _stop_writing() -> None:
    """Discards further output, including Python's flush at exit, because the reader has closed the pipe."""
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
    parsers = {}
    for verb, summary in VERBS.items():
        parsers[verb] = verbs.add_parser(
            verb, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if verb == wanted:
            add_options(parsers[verb], verb)
    args, unknown = top.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(parsers[args.verb], unknown)
    args.check(args)
    return args


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Raises InPlaceTTTError for arguments that the verb does not take, with the option that is closest."""
    options = [name for action in parser._actions for name in action.option_strings]
    close = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
    parser.error(
        f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {close[0]}?" if close else "")
    )


def add_options(parser: argparse.ArgumentParser, verb: str) -> None:
    """Adds a verb's arguments to a parser, with the examples and exit codes as its epilog."""
    options = importlib.import_module(f".options.{verb.replace('-', '_')}", __name__)
    stated = "exit code:" in options.EXAMPLES
    parser.epilog = options.EXAMPLES if stated else f"{options.EXAMPLES}\n\n{_EXIT_CODES}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(check=lambda args: None)
    options.add_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else there"
    )


def _print(text: str) -> None:
    try:
        messages.say(text, sys.stdout)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InPlaceTTTError(f"cannot write the result to standard output: {error.strerror}.") from None


Result = tuple[dict[str, Any], int]
"""The JSON object and the exit code that a verb's `run` returns."""
