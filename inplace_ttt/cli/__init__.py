"""The command line: `inplace-ttt VERB`. One small module a verb, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..errors import InPlaceTTTError

VERBS = {
    "convert": "give a checkpoint fast weights",
    "info": "say what a converted checkpoint is",
    "generate": "read a text, write it into the fast weights, continue it",
    "audit": "hold a checkpoint or a recipe against the paper, item by item",
    "diagnose": "measure gradients and writes on a text, and say what is wrong with them",
    "plan": "say what a training run will take, and what in it will not fit or not train",
    "train": "continue a model's training by a recipe",
    "evaluate": "say whether writes help, and whether by what the document says",
    "ruler": "score long-context tasks of the RULER benchmark, TTT on, off and the base",
    "export": "write a converted checkpoint in another form",
    "import-official": "read a checkpoint of the public reference code",
    "bench": "time the op against the plain linear and the public formulation",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InPlaceTTTError(f"{message} (see {self.prog} --help).")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit code 0: done; 1: the thing it checks is not so; 2: bad input, one line on stderr."""
    if arguments is None:
        arguments = sys.argv[1:]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no half folder is left
    try:
        return _run(arguments)
    except InPlaceTTTError as error:
        verb = next((a for a in arguments if a in VERBS), None)
        print(f"inplace-ttt{f' {verb}' if verb else ''}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("inplace-ttt: interrupted", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str]) -> int:
    top = _Parser(prog="inplace-ttt", description="In-Place Test-Time Training for Hugging Face language models.")
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    for verb, summary in VERBS.items():
        parser = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if verb == wanted:
            module = importlib.import_module(f".{verb.replace('-', '_')}", __name__)
            parser.epilog = module.EXAMPLES
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(parser)
            parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
            parser.set_defaults(module=module)
    args = top.parse_args(arguments)
    result, code = args.module.run(args)
    print(json.dumps(result) if args.json else args.module.render(result))
    return code


Result = tuple[dict[str, Any], int]
"""What a verb's `run` gives: the JSON object and the exit code."""
