"""A request's settings for its fast weights, in `SamplingParams.extra_args`."""

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
"""Snapshots that requests of this process may start from, and names under which they may be kept. Others are
refused."""


@dataclass(frozen=True)
class RequestSettings:
    """A request's settings for its fast weights.

    Attributes:
        off: the request neither reads nor writes fast weights.
        start: the id of the snapshot that the request starts from; None for W0.
        keep: the name under which its final state is kept, for `MemoryWorker.ttt_keep`.
        salted: the prompt has a `cache_salt` of its own, which no request with other settings has. vLLM
            identifies a cached prefix by its tokens and its salt, and its values depend on these settings.
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
        """Returns the settings of an incoming request, as `of` does.

        Raises:
            InPlaceTTTError: if they need a `cache_salt`, or name snapshots that are not the server's.
        """
        settings = cls.of(params)
        if settings != cls() and not settings.salted:
            raise InPlaceTTTError(
                f"{KEY} of extra_args changes the cached values of a prefix; give the prompt a cache_salt of "
                "its own and set salted, or use inplace-ttt serve, which does both."
            )
        if not {settings.start or "", settings.keep or ""} - {""} <= KNOWN:
            raise InPlaceTTTError(
                f"start and keep of {KEY} in extra_args are reserved for the server; use inplace-ttt serve, "
                "and name a memory in the request."
            )
        return settings

    @classmethod
    def of(cls, params: SamplingParams) -> RequestSettings:
        """Reads the settings from sampling parameters; the defaults if there are none.

        Raises:
            InPlaceTTTError: if they are invalid.
        """
        given = (params.extra_args or {}).get(KEY)
        if given is None:
            return cls()
        try:
            values = parse_json(given) if isinstance(given, str) else given
        except ValueError:
            raise InPlaceTTTError(f"{KEY} of extra_args must be JSON, got {given!r:.80}.") from None
        return from_values(cls, values, f"{KEY} of extra_args")
