"""Renders chats as text, with the chat template of the tokenizer that reads them."""

from __future__ import annotations

from typing import Any

from ..errors import InPlaceTTTError, reported, shown

CHAT = "messages"
"""The field of a record that holds a chat: a list of {"role", "content"}."""


def turns(chat: Any, source: str) -> list[dict[str, str]]:
    """Returns role and content of each message. Raises InPlaceTTTError unless both are text."""
    if not isinstance(chat, list):
        raise InPlaceTTTError(
            f"the {CHAT} of {source} are {shown(chat)}, not a list of messages; correct them."
        )
    for message in chat:
        values = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise InPlaceTTTError(
                f"a message of {source} is {shown(message)}; give each a text 'role' and a text 'content'."
            )
    return [{"role": message["role"], "content": message["content"]} for message in chat]


def chat_text(chat: Any, tokenizer: Any, source: str) -> str:
    """Returns a chat as the text that the tokenizer's chat template makes of it.

    Raises:
        InPlaceTTTError: if the tokenizer lacks a chat template, or the template refuses the chat.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InPlaceTTTError(
            f"{source} holds chats (the field {CHAT!r}), but the tokenizer lacks a chat template; use an "
            "instruct model's tokenizer, or give the texts themselves."
        )
    messages = turns(chat, source)
    with reported(f"the chat template cannot render a chat of {source}"):
        return tokenizer.apply_chat_template(messages, tokenize=False)
