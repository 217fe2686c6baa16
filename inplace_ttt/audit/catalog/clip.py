"""The clip of a chunk's delta (paper appendix C.2, "Clipping")."""

from ..item import Item
from ..probes import clip

CLIP: tuple[Item, ...] = (
    Item(
        "clip-training", "Deltas are not clipped in training", "Appendix C.2, Clipping",
        "The clip belongs to inference.", "high", "No clip at all.",
        "At τ = 1e-5 it takes nearly all gradient away; a port blamed that on its initialization.",
        "UpdateClip(mode=\"inference\"), or declare it.",
        clip.clip_training, own_clip=True, choice=True,
    ),
    Item(
        "clip-inference", "A chunk's delta is clipped at inference", "Appendix C.2, Clipping",
        "In the Qwen3-4B evaluations, ‖ΔW⁽ⁱ⁾‖_F ≤ τ = 1e-5, for each chunk and layer, without η.", "medium",
        "No clip.",
        "A clip bounds the damage that one chunk can do.",
        "State the clip with every result.",
        clip.clip_inference, absent=True, own_clip=True, choice=True,
    ),
    Item(
        "clip-scope", "The clip bounds each chunk's delta, not their sum", "Appendix C.2, Clipping",
        "ΔW⁽ⁱ⁾ of one chunk is rescaled before it is applied; the accumulated change is not bounded.", "high",
        "No clip.",
        "A bound on the sum stops the state from growing with the text.",
        "Clip the delta, then add it.",
        clip.clip_scope, absent=True, own_clip=True,
    ),
    Item(
        "clip-effect", "The clip leaves the writes an effect", "§1, §4; Appendix C.2",
        "The model is to adapt at test time. (Taken literally, "
            "the paper's own τ = 1e-5 on a whole matrix prevents it.)",
        "medium",
        "No clip.",
        "Below the precision of the weight, TTT on and TTT off are the same model, "
            "and a benchmark measures the slow weights.",
        "Use a bound relative to ‖W0‖, and compare TTT on with off on the same weights.",
        clip.clip_effect, absent=True, own_clip=True,
    ),
)  # fmt: skip
