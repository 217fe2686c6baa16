"""What the audit knows: one entry an item, with what the paper says and how sure we are, and the probe that decides it.

Sections, tables and appendices are those of arXiv 2604.06169. "The public code" is its authors' reference code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InPlaceTTTError

Profile = Literal["paper", "official"]
PROFILES: tuple[Profile, ...] = ("paper", "official")


@dataclass(frozen=True)
class Item:
    """One thing that an implementation can get right or wrong.

    id, title: how reports name it. paper_ref: where the paper says it. paper: what it says.
    sure: "high", read in the text; "medium", our reading of an ambiguous passage; "low", inferred.
    public_code: what the authors' code does. why: why it matters. remedy: what to do about a deviation.
    probe: the function that decides it, "module.function" in this package. on_model: the one for a whole converted model,
    where that sees more. expected: by profile, what the probe compares with. absent: the public code does not have it, so
    that having it is an extension under the profile `official`.
    """

    id: str
    title: str
    paper_ref: str
    paper: str
    sure: Literal["high", "medium", "low"]
    public_code: str
    why: str
    remedy: str
    probe: str | None
    on_model: str | None = None
    expected: Mapping[Profile, Any] = field(default_factory=dict)
    absent: bool = False

    def expects(self, profile: Profile) -> str:
        """What is held against a module, in words."""
        return self.paper if profile == "paper" else self.public_code


def catalogue() -> dict[str, Item]:
    """Every item by its id, in the order of a report."""
    from .catalogue_method import METHOD
    from .catalogue_recipe import RECIPE

    return {item.id: item for item in (*METHOD, *RECIPE)}


def known(profile: str) -> Profile:
    """The profile of that name."""
    for name in PROFILES:
        if name == profile:
            return name
    raise InPlaceTTTError(f"profile {profile!r} does not exist; choose one of {', '.join(PROFILES)}.")
