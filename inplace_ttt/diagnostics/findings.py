"""What a diagnosis can find: each cause with its meaning and remedy, and one finding with its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["severe", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "info")


@dataclass(frozen=True)
class Kind:
    """A cause: its name and what it does; what is measured, with the threshold and where that is from; what
    to do, and to what effect."""

    title: str
    meaning: str
    measured: str
    remedy: str
    effect: str


CATALOGUE: dict[str, Kind] = {
    "not-finite": Kind(
        "The loss is not a number",
        "An overflow or a bad weight: no gradient means anything.",
        "The loss, and the loss again with the writes off; any finite one passes.",
        "If the loss is finite with the writes off, lower eta or clip the writes; else mend the base model.",
        "The loss is a number again, at most that with the writes off.",
    ),
    "weight-not-finite": Kind(
        "A weight holds NaN or infinity",
        "Whatever reads it computes NaN. The run that wrote it diverged, or the file is damaged.",
        "The entries of every parameter, and of what was measured for a layer; any finite one passes.",
        "Take the weight from a checkpoint before; conv may be set to zero and P drawn anew, W0 is the "
        "base's.",
        "The loss is finite again.",
    ),
    "keys-detached": Kind(
        "The keys are cut off from the loss",
        "Gradient reaches the output of the down-projection, and none of it goes through the keys to the "
        "layers below, which then do not "
        "learn what to write or read.",
        "The gradient at the keys of the first chunk, which only write, and of the last, which only read, "
        "without what W0 takes; below a "
        "hundredth of what targets and outputs say is due.",
        "Take out the detach or no_grad around the keys (the down-projection's input); compare with "
        "ops/reference.py.",
        "The keys get the gradient named.",
    ),
    "weight-detached": Kind(
        "W0 is cut off from the loss",
        "W0 has no gradient, though its input and its output's gradient are not zero: it is read through a "
        "detach.",
        "The gradient of W0 against the product of the output's gradient and the input; below a hundredth.",
        "Take out the detach or no_grad around the down-projection's weight.",
        "W0 gets the gradient named.",
    ),
    "weight-frozen": Kind(
        "W0 is frozen",
        "The down-projection trains in no step, while most other weights of its MLP do.",
        "requires_grad of W0, and of more than half of the MLP's other entries.",
        "Set requires_grad on the down-projection's weight before the optimizer is made; or freeze the "
        "whole base.",
        "W0 gets the gradient named.",
    ),
    "own-chunk-read": Kind(
        "A chunk reads its own write",
        "A token then reads targets of later tokens of its chunk, so that losses are too low, and no "
        "generation can repeat it.",
        "The logits of documents' first chunks with the layer's writes on and off, and the gradient at the "
        "last chunk's targets; above a "
        "hundredth of those of the others.",
        "Apply before the update: a chunk reads the sum over the chunks before it; compare with "
        "ops/reference.py.",
        "First chunks read W0 alone, and the last chunk's targets get no gradient.",
    ),
    "writes-turned-round": Kind(
        "Writes point away from the target",
        "P turns targets round: a read takes away what was to be added.",
        "The cosine of P with the identity, with the sign of conv's largest tap; below -0.5. Severe where "
        "writes raise the loss "
        "and those of the other sign lower it, each beyond its error.",
        "Turn the sign of P (or of conv), or draw P anew as the paper does; look for a minus sign in the "
        "code that made it.",
        "The loss changes by what is named for the other sign.",
    ),
    "conv-too-small": Kind(
        "Conv is too small",
        "Targets are multiplied by conv, so that writes are lost beside W0 and P has next to no gradient.",
        "The RMS of conv's entries, and η‖S‖/‖W0‖ after a document; below 1e-4, and not with entries of "
        "0.02.",
        "Train conv on, at a higher rate (conv_learning_rate), or start again from zero; look at whether "
        "it was trained at all.",
        "Writes grow in proportion to conv.",
    ),
    "clip-saturated": Kind(
        "Clipping in training takes the gradient",
        "Where every chunk's delta is clipped, the gradient of conv and P is multiplied by tau over the "
        "delta's norm.",
        "The gradient again without the clip; also after Adam's first step where conv starts at zero. "
        "Tenfold is a cause; a "
        "hundredth of W_down's is severe.",
        'Clip at inference only (clip.mode: inference), or use a relative clip such as {"max_norm": 0.05, '
        '"relative": true}.',
        "The gradient of conv and P rises by the factor named.",
    ),
    "one-chunk": Kind(
        "No row is longer than a chunk",
        "A write is read by later chunks of its own document only; with one chunk nothing is read and "
        "nothing learns to write.",
        "The gradient again with chunks of half a row; tenfold is a cause.",
        "Use rows of at least two chunks, or a smaller chunk_size.",
        "Conv and P get a gradient, from zero.",
    ),
    "padding": Kind(
        "Padding or packing leaves no document longer than a chunk",
        "Rows are long enough, but the documents in them are not: pads are never written, and a new "
        "document starts from W0.",
        "The gradient again without mask and positions, each row one document; tenfold is a cause.",
        "Use longer documents, pack whole documents rather than pieces, or lower chunk_size; check "
        "attention_mask and position_ids.",
        "Conv and P get a gradient, from zero.",
    ),
    "labels-unread": Kind(
        "Only tokens that can read no write are predicted",
        "The first chunk of a document reads W0 alone, so that a loss over it teaches nothing about writing.",
        "The gradient again with every token predicted; tenfold is a cause.",
        "Let labels stand behind the first chunk too, or lower chunk_size below the length of what is not "
        "predicted.",
        "Conv and P get a gradient, from zero.",
    ),
    "source-zero": Kind(
        "The target's source is zero",
        "V = Conv(X) P is zero where X is, whatever conv and P are, and so are their gradients.",
        "The size of the source, and of embeddings the gradient again with random ones; any size above "
        "zero passes.",
        "Load or initialise what the target reads (the embeddings, or the layer's norm) before training.",
        "Conv and P get a gradient, from zero.",
    ),
    "source-constant": Kind(
        "The target's source is the same at every token",
        "What is written is the same for every token, so that a read tells nothing of the text.",
        "The part of the source's square that is not its mean over tokens; below 0.001, where real sources "
        "have half or more.",
        "Look at what the target reads: embeddings that were never trained, a norm with a large bias, or a "
        "scale that drowns them.",
        "The effective rank of the targets rises to that of the source.",
    ),
    "zero-times-zero": Kind(
        "Conv and P are both zero",
        "V = Conv(X) P: each one's gradient is multiplied by the other, so that neither ever moves.",
        "The gradient again with the paper's P; tenfold is a cause.",
        "Keep conv zero and draw P's diagonal from N(0, initializer_range²), as the paper does.",
        "Conv gets a gradient, from zero.",
    ),
    "projection-collapsed": Kind(
        "P has one direction",
        "Every target is a multiple of one row: what is written can say one number about a token.",
        "The participation ratio of P's rows; below 1.5 of d (the paper's start has a third of d).",
        "Draw P anew as the paper does, or start from a checkpoint before it collapsed; look for a P that "
        "is a mean or an outer product.",
        "The effective rank of the targets rises to that of the source.",
    ),
    "targets-collapsed": Kind(
        "Targets have one direction",
        "Source and P have several, and Conv(X) P has not.",
        "The participation ratio of the targets; below 1.5.",
        "Look at the conv: taps that leave one channel, or cancel in all others.",
        "The effective rank of the targets rises to that of the source.",
    ),
    "eta-too-small": Kind(
        "eta is too small",
        "The gradient of conv and P is proportional to eta, and Adam's epsilon takes what is left.",
        "The gradient again with eta 1; tenfold is a cause, a hundredth of W_down's is severe.",
        "Raise eta; the sweep of eta says how far.",
        "The gradient of conv and P rises in proportion.",
    ),
    "init-too-small": Kind(
        "P starts too small",
        "The gradient of conv is multiplied by P.",
        "The gradient again with P scaled to the paper's size; tenfold is a cause, a hundredth of W_down's "
        "is severe.",
        "Draw P's diagonal from N(0, initializer_range²), as the paper does.",
        "The gradient of conv rises by the factor named.",
    ),
    "writer-detached": Kind(
        "Conv and P are cut off from the loss",
        "The gradient reaches the targets V, but V was made without a graph (detach, no_grad, a patched "
        "generator).",
        "The gradient at the targets, which conv and P do not get; any that they get passes.",
        "Take out the detach or no_grad around the target generator.",
        "Conv and P get the gradient that reaches the targets.",
    ),
    "scan-detached": Kind(
        "The gradient is not that of the loss",
        "The loss follows the size of P, and the gradient says otherwise: it stops between a write and "
        "what reads it.",
        "The slope of the loss with the size of P, by autograd and by differences; apart by more than "
        "half, and by more than "
        "differences with two steps are.",
        "Take out the detach between a chunk's delta and the chunks after it; compare with ops/reference.py.",
        "Both slopes agree, and P learns from what is read.",
    ),
    "writer-frozen": Kind(
        "Conv or P is frozen",
        "It has a gradient and requires none, while other parameters train.",
        "Its gradient when it is asked for.",
        "Set requires_grad on the layer's ttt module before the optimizer is made.",
        "It gets the gradient named.",
    ),
    "target-detached": Kind(
        "The target's source is detached",
        "The embeddings (or the layers below) do not learn to be written. An option of the config, not the "
        "paper's.",
        "The embeddings' gradient again with the source attached; a warning where above 1 % of it comes "
        "that way.",
        "Leave detach_target off, unless the source must not follow the target.",
        "The embeddings get the share named.",
    ),
    "layer-dominates": Kind(
        "One layer takes the gradient",
        "Clipping by the global norm scales every step by this layer alone.",
        "The gradient again with this layer's writes off; above 99 % of the squared norm, ten times all "
        "others together.",
        "Leave this layer out, or lower its eta (one a layer) or its conv's learning rate.",
        "The norm falls to the one named, and the other layers' steps grow by as much.",
    ),
    "gradient-vanishing": Kind(
        "The target generator's gradient vanishes",
        "Conv and P get less than a hundredth of W_down's gradient, and removing no possible cause brings "
        "it back.",
        "Below a hundredth of W_down's, and no cause's removal raises it tenfold.",
        "Look at the gradient that reaches each chunk and at the sizes of keys and targets.",
        "None is known.",
    ),
    "zero-init": Kind(
        "Conv is zero",
        "The paper's start: nothing is written and P has no gradient in the first step, conv has one.",
        "P's gradient again after Adam's first step.",
        "None needed.",
        "P has a gradient from the second step on.",
    ),
    "step-too-large": Kind(
        "Adam's first step raises the loss",
        "At these rates every trained entry moves by its rate whatever its gradient is, and the loss jumps.",
        "The loss after the first step, at the rates and at a tenth of them; 0.1 nats higher is a warning, "
        "0.5 severe, which a "
        "run seldom comes back from.",
        "Lower the rates, or warm up.",
        "At a tenth of the rates the loss goes where it is named.",
    ),
    "updates-rounded": Kind(
        "Steps round away in half precision",
        "An entry moves by its rate, and half a step of its dtype beside it is more: the parameter stays "
        "as it is.",
        "The share of entries that Adam's first step changes in the parameter's own dtype; below half.",
        "Train with float32 masters (DeepSpeed's bf16 has them), in float32, or at a higher rate.",
        "All entries with a gradient move.",
    ),
    "writes-too-large": Kind(
        "The update norm exceeds ‖W0‖",
        "The writes of one document are larger than the weight they are added to.",
        "η‖S‖/‖W0‖ after a document; above 1. The loss again with the layer's writes off: where writes "
        "help, this is an info.",
        "Lower eta, warm it up, or clip the writes (a relative clip).",
        "Up to the eta named, the loss is not above that without writes.",
    ),
    "writes-hurt": Kind(
        "Writes raise the loss",
        "The text is predicted better with the same weights and the writes off. Untrained writes always "
        "are like this.",
        "The loss again with the layer's writes off: by more than 0.01 nats and its error (95 %).",
        "Train conv and P, lower eta, or leave out the layers whose writes raise the loss.",
        "The loss falls by what is named when the layer is left out.",
    ),
    "few-tokens-hurt": Kind(
        "A few tokens pay for the writes",
        "What the writes take is lost at a hundredth of the tokens, often wherever one token is read; the "
        "others lose little or gain.",
        "What the hundredth of the tokens harmed most loses, less what the hundredth helped most gains; "
        "above half of the whole.",
        "Look at what the layer's W0 gives that token: where it is next to nothing and a norm follows, "
        "what is read is all that is left. "
        "Write less there: a lower eta, another layer, or keys that grow with the down-projection's input.",
        "The loss falls by the share named.",
    ),
    "writes-aligned": Kind(
        "Writes repeat each other",
        "Successive chunks write the same direction whatever they say: a drift that grows with length and "
        "tells nothing of the text.",
        "The mean cosine of successive writes; above 0.9 (unrelated ones have 0). An info where writes help.",
        "Compare with cross-document state; whiten or centre the keys, or leave the layer out.",
        "‖S‖ grows as the root of the number of chunks.",
    ),
    "clip-at-inference": Kind(
        "Clipping at inference undoes the writes",
        "Every chunk is clipped to so little that the model reads as with the writes off.",
        "Every chunk clipped in eval mode, and η‖S‖/‖W0‖ below 1e-4, which changes no prediction.",
        "Evaluate with the clip and without it, and report both; a relative clip says how much of the "
        "weight may move.",
        "Writes move the weight by what tau admits.",
    ),
    "keys-zero": Kind(
        "A layer's keys are zero",
        "Nothing is written under them and nothing is read with them, whatever conv and P are.",
        "The size of the down-projection's input; any above zero passes.",
        "Look at the layer's gate and up-projection, or at the whitening that was measured; leave the "
        "layer out.",
        "The layer writes.",
    ),
    "keys-collide": Kind(
        "A layer's keys are nearly collinear",
        "Their effective rank is low, so that each token reads what every other one wrote.",
        "The participation ratio of the keys; below 10 (SmolLM2-135M's last two layers have 2 to 7, most "
        "others 40 and more). An info "
        "where writes help.",
        "Choose other layers (the chart of keys shows all of them), or whiten the keys.",
        "Reads tell tokens apart: the RMS cosine of keys falls.",
    ),
    "state-precision": Kind(
        "The state is not float32",
        "A running sum in half precision loses most of a small write.",
        "The dtype of the state in a real session, and as the op makes it in training; below 32 bits.",
        "Keep S in float32: do not cast the cache, and use the package's own op.",
        "What is lost, as named, is kept.",
    ),
    "compute-precision": Kind(
        "Rounding of the output hides the writes",
        "What the writes add to the layer's output is of the size of its dtype's steps.",
        "The part of ηZSᵀ that is lost when the output is rounded; more than half.",
        "Compute in float32, or write more (a higher eta, trained conv and P).",
        "The output has what was written.",
    ),
    "safe-range": Kind(
        "What is safe",
        "The largest measured value whose loss is not above that with the writes off.",
        "The loss over a sweep of eta, and of an untrained conv's size; more than 0.01 nats and its error "
        "(95 %) above counts as harm.",
        "Start below it.",
        "The loss starts no higher than with the writes off.",
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
            "measured": self.kind.measured,
            "remedy": self.kind.remedy,
            "expected_effect": self.kind.effect,
            "layers": list(self.layers),
            "numbers": self.numbers,
        }


def named(layers: tuple[int, ...] | list[int]) -> str:
    """`layer 3`, `layers 3 and 9`, `layers 0, 6 and 12`."""
    names = [str(layer) for layer in sorted(layers)]
    return f"layer {names[0]}" if len(names) == 1 else f"layers {', '.join(names[:-1])} and {names[-1]}"


def times(factor: float | None) -> str:
    """A factor for a sentence; None stands for a rise from nothing."""
    return (
        "from zero" if factor is None else f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"
    )
