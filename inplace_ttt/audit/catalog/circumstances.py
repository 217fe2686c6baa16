"""Items on the circumstances in which the model must compute its rule.

The other items look for one fault each. The items here detect any fault.
"""

from ..item import Item
from ..probes import circumstances, through_files, training
from .clip import CLIP
from .groups import PIECES
from .rule import RULE
from .sequence import SEQUENCE
from .target import TARGET

_OF_SETTINGS = (
    "chunk-size",
    "eta",
    "target-source",
    "clip-training",
    "clip-effect",
    "start-conv",
    "start-projection",
    "start-identity",
)
"""Items that can deviate because of a setting although the model follows its declared rule."""
_OF_THE_RULE = tuple(item.id for item in (*RULE, *TARGET, *CLIP, *SEQUENCE) if item.id not in _OF_SETTINGS)

CIRCUMSTANCES: tuple[Item, ...] = (
    Item(
        "declared-rule", "A reading follows the declared rule", "Algorithm 1",
        "O_[i] = Z_[i] (W⁽⁰⁾ + η Σ_{j<i} V_[j]ᵀ Z_[j])ᵀ with V = Conv1D(X) W_target.", "high",
        "The same, in its own settings.",
        "The other items look for known faults; this one compares every output with the definition.",
        "Compare the layer with ops/reference.py, chunk by chunk.",
        None, circumstances.declared_rule, named_by=_OF_THE_RULE,
    ),
    Item(
        "in-training", "Training computes the same rule", "§3.4, Algorithm 1",
        "One rule, whose parallel form is trained and whose sequential form is used.", "high", "The same.",
        "A rule that differs in training alone trains for something that is never used, "
            "and every test in evaluation passes.",
        "Compare outputs in training mode with those of ops/reference.py.",
        circumstances.layer_in_training, training.in_training,
    ),
    Item(
        "in-pieces", "A text in pieces follows the declared rule", "§3.4",
        "The parallel form is identical to the sequential loop.", "high", "The same, up to bf16 rounding.",
        "A model's answer must not depend on the pieces in which its prompt is read.",
        "Read pieces that end anywhere, and single tokens over a chunk's edge.",
        None, circumstances.in_pieces, named_by=("rows", *PIECES),
    ),
    Item(
        "in-batches", "Rows of unequal length each compute the same as alone", "—",
        "Not stated; a row must not depend on the batch it is in.", "medium",
        "Padding is written; inference computes row 0 only.",
        "A state that is missing in later rows, or shifted by padding, shows in no test of one row.",
        "Read batches of unequal rows, padded on either side, with and without a cache.",
        None, circumstances.in_batches, named_by=("padding", "rows", "in-pieces", *PIECES), absent=True,
    ),
    Item(
        "over-many-chunks", "The sixteenth chunk is read as the second, and larger chunks too",
        "§3.4, Algorithm 1",
        "The sum runs over all chunks before, from the start of the document.", "high", "The same.",
        "The method is for long texts, and short tests do not read them.",
        "Read sixteen chunks, and chunks of another length.",
        circumstances.layer_over_many_chunks, circumstances.over_many_chunks,
        named_by=("document-reset", "document-grid", "plain-sum", "state-precision", "context-parallel",
            "in-pieces", *PIECES),
    ),
    Item(
        "ways-of-calling", "Every way of calling the model computes the same rule", "—",
        "Not stated; the rule does not depend on how tokens are handed over.", "medium",
        "Only generate and plain calls are provided for.",
        "Users generate and read on, copy caches, drop attention, autocast, "
            "and pass embeddings or lengths of documents.",
        "Make the call that is named, and compare each layer with ops/reference.py.",
        None, circumstances.called_otherwise, absent=True,
        named_by=("rows", "padding", "document-reset", "document-grid", "take-back", "in-pieces",
            "in-batches", *PIECES),
    ),
    Item(
        "drawn-sizes", "Many rows, chunks and documents, large chunks and long texts follow it too",
        "§3.4, Algorithm 1",
        "The rule is the same at every size.", "high", "The same.",
        "A border in the code lies at some size, and fixed tests stay on one side of it.",
        "Read with the sizes that are named; `--seed` draws others.",
        None, circumstances.at_drawn_sizes, absent=True,
        named_by=("rows", "padding", "document-reset", "document-grid", "in-pieces", "in-batches",
            "over-many-chunks", *PIECES),
    ),
    Item(
        "precisions", "The rule holds in every precision", "—",
        "Not stated.", "medium", "bf16 throughout.",
        "A path that only half precision takes is the one that runs on a GPU.",
        "Compare each precision with float64.",
        None, circumstances.precisions, named_by=("state-precision",),
    ),
    Item(
        "through-a-file", "A checkpoint comes back as it was written", "—",
        "Not stated.", "medium", "Checkpoints do; nothing else is saved.",
        "A loss in a file shows only in another process, days later.",
        "Save, load, and compare every tensor and every output.",
        None, through_files.through_a_file, absent=True,
        named_by=("in-pieces", *PIECES, "slow-weights", "state-place", "state-precision"),
    ),
)  # fmt: skip
