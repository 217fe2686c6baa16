"""An item of the audit: one requirement, with its place in the paper and the probe that measures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InPlaceTTTError
from .outcome import Outcome

Profile = Literal["paper", "official", "ttt_ntp"]
PROFILES: dict[Profile, str] = {
    "paper": "the paper",
    "official": "the authors' public code",
    "ttt_ntp": "the public code of TTT-NTP, by its recipe for Llama-3.1-8B",
}

Probe = Callable[[Any, Any], Outcome]
"""Measures an item on its first argument: a `Bench` (one layer), a `WholeModel` or a training `Run`.

The second argument is the expected value.
"""


@dataclass(frozen=True)
class Item:
    """One requirement that an implementation can meet or miss.

    id, title: how reports name it. paper_ref: where the paper says it. paper: what it says.
    sure: "high", read in the text; "medium", our reading of an ambiguous passage; "low", inferred.
    public_code: what the authors' code does. why: why it matters. remedy: what to do about a deviation.
    probe: the function that decides it. on_model: the one for a whole converted model, where that sees more.
    expected: by profile, what the probe compares with. absent: the public code does not have it, so that
        having it is an
    extension under the profile `official`. own_clip: it is about the module's own clip, which is off for the
    other items.
    choice: about a setting that a user may choose, as are the items with `expected`; a deviation is not a
        fault.
    silent: it is decided on a module that writes nothing, too. named_by: ids of items that may say what is
        wrong where this one only
    sees that something is; it is not checked where one of them deviates. by_settings: for a model whose layer
    the probes cannot drive, what its settings say; that it does as they say is `declared-rule`'s.
    """

    id: str
    title: str
    paper_ref: str
    paper: str
    sure: Literal["high", "medium", "low"]
    public_code: str
    why: str
    remedy: str
    probe: Probe | None
    on_model: Probe | None = None
    expected: Mapping[Profile, Any] = field(default_factory=dict)
    absent: bool = False
    choice: bool = False
    own_clip: bool = False
    silent: bool = False
    named_by: tuple[str, ...] = ()
    by_settings: Probe | None = None

    def expects(self, profile: Profile) -> str:
        """Returns the expected behavior under this profile, in words for the report."""
        if profile == "ttt_ntp":
            return (
                f"TTT-NTP's public code: {self.expected[profile]}."
                if profile in self.expected
                else self.paper
            )
        return self.paper if profile == "paper" else self.public_code


def known(profile: str) -> Profile:
    """Returns the profile of that name; raises InPlaceTTTError if it does not exist."""
    for name in PROFILES:
        if name == profile:
            return name
    raise InPlaceTTTError(f"profile {profile!r} does not exist; choose one of {', '.join(PROFILES)}.")
