"""Arguments of `inplace-ttt chat MODEL`."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ..arguments import MOST_TOKENS, add_base, add_dtype, add_temperature, path, whole

API_KEY = "VLLM_API_KEY"
"""Environment variable that holds a server's key, as vLLM names it."""

PORT, SESSIONS = 7860, "sessions"
"""Defaults of --port and --sessions."""

EXAMPLES = """examples:
  inplace-ttt chat ./smollm2-ttt
  inplace-ttt chat ./smollm2-ttt --session ada.session --read book.txt notes.txt
  inplace-ttt chat ./smollm2-ttt --session ada.session --system "Answer in one sentence."
  inplace-ttt chat ./smollm2-ttt --web --sessions memories
  inplace-ttt chat http://localhost:8000 --memory book --read book.txt
  printf '/read book.txt\\nWhat happened to the whale?\\n' | inplace-ttt chat ./smollm2-ttt

commands in the chat:
  /read FILE, /forget, /drop, /save [FILE], /fork FILE, /off, /on, /info, /help, /quit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=path,
        metavar="MODEL",
        help="converted checkpoint or adapter folder, or the address of a running `inplace-ttt serve`",
    )
    parser.add_argument(
        "--session",
        type=path,
        metavar="PATH",
        help="continue the session in this file if it exists, and save it there after each turn",
    )
    parser.add_argument(
        "--read", type=path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts to read first"
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions at the start of the conversation")
    parser.add_argument(
        "--max-new-tokens",
        type=whole(1, MOST_TOKENS),
        default=512,
        metavar="N",
        help="most tokens of an answer (default: 512)",
    )
    add_temperature(parser)
    parser.add_argument(
        "--ttt",
        choices=("on", "off"),
        default="on",
        help="off: start without the fast weights, as after /off (default: on)",
    )
    parser.add_argument("--memory", metavar="NAME", help="with a server: the memory to read and write")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"with a server: the key of its user (default: ${API_KEY}, if set)"
    )
    parser.add_argument(
        "--web", action="store_true", help="serve the chat as a page in the browser, on this machine alone"
    )
    parser.add_argument(
        "--port", type=whole(1, 65535), metavar="PORT", help=f"with --web: port of the page (default: {PORT})"
    )
    parser.add_argument(
        "--sessions",
        type=path,
        metavar="DIR",
        help=f"with --web: folder of the sessions, saved there after each turn (default: {SESSIONS})",
    )
    add_base(parser)
    add_dtype(parser)
    parser.set_defaults(check=check)


def is_address(model: str) -> bool:
    """Returns True for the address of a server, and False for a model folder or hub id."""
    return model.startswith(("http://", "https://"))


def check(args: argparse.Namespace) -> None:
    if args.system is not None and not args.system.strip():
        raise InPlaceTTTError("--system is empty; give instructions, or leave it out.")
    server = is_address(args.path)
    names = ("session", "base") if server else ("memory", "api_key")
    given = [name for name in names if getattr(args, name) is not None]
    if server and args.dtype != "auto":
        given.append("dtype")
    if given:
        option = f"--{given[0].replace('_', '-')}"
        where = f"with the server {args.path}" if server else f"without a server, and {args.path} is a model"
        raise InPlaceTTTError(f"{option} does nothing {where}; leave it out.")
    if server and args.read and args.memory is None:
        raise InPlaceTTTError("--read needs --memory NAME with a server, to write into; name one.")
    for option, value in (("--port", args.port), ("--sessions", args.sessions)):
        if value is not None and not args.web:
            raise InPlaceTTTError(f"{option} is for the page; give --web too, or leave it out.")
    if args.web and server:
        raise InPlaceTTTError("--web needs a model on this machine, not a server; name its folder.")
    if args.web and args.session is not None:
        raise InPlaceTTTError("--session is for the terminal; with --web, --sessions names a folder of them.")
    if args.web and args.read:
        raise InPlaceTTTError("--read is for the terminal; with --web, drop files onto the page.")
    if args.web and args.ttt == "off":
        raise InPlaceTTTError("--ttt off is for the terminal; the page of --web has a switch.")
