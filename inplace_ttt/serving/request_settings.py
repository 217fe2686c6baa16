"""What a request says of its fast weights, in `SamplingParams.extra_args`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from vllm import SamplingParams

from ..errors import InPlaceTTTError
from ..files.json_files import parse_json
from ..files.schema import from_values

KEY = "inplace_ttt"
KNOWN: set[str] = set()
"""Snapshots that requests of this process may start from, and names under which they may be kept: nobody
else's are let in."""


@dataclass(frozen=True)
class RequestSettings:
    """off: nothing is read from fast weights and nothing written. start: the snapshot that the request starts
        from, None for W0.
    keep: under which name what it has written is kept at its end, for `MemoryWorker.ttt_keep`.

    salted: the prompt has a `cache_salt` that no request with other settings has. vLLM knows a prefix by its
        tokens alone, and what a
    layer says of them depends on these settings too.
    """

    off: bool = False
    start: str | None = None
    keep: str | None = None
    salted: bool = False

    @property
    def extra_args(self) -> dict[str, str]:
        return {KEY: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def checked(cls, params: SamplingParams) -> RequestSettings:
        """As `of`, where a request comes in. Raises InPlaceTTTError for what none may say."""
        settings = cls.of(params)
        if settings != cls() and not settings.salted:
            raise InPlaceTTTError(
                f"{KEY} of extra_args changes what a prefix's cache holds; give the prompt a cache_salt of "
                "its own and say salted, or "
                "use inplace-ttt serve, which does."
            )
        if not {settings.start or "", settings.keep or ""} - {""} <= KNOWN:
            raise InPlaceTTTError(
                f"start and keep of {KEY} in extra_args are the server's own; name a memory, to "
                "inplace-ttt serve."
            )
        return settings

    @classmethod
    def of(cls, params: SamplingParams) -> RequestSettings:
        """Raises InPlaceTTTError for what is no such settings."""
        given = (params.extra_args or {}).get(KEY)
        if given is None:
            return cls()
        try:
            values = parse_json(given) if isinstance(given, str) else given
        except ValueError:
            raise InPlaceTTTError(f"{KEY} of extra_args is no JSON, got {given!r:.80}.") from None
        return from_values(cls, values, f"{KEY} of extra_args")
