"""The faults that a diagnosis can find, each with its meaning, measurement and remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A fault that a diagnosis can find.

    Attributes:
        title: name of the fault.
        meaning: its effect on training or reading.
        measured: the measurement, and the threshold with its origin.
        remedy: the action to take.
        effect: the result to expect from the remedy.
    """

    title: str
    meaning: str
    measured: str
    remedy: str
    effect: str


_TENFOLD = "A tenfold rise makes it a cause."
_SEVERE = "A tenfold rise makes it a cause; below a hundredth of W_down's gradient it is severe."
_FROM_ZERO = "conv and P get a gradient, up from zero."
_COMPARE = "Compare with ops/reference.py."

CATALOG: dict[str, Kind] = {
    "not-finite": Kind(
        "The loss is NaN or infinite",
        "A computation overflowed or a weight is damaged. No gradient is meaningful.",
        "The loss, and the loss with the writes off. Any finite loss passes.",
        "If the loss is finite with the writes off, lower eta or clip the writes. Otherwise repair the base "
        "model.",
        "The loss is finite, and at most the loss with the writes off.",
    ),
    "weight-not-finite": Kind(
        "A weight holds NaN or infinity",
        "Every result computed from it is NaN. The run that wrote it diverged, or the file is damaged.",
        "All entries of every parameter and of each layer's calibrated buffers. Finite entries pass.",
        "Take the weight from an earlier checkpoint. conv may be set to zero, P drawn anew, and W0 taken "
        "from the base.",
        "The loss is finite again.",
    ),
    "keys-detached": Kind(
        "The keys are cut off from the loss",
        "The gradient reaches the output of the down-projection, but does not pass through the keys to the "
        "layers below. These layers do not learn to write or to read.",
        "The gradient, apart from W0's part, at the keys of the first chunk (which only write) and of the "
        "last chunk (which only read). A fault below a hundredth of the gradient that targets and outputs "
        "imply.",
        "Remove the detach or no_grad around the keys (the input of the down-projection). " + _COMPARE,
        "The keys get the reported gradient.",
    ),
    "weight-detached": Kind(
        "W0 is cut off from the loss",
        "W0 gets no gradient, although its input and the gradient of its output are not zero. It is read "
        "through a detach.",
        "The gradient of W0 against the product of its input and the gradient of its output. A fault below "
        "a hundredth.",
        "Remove the detach or no_grad around the down-projection's weight.",
        "W0 gets the reported gradient.",
    ),
    "weight-frozen": Kind(
        "W0 is frozen",
        "The down-projection is never trained, while most other weights of its MLP are.",
        "requires_grad of W0 and of the MLP's other entries. A fault if W0 is frozen and more than half of "
        "the others train.",
        "Set requires_grad on the down-projection's weight before the optimizer is created, or freeze the "
        "whole base.",
        "W0 gets the reported gradient.",
    ),
    "own-chunk-read": Kind(
        "A chunk reads its own write",
        "A token then reads targets of later tokens of its chunk. Losses are too low, and generation cannot "
        "reproduce them.",
        "The logits of the documents' first chunks with the layer's writes on and off, and the gradient at "
        "the last chunk's targets. A fault above a hundredth of the values of the other chunks.",
        "Read before writing: a chunk reads the sum over the chunks before it. " + _COMPARE,
        "First chunks read W0 alone, and the last chunk's targets get no gradient.",
    ),
    "writes-turned-round": Kind(
        "Writes point away from the target",
        "P reverses the targets, so a read subtracts the target instead of adding it.",
        "The cosine of P with the identity, signed by conv's largest tap. A fault below -0.5. Severe if the "
        "writes raise the loss and writes of the opposite sign lower it, each beyond its error.",
        "Reverse the sign of P (or of conv), or draw P anew as in the paper. Look for a minus sign in the "
        "code that made it.",
        "The loss changes by the amount reported for the opposite sign.",
    ),
    "conv-too-small": Kind(
        "conv is too small",
        "Targets are proportional to conv. Writes are negligible beside W0, and P gets almost no gradient.",
        "The RMS of conv's entries, and η‖S‖/‖W0‖ after a document. A fault if the ratio is below 1e-4, but "
        "would be higher with entries of 0.02.",
        "Continue training conv at a higher rate (conv_learning_rate), or restart from zero. Check that conv "
        "was trained at all.",
        "Writes grow in proportion to conv.",
    ),
    "clip-saturated": Kind(
        "Clipping in training removes the gradient",
        "If every chunk's delta is clipped, the gradient of conv and P is multiplied by τ over the norm of "
        "the delta.",
        "The gradient without the clip; also after Adam's first step if conv starts at zero. " + _SEVERE,
        'Clip at inference only (clip.mode: inference), or use a relative clip such as {"max_norm": 0.05, '
        '"relative": true}.',
        "The gradient of conv and P rises by the reported factor.",
    ),
    "one-chunk": Kind(
        "No row is longer than a chunk",
        "Only later chunks of the same document read a write. With one chunk nothing is read, and the model "
        "does not learn to write.",
        "The gradient with chunks of half a row. " + _TENFOLD,
        "Use rows of at least two chunks, or a smaller chunk_size.",
        _FROM_ZERO,
    ),
    "padding": Kind(
        "Padding or packing leaves no document longer than a chunk",
        "Rows are long enough, but the documents in them are not. Padding is never written, and a new "
        "document starts from W0.",
        "The gradient without mask and positions, so that each row is one document. " + _TENFOLD,
        "Use longer documents, pack complete documents instead of pieces, or lower chunk_size. Check "
        "attention_mask and position_ids.",
        _FROM_ZERO,
    ),
    "labels-unread": Kind(
        "Only tokens that cannot read a write are predicted",
        "The first chunk of a document reads W0 alone. A loss over first chunks alone does not train the "
        "writes.",
        "The gradient with every token predicted. " + _TENFOLD,
        "Add labels after the first chunk, or lower chunk_size below the length of the part without labels.",
        _FROM_ZERO,
    ),
    "source-zero": Kind(
        "The target's source is zero",
        "V = Conv(X) P is zero if X is, whatever the values of conv and P, and so are their gradients.",
        "The size of the source; for embeddings also the gradient with random ones. Any size above zero "
        "passes.",
        "Load or initialize the target's source (the embeddings, or the layer's norm) before training.",
        _FROM_ZERO,
    ),
    "source-constant": Kind(
        "The target's source is the same at every token",
        "Every token writes the same target, so a read carries no information about the text.",
        "The part of the source's square that is not its mean over tokens. A fault below 0.001; real sources "
        "have half or more.",
        "Check the target's source for untrained embeddings, a norm with a large bias, or a scale that "
        "drowns the differences.",
        "The effective rank of the targets rises to that of the source.",
    ),
    "zero-times-zero": Kind(
        "conv and P are both zero",
        "V = Conv(X) P: the gradient of each is multiplied by the other, so neither ever moves.",
        "The gradient with the paper's P. " + _TENFOLD,
        "Keep conv zero and draw P's diagonal from N(0, initializer_range²), as in the paper.",
        "conv gets a gradient, up from zero.",
    ),
    "projection-collapsed": Kind(
        "P has one direction",
        "Every target is a multiple of one row, so a write carries one number per token.",
        "The participation ratio of P's rows. A fault below 1.5 (the paper's start has d/3).",
        "Draw P anew as in the paper, or start from a checkpoint before the collapse. Look for a P that is "
        "computed as a mean or an outer product.",
        "The effective rank of the targets rises to that of the source.",
    ),
    "targets-collapsed": Kind(
        "Targets have one direction",
        "The source and P span several directions, but Conv(X) P does not.",
        "The participation ratio of the targets. A fault below 1.5.",
        "Check conv for taps that keep only one channel, or that cancel in all others.",
        "The effective rank of the targets rises to that of the source.",
    ),
    "eta-too-small": Kind(
        "eta is too small",
        "The gradient of conv and P is proportional to eta. A very small gradient is then lost in Adam's "
        "epsilon.",
        "The gradient with eta 1. " + _SEVERE,
        "Raise eta. The sweep of eta shows how far.",
        "The gradient of conv and P rises in proportion.",
    ),
    "init-too-small": Kind(
        "P starts too small",
        "The gradient of conv is multiplied by P.",
        "The gradient with P scaled to the paper's size. " + _SEVERE,
        "Draw P's diagonal from N(0, initializer_range²), as in the paper.",
        "The gradient of conv rises by the reported factor.",
    ),
    "writer-detached": Kind(
        "conv and P are cut off from the loss",
        "The gradient reaches the targets V, but V was computed without a graph (detach, no_grad, a patched "
        "generator).",
        "The gradient at the targets, and at conv and P. Any gradient at conv and P passes.",
        "Remove the detach or no_grad around the target generator.",
        "conv and P get the gradient that reaches the targets.",
    ),
    "scan-detached": Kind(
        "The gradient is not that of the loss",
        "The loss depends on the size of P, but the gradient disagrees: it stops between a write and its "
        "reads.",
        "The slope of the loss with the size of P, by autograd and by finite differences. A fault if they "
        "differ by more than half, and by more than the differences of two step sizes do.",
        "Remove the detach between a chunk's delta and the chunks after it. " + _COMPARE,
        "Both slopes agree, and P learns from the reads.",
    ),
    "writer-frozen": Kind(
        "conv or P is frozen",
        "It would get a gradient but requires none, while other parameters train.",
        "Its gradient with requires_grad set.",
        "Set requires_grad on the layer's ttt module before the optimizer is created.",
        "It gets the reported gradient.",
    ),
    "target-detached": Kind(
        "The target's source is detached",
        "The embeddings (or the layers below) do not learn to be written. This is an option of the config, "
        "not part of the paper.",
        "The embeddings' gradient with the source attached. A warning if more than 1 % of it comes that way.",
        "Leave detach_target off, unless the source must not follow the target.",
        "The embeddings get the reported share.",
    ),
    "layer-dominates": Kind(
        "One layer dominates the gradient",
        "Clipping by the global norm scales every step by this layer alone.",
        "The gradient with this layer's writes off. A fault if the layer has more than 99 % of the squared "
        "norm, ten times the norm of all others together.",
        "Leave this layer out, or lower its eta (one value per layer) or its conv's learning rate.",
        "The norm falls to the reported value, and the other layers' steps grow by the same factor.",
    ),
    "gradient-vanishing": Kind(
        "The target generator's gradient vanishes",
        "conv and P get less than a hundredth of W_down's gradient, and removing any possible cause does not "
        "restore it.",
        "The gradient against W_down's, also with each possible cause removed. A fault below a hundredth if "
        "no removal raises it tenfold.",
        "Look at the gradient that reaches each chunk, and at the sizes of keys and targets.",
        "Unknown.",
    ),
    "zero-init": Kind(
        "conv is zero",
        "This is the paper's start. Nothing is written. In the first step only conv gets a gradient.",
        "P's gradient after Adam's first step.",
        "None needed.",
        "P gets a gradient from the second step on.",
    ),
    "step-too-large": Kind(
        "Adam's first step raises the loss",
        "At these rates every trained entry moves by its rate whatever its gradient, and the loss jumps.",
        "The loss after the first step, at the rates and at a tenth of them. A rise of 0.1 nats is a "
        "warning. A rise of 0.5 nats is severe, because a run seldom recovers from it.",
        "Lower the rates, or warm up.",
        "At a tenth of the rates the loss goes to the reported value.",
    ),
    "updates-rounded": Kind(
        "Steps are lost to rounding in half precision",
        "An entry moves by its rate. If that is less than half a step of its dtype, the parameter does not "
        "change.",
        "The share of entries that Adam's first step changes in the parameter's own dtype. A fault below "
        "half.",
        "Train with float32 master weights (DeepSpeed's bf16 has them), in float32, or at a higher rate.",
        "All entries with a gradient move.",
    ),
    "writes-too-large": Kind(
        "The update norm exceeds ‖W0‖",
        "The writes of one document are larger than the weight they are added to.",
        "η‖S‖/‖W0‖ after a document. A fault above 1. The loss is also measured with the layer's writes off; "
        "if the writes help, this is an info.",
        "Lower eta, warm it up, or clip the writes (a relative clip).",
        "Up to the reported eta, the loss is not above the loss without writes.",
    ),
    "writes-hurt": Kind(
        "Writes raise the loss",
        "The same weights predict the text better with the writes off. Untrained writes always raise the "
        "loss.",
        "The loss with the layer's writes off. A fault if it is lower by more than 0.01 nats and by more "
        "than the error (95 %).",
        "Train conv and P, lower eta, or leave out the layers whose writes raise the loss.",
        "The loss falls by the reported amount when the layer is left out.",
    ),
    "few-tokens-hurt": Kind(
        "A few tokens bear the harm of the writes",
        "Most of the added loss falls on a hundredth of the tokens, often wherever one certain token is "
        "read. The others lose little or gain.",
        "The loss added at the most harmed hundredth of the tokens, minus the gain of the most helped "
        "hundredth. A fault above half of the total.",
        "Check the output of the layer's W0 at that token. If it is close to zero and a norm follows, the "
        "norm enlarges the read, and the token's own part is lost. Write less there: a lower eta, another "
        "layer, or keys that grow with the down-projection's input.",
        "The loss falls by the reported share.",
    ),
    "writes-aligned": Kind(
        "Writes repeat each other",
        "Successive chunks write the same direction whatever their content. This drift grows with length and "
        "carries no information about the text.",
        "The mean cosine of successive writes. A fault above 0.9 (unrelated writes have 0); an info if the "
        "writes help.",
        "Compare with cross-document state. Whiten or center the keys, or leave the layer out.",
        "‖S‖ grows as the square root of the number of chunks.",
    ),
    "clip-at-inference": Kind(
        "Clipping at inference undoes the writes",
        "Every chunk is clipped so far that the model reads as with the writes off.",
        "Every chunk is clipped in eval mode, and η‖S‖/‖W0‖ is below 1e-4, which changes no prediction.",
        "Evaluate with and without the clip, and report both. A relative clip states the bound as a fraction "
        "of ‖W0‖.",
        "Writes move the weight as far as τ allows.",
    ),
    "keys-zero": Kind(
        "A layer's keys are zero",
        "Nothing is written and nothing is read, whatever the values of conv and P.",
        "The size of the down-projection's input. Any size above zero passes.",
        "Check the layer's gate and up-projection, or the calibrated whitening. Otherwise leave the layer "
        "out.",
        "The layer writes.",
    ),
    "keys-collide": Kind(
        "A layer's keys are nearly collinear",
        "Their effective rank is low, so each token reads the writes of every other token.",
        "The participation ratio of the keys. A fault below 10 (SmolLM2-135M's last two layers have 2 to 7, "
        "most others 40 or more); an info if the writes help.",
        "Choose other layers (the chart of keys shows all of them), or whiten the keys.",
        "Reads distinguish tokens: the RMS cosine of the keys falls.",
    ),
    "state-precision": Kind(
        "The state is not float32",
        "A running sum in half precision loses most of a small write.",
        "The dtype of the state in a session, and as the op creates it in training. A fault below 32 bits.",
        "Keep S in float32: do not cast the cache, and use the package's own op.",
        "The reported loss of precision disappears.",
    ),
    "compute-precision": Kind(
        "Rounding of the output hides the writes",
        "The part that writes add to the layer's output is as small as the steps of its dtype.",
        "The part of ηZSᵀ that is lost when the output is rounded. A fault above half.",
        "Compute in float32, or write more (a higher eta, trained conv and P).",
        "The output contains the writes.",
    ),
    "safe-range": Kind(
        "Safe range",
        "The largest measured value whose loss is not above the loss with the writes off.",
        "The loss over a sweep of eta, and of an untrained conv's size. A rise of more than 0.01 nats and "
        "its error (95 %) counts as harm.",
        "Start below it.",
        "The loss starts no higher than with the writes off.",
    ),
}
"""Every fault by the id that findings carry."""
