"""Settings in a recipe of the from-scratch comparison: one task, the systems with their options, and shared
values."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from inplace_ttt.files.schema import at_least, require
from inplace_ttt.memories import MEMORIES

NONE = "none"
"""The name of the system without a memory."""


@dataclass(frozen=True)
class Recall:
    """The recall task (`tasks/recall.py`): pairs, then filler longer than the window, then every key
    again."""

    pairs: int = 16
    vocabulary: int = 128
    held_out: int = 64

    def __post_init__(self) -> None:
        at_least(1, self, "pairs", "vocabulary", "held_out")


@dataclass(frozen=True)
class Text:
    """Bytes of text files.

    Attributes:
        train: files and folders.
        held_out: files that are not trained on, from `train` or elsewhere.
        rows: rows of each held-out file, at equal distances.
        bounds: ends of the reported stretches of positions, ascending, as shares of the length.
    """

    train: list[str]
    held_out: list[str]
    rows: int = 8
    bounds: list[float] = field(default_factory=lambda: [0.125, 0.5, 1.0])

    def __post_init__(self) -> None:
        at_least(1, self, "rows")
        ascending = all(low < high for low, high in zip([0.0, *self.bounds], self.bounds, strict=False))
        require(
            bool(self.bounds) and ascending and self.bounds[-1] == 1,
            "bounds",
            "must ascend from above 0 to 1",
        )


@dataclass(frozen=True)
class Model:
    """Sizes that all systems share.

    Attributes:
        width: hidden width of the MLPs of attention alone. The other widths follow from equal numbers of
            parameters.
        taps: taps of the short causal convolution before attention and memory; 1 for none.
    """

    dim: int = 64
    blocks: int = 2
    heads: int = 4
    window: int = 16
    width: int = 256
    taps: int = 1

    def __post_init__(self) -> None:
        at_least(1, self, "dim", "blocks", "heads", "window", "width", "taps")
        require(
            self.dim % (2 * self.heads) == 0, "dim", f"must divide into {self.heads} heads of an even width"
        )


@dataclass(frozen=True)
class Training:
    """Adam with a linear warm-up, then a cosine to a tenth, the same for every parameter of every system.

    Attributes:
        length: tokens of a row. A model reads all but the last one.
    """

    steps: int
    length: int
    batch_size: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "batch_size", "warmup_steps")
        require(self.length >= 2, "length", "must be at least 2")


@dataclass(frozen=True)
class Scratch:
    """Settings of one table: every system with every seed. A seed sets the start, the data and their
    order."""

    systems: dict[str, Any]
    training: Training
    recall: Recall | None = None
    text: Text | None = None
    model: Model = field(default_factory=Model)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])

    def __post_init__(self) -> None:
        known = [NONE, *MEMORIES]
        require(bool(self.systems), "systems", f"name some of {', '.join(known)}")
        for name, options in self.systems.items():
            require(name in known, "systems", f"there is no memory {name!r}; choose from {', '.join(known)}")
            require(
                options is None or isinstance(options, dict),
                "systems",
                f"{name} must have a table of options, or nothing",
            )
            require(
                name != NONE or not options, "systems", "attention alone takes no options; leave them out"
            )
            require(
                "hidden" not in (options or {}),
                "systems",
                "in-place takes its hidden width from model.width; leave hidden out",
            )
            for option, value in (options or {}).items():
                default = inspect.signature(MEMORIES[name]).parameters.get(option, _UNKNOWN).default
                require(
                    fits(value, default),
                    "systems",
                    f"{option} of {name} must have the type of {default!r}, got {value!r}",
                )
        require(
            (self.recall is None) != (self.text is None), "recall", "give one of the sections recall and text"
        )
        require(bool(self.seeds) and len(set(self.seeds)) == len(self.seeds), "seeds", "give some, each once")


_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.KEYWORD_ONLY)
"""Stands for an option that a memory lacks. `make` refuses such an option."""


def fits(value: Any, default: Any) -> bool:
    """Returns True if an option may have that value.

    An integer counts as a float. Any value fits an option without a default, or with the default None.
    """
    if default is None or default is inspect.Parameter.empty:
        return True
    return type(value) is type(default) or (type(default), type(value)) == (float, int)
