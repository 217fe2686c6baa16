"""Runs `inplace-ttt chat MODEL`.

`turns` renders the text of each turn. `conversation` passes it to a session, and `server` to a running
server. `commands` runs the loop over the lines, and `terminal` reads and prints them.

With --web, `named` keeps sessions by name, and `transcript` their record. `web` serves the page, and `look`
holds its style.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from ...session import file as session_file
from .. import Result
from ..loading import load_with_tokenizer, refuse_not_finite
from ..messages import say_now, warn
from ..options.chat import API_KEY, is_address
from .commands import Chat
from .conversation import Conversation, text_of
from .server import ServerConversation
from .terminal import lines, note, stoppable
from .turns import Place, Turns


def run(args: argparse.Namespace) -> Result:
    if args.web:
        from .web import prepare, serve

        prepare(args)
        return serve(args, _opener(args))
    if args.session:
        session_file.refuse_to_replace(args.session)
    texts = [(file, text_of(file)) for file in args.read]
    conversation = _on_server(args) if is_address(args.path) else _opener(args)(args.session)
    conversation.switch(args.ttt == "on")
    say_now()
    chat = Chat(conversation, None if args.json else args.stdout)
    for file, text in texts:
        with stoppable() as stop:
            chat.read(file, text, stop)
    note(f"{conversation.info()}; /help lists the commands")
    chat.run(lines())
    return {"answers": chat.answers, **conversation.summary()}, 0


def _on_server(args: argparse.Namespace) -> ServerConversation:
    key = args.api_key or os.environ.get(API_KEY)
    return ServerConversation(args.path, key, args.memory, args.system, args.max_new_tokens, args.temperature)


def _opener(args: argparse.Namespace) -> Callable[[str | None], Conversation]:
    """Loads the model, and returns a function that opens a conversation on it.

    The function takes a session file, which need not exist, or None.
    """
    model, tokenizer = load_with_tokenizer(args.path, args.base, args.dtype)
    refuse_not_finite(model, args.path)
    turns = Turns(tokenizer, args.system, args.path)
    if turns.is_plain:
        warn(f"{args.path} lacks a chat template; each turn is a line that begins with User: or Assistant:")
    given = (model, turns, args.path, args.max_new_tokens, args.temperature)

    def opened(file: str | None) -> Conversation:
        if file and os.path.lexists(file):
            conversation = Conversation.loaded(file, *given)
        else:
            conversation = Conversation(*given)
            conversation.file = file
        if args.system and conversation.place is not Place.START:
            warn(f"{file} already holds a conversation; --system takes effect after /drop or /forget")
        return conversation

    return opened


def render(result: dict[str, Any]) -> None:
    """Returns None, since the answers are already printed."""
