"""The layers of a model, and settings beyond the paper (appendix C.3)."""

from ..item import Item
from ..probes import model

TTT_NTP = {
    "conv": "next",
    "proj_init": "shared_diagonal",
    "write_norm": "spectral",
    "preserve_row_norms": True,
}
"""Settings of the preset in forwards without a cache. The write at a prompt's end belongs to inference."""

LAYERS: tuple[Item, ...] = (
    Item(
        "layer-spacing", "Every sixth layer", "Appendix C.3",
        "TTT in every sixth layer of the continually trained models.", "high", "0, 6, 12, …",
        "The number of TTT layers is the size of the state (Figure 3a).",
        "layers=\"every:6\", or declare another choice.",
        None, model.layer_spacing, expected={"paper": 6, "reference": 6, "ttt_ntp": 6},
    ),
    Item(
        "layer-offset", "The first TTT layer", "Appendix C.3",
        "Not stated.", "high", "Layer 0.",
        "Late layers have colliding keys; which layers work is an open question.",
        "State the layers with every result.",
        None, model.layer_offset, expected={"reference": 0, "ttt_ntp": 0},
    ),
    Item(
        "layers-in-range", "Every layer that is named exists and writes", "Appendix C.3",
        "Layers of the model.", "high", "A number beyond the model is silently ignored.",
        "A run with fewer TTT layers than its config lists is reported under a wrong description.",
        "Correct the list.",
        None, model.layers_in_range, absent=True,
    ),
    Item(
        "every-layer", "Every TTT layer follows the same rule", "Algorithm 1",
        "One rule for all TTT layers.", "high", "The same.",
        "The other items look at the first TTT layer closely; this one compares the rest with it.",
        "Find the code that replaced the layer that differs.",
        None, model.every_layer,
    ),
    Item(
        "extensions", "Settings beyond the paper", "—",
        "None.", "high", "None.",
        "They may help, but results with them are not results of the paper's method.",
        "Name them with every result.",
        None, model.extensions, expected={"ttt_ntp": TTT_NTP},
    ),
)  # fmt: skip
