"""A finding of a diagnosis. It is one fault, with its severity, its place and the measured values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .catalog import CATALOG, Kind

Severity = Literal["severe", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One fault that was found.

    Attributes:
        id: key of the fault in `CATALOG`.
        severity: "severe", "warning" or "info".
        message: one sentence with layers and numbers.
        layers: the layers concerned; empty for the model as a whole.
        numbers: the measured values, by name.
    """

    id: str
    severity: Severity
    message: str
    layers: tuple[int, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """The entry of the catalog for this fault."""
        return CATALOG[self.id]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "measured": self.kind.measured,
            "remedy": self.kind.remedy,
            "expected_effect": self.kind.effect,
            "layers": list(self.layers),
            "numbers": self.numbers,
        }


def named(layers: tuple[int, ...] | list[int]) -> str:
    """Returns the layers in words: `layer 3`, `layers 3 and 9`, `layers 0, 6 and 12`."""
    names = [str(layer) for layer in sorted(layers)]
    return f"layer {names[0]}" if len(names) == 1 else f"layers {', '.join(names[:-1])} and {names[-1]}"


def times(factor: float | None) -> str:
    """Returns a factor in words. None stands for a rise from zero."""
    return (
        "from zero" if factor is None else f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"
    )
