"""A request's fields memory, freeze and ttt, and their translation for vLLM."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from ..errors import shown
from .memory import Refused, check_name
from .memory_settings import Turn
from .request_settings import RequestSettings

FIELDS = ("memory", "freeze", "ttt")
_OFF = uuid.uuid4().hex
"""Part of the salt of requests with TTT off. It is random, so that no client's own salt can equal it."""


@dataclass(frozen=True)
class Asked:
    """A request's fields memory, freeze and ttt, checked.

    Attributes:
        memory: the memory's name, or None.
        freeze: the request leaves the memory unchanged.
        off: the request neither reads nor writes fast weights.
    """

    memory: str | None = None
    freeze: bool = False
    off: bool = False

    @classmethod
    def of(cls, values: dict[str, Any]) -> Asked:
        """Reads the fields from a request's JSON body. Raises Refused if they cannot be served together."""
        memory, freeze, ttt = values.get("memory"), values.get("freeze", False), values.get("ttt", "on")
        if memory is not None:
            check_name(memory)
        if not isinstance(freeze, bool):
            raise Refused(f"freeze must be true or false, got {shown(freeze)}.", 400)
        if ttt not in ("on", "off"):
            raise Refused(f'ttt must be "on" or "off", got {shown(ttt)}.', 400)
        if freeze and memory is None:
            raise Refused("freeze does nothing without a memory; leave it out, or name one.", 400)
        if memory is not None and ttt == "off":
            raise Refused("with ttt off no memory is read; leave out ttt or memory.", 400)
        if values.get("use_beam_search") and (memory is not None or ttt == "off"):
            raise Refused("beam search supports neither memory nor ttt; leave use_beam_search out.", 400)
        if memory is not None and not freeze:
            _refuse_several(values)
        return cls(memory, freeze, ttt == "off")

    def told(self, values: dict[str, Any], turn: Turn | None) -> dict[str, Any]:
        """Returns the request's JSON body for vLLM, with our fields as `vllm_xargs` and a `cache_salt`."""
        start, keep = (None, None) if turn is None else (turn.start, turn.keep)
        settings = RequestSettings(self.off, start, keep, salted=True)
        told = {name: value for name, value in values.items() if name not in FIELDS}
        told["vllm_xargs"] = {**(told.get("vllm_xargs") or {}), **settings.extra_args}
        if self.off or start is not None:
            told["cache_salt"] = f"{told.get('cache_salt') or ''} ttt {start or _OFF}"
        return told


def _refuse_several(values: dict[str, Any]) -> None:
    """Refuses requests that would write several sequences to a memory, or more tokens than they return."""
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        raise Refused(
            "several prompts cannot write one memory; send them one after the other, or set freeze.", 400
        )
    for name in ("n", "best_of"):
        if values.get(name) not in (None, 1):
            raise Refused(
                f"{name}={shown(values[name])} asks for several answers, which cannot write one memory; ask "
                "for one, or set freeze.",
                400,
            )
    if values.get("stop"):
        raise Refused(
            "a stop string is found only after the memory has read more tokens; use stop_token_ids, or set "
            "freeze.",
            400,
        )
