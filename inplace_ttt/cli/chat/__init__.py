"""Runs `inplace-ttt chat MODEL`.

`turns` renders the text of each turn. `conversation` passes it to a session. `commands` runs the loop over
the lines, and `terminal` reads and prints them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ...session import file as session_file
from .. import Result
from ..loading import load_with_tokenizer, refuse_not_finite
from ..messages import say_now, warn
from .commands import Chat
from .conversation import Conversation, text_of
from .terminal import lines, note, stoppable
from .turns import Place, Turns


def run(args: argparse.Namespace) -> Result:
    if args.session:
        session_file.refuse_to_replace(args.session)
    texts = [(file, text_of(file)) for file in args.read]
    model, tokenizer = load_with_tokenizer(args.path, args.base, args.dtype)
    refuse_not_finite(model, args.path)
    turns = Turns(tokenizer, args.system, args.path)
    given = (model, turns, args.path, args.max_new_tokens, args.temperature)
    if args.session and os.path.lexists(args.session):
        conversation = Conversation.loaded(args.session, *given)
    else:
        conversation = Conversation(*given)
        conversation.file = args.session
    conversation.switch(args.ttt == "on")
    if turns.is_plain:
        warn(f"{args.path} lacks a chat template; each turn is a line that begins with User: or Assistant:")
    if args.system and conversation.place is not Place.START:
        warn(f"{args.session} already holds a conversation; --system takes effect after /drop or /forget")
    say_now()
    chat = Chat(conversation, None if args.json else args.stdout)
    for file, text in texts:
        with stoppable() as stop:
            chat.read(file, text, stop)
    note(f"{conversation.info()}; /help lists the commands")
    chat.run(lines())
    return {
        "answers": chat.answers,
        "session": conversation.file,
        "tokens": 0 if conversation.session.tokens is None else conversation.session.tokens.shape[1],
        "chunks_written": conversation.session.chunks_written,
        "state_bytes": conversation.session.state_bytes,
    }, 0


def render(result: dict[str, Any]) -> None:
    """Returns None, since the answers are already printed."""
