"""A fault planted in this package, and the items of the audit that must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from models import seven_layers
from transformers import PreTrainedModel

from inplace_ttt.audit import Report, audit_model

Patch = pytest.MonkeyPatch
BESIDE = {
    "the clip bounds the largest entry": {"take-back", "every-layer", "in-pieces"},
    "the clip holds in training too": {"in-training"},
    "the clip leaves G out": {"document-grid", "take-back", "in-pieces"},
    "each rank starts from W0": {"in-pieces"},
    "G goes on into the next document": {"in-batches"},
    "a stream reads with the map of before": {"token-by-token"},
    "W0 is given centered inputs": {"gradient"},
}
"""By fault, the items that say where it shows, beside the one that says what it is; of all others the owner
stands alone."""


def expected(mutation: Mutation) -> set[str]:
    """The undeclared deviations of a mutated package, all of them."""
    return {mutation.owner, *BESIDE.get(mutation.what, ())}


@dataclass(frozen=True)
class Mutation:
    """A fault planted in this package: by settings, by `plant` before the conversion, by `spoil` on the
    converted model."""

    what: str
    owner: str
    plant: Callable[[Patch], None] | None = None
    spoil: Callable[[PreTrainedModel], None] | None = None
    settings: dict[str, Any] | None = None
    sound: bool = True
    """Whether the same settings without the planted fault raise nothing; False where the settings are the
    fault."""

    def report(self, patch: Patch | None, seed: int = 0, profile: str = "paper") -> Report:
        """Audit the model, with the fault planted if there is a `patch` to plant it with."""
        if patch is not None and self.plant is not None:
            self.plant(patch)
        model = seven_layers(seed, **(self.settings or {}))
        if patch is not None and self.spoil is not None:
            self.spoil(model)
        return audit_model(model, seed=seed, profile=profile)
