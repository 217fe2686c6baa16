"""An item of the audit, which is one requirement with its place in the paper and its probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InPlaceTTTError
from .outcome import Outcome

Profile = Literal["paper", "reference", "ttt_ntp"]
PROFILES: dict[Profile, str] = {
    "paper": "the paper",
    "reference": "the authors' reference code",
    "ttt_ntp": "the public code of TTT-NTP, by its recipe for Llama-3.1-8B",
}

Probe = Callable[[Any, Any], Outcome]
"""Measures an item on its first argument: a `Bench` (one layer), a `WholeModel` or a training `Run`.

The second argument is the expected value.
"""


@dataclass(frozen=True)
class Item:
    """One requirement that an implementation can meet or miss.

    Attributes:
        id: name in reports and declarations.
        title: one line for reports.
        paper_ref: section, equation, table or algorithm line of the paper.
        paper: the requirement, as the paper states it.
        sure: "high" if read in the text, "medium" for our reading of an ambiguous passage, "low" if inferred.
        reference_code: the behavior of the authors' code.
        why: the damage that a deviation does.
        remedy: the fix for a deviation.
        probe: decides the item on one layer, or on a training run; None if only a whole model can show it.
        on_model: decides the item on a whole converted model, if that shows more than one layer does.
        expected: the value that the probe compares with, by profile.
        absent: the reference code lacks the feature. Under the profile `reference` the feature is then an
            extension.
        choice: the item is about a setting that users may choose. So are all items with `expected`. A
            deviation of such an item is not a fault.
        own_clip: the item measures the module's own clip, which is off while the other items are measured.
        silent: the item is decided even on a module that writes nothing.
        named_by: ids of items that can name the fault that this item only detects. If one of them deviates, a
            deviation of this item counts as "not checked".
        by_settings: decides the item from the model's settings, if the probes cannot drive a single layer.
            The item `declared-rule` measures if the model follows its settings.
    """

    id: str
    title: str
    paper_ref: str
    paper: str
    sure: Literal["high", "medium", "low"]
    reference_code: str
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
        return self.paper if profile == "paper" else self.reference_code


def known(profile: str) -> Profile:
    """Returns the profile of that name. Raises InPlaceTTTError if it does not exist."""
    for name in PROFILES:
        if name == profile:
            return name
    raise InPlaceTTTError(f"profile {profile!r} does not exist; choose one of {', '.join(PROFILES)}.")
