"""The models of the memory evidence, the documents that they read, and their further readings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept_runs
from memory_rules import ONE_PROCESS, ROOT, WORK

from inplace_ttt.attention_window import SINKS

MODEL = ROOT / ".cache" / "smollm2-135m"
LAYERS = "12,18,24"
DOCUMENTS, TOKENS, WINDOW = 26, 2048, 256
LONG_DOCUMENTS, LONG = 12, 3 * TOKENS
FAR_DOCUMENTS, FAR = 8, 8 * TOKENS
BESIDES = ("full_attention", "beyond_training", "far_beyond")
"""Further readings of seed 0."""

RIVAL, RATES = "dynamic_evaluation", "1,5,20"
"""A further reading that only `--besides` asks for: dynamic evaluation, by learning rates."""

CHOSEN_ON = 10
"""Number of documents on which choices were made: the rates, the start of P, the rank and η of `ridge`.

The other documents are unseen.
"""


@dataclass(frozen=True)
class Model:
    """A model to train and read.

    Attributes:
        base: folder of the base.
        layers: TTT layers, as on the command line.
        window: attention window in training and reading; None for the model's own attention.
        past: number of first tokens that are not scored.
        folder: name of its folder under runs/memory and of its results.
        documents: number of documents to read.
        settings: settings of the recipe.
        besides: further readings of seed 0.
        widened: the checkpoint of which `base` is a copy in float32; None for a base of its own.
    """

    base: Path
    layers: str
    window: int | None
    past: int
    folder: str = ""
    documents: int = DOCUMENTS
    settings: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()
    widened: Path | None = None

    @property
    def work(self) -> Path:
        return WORK / self.folder

    def protocol(self) -> dict[str, Any]:
        attention = {"window": self.window, **({} if self.window is None else {"sinks": SINKS})}
        beyond = {
            "beyond_training": {"number": LONG_DOCUMENTS, "tokens": LONG, "past_token": TOKENS},
            "far_beyond": {
                "number": FAR_DOCUMENTS,
                "tokens": FAR,
                "past_token": TOKENS,
                "window": self.window,
            },
        }
        documents = {"number": self.documents, "tokens": TOKENS, "past_token": self.past}
        return {
            **attention,
            "documents": documents,
            **{key: beyond[key] for key in beyond if key in self.besides},
            **kept_runs.digests(),
        }


SMOLLM2 = Model(MODEL, LAYERS, WINDOW, past=WINDOW, besides=BESIDES)
GEMMA = Model(
    MODEL.with_name("gemma-3-270m"),
    "7,11,14",
    None,
    past=512,
    folder="gemma-3-270m",
    settings=("model.window=null", *ONE_PROCESS),
)


def in_float32(model: Model, folder: str) -> Model:
    """Returns the same model in float32, for processors without bfloat16."""
    return dataclasses.replace(
        model,
        base=WORK / f"{model.base.name}-float32",
        folder=folder,
        settings=("model.dtype=float32", *model.settings),
        widened=model.base,
    )


MODELS = {
    "smollm2-135m": SMOLLM2,
    "smollm2-135m-float32": in_float32(SMOLLM2, "float32"),
    "gemma-3-270m": GEMMA,
    "gemma-3-270m-float32": in_float32(GEMMA, "gemma-float32"),
}
