"""Runs `inplace-ttt chat MODEL`: turns (their text), conversation (in a session), commands, terminal.

With --web: named (sessions by name), transcript (their record), web (the page), look (its style).
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
from .commands import Chat
from .conversation import Conversation, text_of
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
    conversation = _opener(args)(args.session)
    conversation.switch(args.ttt == "on")
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
            warn(f"{file} holds a conversation already; --system acts after /drop or /forget")
        return conversation

    return opened


def render(result: dict[str, Any]) -> None:
    """Returns nothing to print, since the answers are printed already."""
