"""What a diagnosis can find: each cause with its meaning and remedy, and one finding with its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["severe", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "info")


@dataclass(frozen=True)
class Kind:
    """A cause: its name, what it does, and what to do about it."""

    title: str
    meaning: str
    remedy: str


CATALOGUE: dict[str, Kind] = {
    "not-finite": Kind(
        "The loss is not a number",
        "An overflow or a bad weight: no gradient means anything.",
        "If the loss is finite with the writes off, lower eta or clip the writes; else mend the base model.",
    ),
    "clip-saturated": Kind(
        "Clipping in training takes the gradient",
        "Where every chunk's delta is clipped, the gradient of conv and P is multiplied by tau over the delta's norm.",
        'Clip at inference only (clip.when: inference), or use a relative clip such as {"tau": 0.05, "relative": true}.',
    ),
    "one-chunk": Kind(
        "No row is longer than a chunk",
        "A write is read by later chunks of its own document only; with one chunk nothing is read and nothing learns to write.",
        "Use rows of at least two chunks, or a smaller chunk_size.",
    ),
    "padding": Kind(
        "Padding or packing leaves no document longer than a chunk",
        "Rows are long enough, but the documents in them are not: pads are never written, and a new document starts from W0.",
        "Use longer documents, pack whole documents rather than pieces, or lower chunk_size; check attention_mask and position_ids.",
    ),
    "source-zero": Kind(
        "The target's source is zero",
        "V = Conv(X) P is zero where X is, whatever conv and P are, and so are their gradients.",
        "Load or initialise what the target reads (the embeddings, or the layer's norm) before training.",
    ),
    "zero-times-zero": Kind(
        "Conv and P are both zero",
        "V = Conv(X) P: each one's gradient is multiplied by the other, so that neither ever moves.",
        "Keep conv zero and draw P's diagonal from N(0, initializer_range²), as the paper does.",
    ),
    "eta-too-small": Kind(
        "eta is too small",
        "The gradient of conv and P is proportional to eta, and Adam's epsilon takes what is left.",
        "Raise eta; the sweep of eta says how far.",
    ),
    "init-too-small": Kind(
        "P starts too small",
        "The gradient of conv is multiplied by P.",
        "Draw P's diagonal from N(0, initializer_range²), as the paper does.",
    ),
    "writer-detached": Kind(
        "Conv and P are cut off from the loss",
        "The gradient reaches the targets V, but V was made without a graph (detach, no_grad, a patched generator).",
        "Take out the detach or no_grad around the target generator.",
    ),
    "writer-frozen": Kind(
        "Conv or P is frozen",
        "It has a gradient and requires none, while other parameters train.",
        "Set requires_grad on the layer's ttt module before the optimizer is made.",
    ),
    "target-detached": Kind(
        "The target's source is detached",
        "The embeddings (or the layers below) do not learn to be written. An option of the config, not the paper's.",
        "Leave detach_target off, unless the source must not follow the target.",
    ),
    "layer-dominates": Kind(
        "One layer takes the gradient",
        "Clipping by the global norm scales every step by this layer alone.",
        "Leave this layer out, or lower its eta (one a layer) or its conv's learning rate.",
    ),
    "gradient-vanishing": Kind(
        "The target generator's gradient vanishes",
        "Conv and P get less than a hundredth of W_down's gradient, and removing no possible cause brings it back.",
        "Look at the gradient that reaches each chunk and at the sizes of keys and targets.",
    ),
    "zero-init": Kind(
        "Conv is zero",
        "The paper's start: nothing is written and P has no gradient in the first step, conv has one.",
        "None needed.",
    ),
    "writes-too-large": Kind(
        "The update norm exceeds ‖W0‖",
        "The writes of one document are larger than the weight they are added to.",
        "Lower eta, warm it up, or clip the writes (a relative clip).",
    ),
    "writes-hurt": Kind(
        "Writes raise the loss",
        "The text is predicted better with the same weights and the writes off. Untrained writes always are like this.",
        "Train conv and P, lower eta, or leave out the layers whose writes raise the loss.",
    ),
    "writes-aligned": Kind(
        "Writes repeat each other",
        "Successive chunks write the same direction whatever they say: a drift that grows with length and tells nothing of the text.",
        "Compare with cross-document state; whiten or centre the keys, or leave the layer out.",
    ),
    "clip-at-inference": Kind(
        "Clipping at inference undoes the writes",
        "Every chunk is clipped to so little that the model reads as with the writes off.",
        "Evaluate with the clip and without it, and report both; a relative clip says how much of the weight may move.",
    ),
    "keys-collide": Kind(
        "A layer's keys are nearly collinear",
        "Their effective rank is low, so that each token reads what every other one wrote.",
        "Choose other layers (the chart of keys shows all of them), or whiten the keys.",
    ),
    "state-precision": Kind(
        "The state is not float32",
        "A running sum in half precision loses most of a small write.",
        "Keep S in float32: do not cast the cache, and use the package's own op.",
    ),
    "compute-precision": Kind(
        "Rounding of the output hides the writes",
        "What the writes add to the layer's output is of the size of its dtype's steps.",
        "Compute in float32, or write more (a higher eta, trained conv and P).",
    ),
    "safe-range": Kind(
        "What is safe",
        "The largest measured value whose loss is not above that with the writes off.",
        "Start below it.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One cause, found: where, and the numbers that say so."""

    id: str
    severity: Severity
    message: str
    layers: tuple[int, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return CATALOGUE[self.id]

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "remedy": self.kind.remedy,
            "layers": list(self.layers),
            "numbers": self.numbers,
        }


def named(layers: tuple[int, ...] | list[int]) -> str:
    """`layer 3`, `layers 3 and 9`, `layers 0, 6 and 12`."""
    names = [str(layer) for layer in sorted(layers)]
    return f"layer {names[0]}" if len(names) == 1 else f"layers {', '.join(names[:-1])} and {names[-1]}"


def times(factor: float | None) -> str:
    """A factor for a sentence; None stands for a rise from nothing."""
    return "from zero" if factor is None else f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"
