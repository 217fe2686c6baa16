"""The target generator V = Conv(X) P, and the start of a converted model (paper §3.2, appendix C.3)."""

from ..item import Item
from ..probes import model, start, state, target

TARGET: tuple[Item, ...] = (
    Item(
        "target-source", "The target is made from token embeddings", "§3.2, Figure 1, Algorithm 1 line 6",
        "X₀, the token embeddings, the same tensor for every TTT layer.", "high",
        "By default the layer's own MLP input (hidden states); embeddings are an option.",
        "The choice decides which content is remembered; the published runs' choice is unknown.",
        "target=\"embeddings\", or declare the other.",
        None, model.target_source,
        expected={"paper": "embeddings", "reference": "hidden_states", "ttt_ntp": "hidden_states"},
    ),
    Item(
        "conv-depthwise", "The convolution is depthwise", "Appendix C.3",
        "Each channel has its own kernel: 5 d weights.", "high", "The same.",
        "A dense kernel has d times the parameters and does the work of P.",
        "One group per channel.",
        target.conv_depthwise,
    ),
    Item(
        "conv-size", "The kernel has 5 taps", "Tables 6 and 7",
        "Conv size 5.", "high", "The same.",
        "It sets how far the target looks ahead: two tokens.",
        "kernel_size=5, or declare another.",
        target.conv_size, expected={"paper": 5, "reference": 5, "ttt_ntp": 5},
    ),
    Item(
        "conv-bias", "The convolution is bias-free", "Appendix C.3",
        "Bias-free.", "high", "The same.",
        "A bias writes the same constant for every text: a drift without memory.",
        "Leave the bias out.",
        target.conv_bias,
    ),
    Item(
        "conv-lookahead", "The target holds future tokens", "§3.2; end of §3.3",
        "The target is to contain the text after the token; a next-token target is one tap on t+1.", "medium",
        "Symmetric padding of 2: taps t−2 to t+2.",
        "Theorem 1 needs the next token in the target. \"Causal padding\" read as left padding removes it.",
        "Pad both sides inside the chunk (conv=\"lookahead\").",
        target.conv_lookahead,
    ),
    Item(
        "conv-isolation", "The convolution ends at the chunk's edges", "§3.4, Algorithm 1 line 6",
        "Padding such that a chunk's delta uses nothing outside the chunk.", "medium",
        "Each chunk is padded with zeros on its own.",
        "A tap over the edge makes a chunk's write depend on the next one: not causal, and not splittable.",
        "Pad each chunk with zeros.",
        target.conv_isolation,
    ),
    Item(
        "conv-before-projection", "Convolution first, then P", "§3.2",
        "V̂ = Conv1D(X₀) W_target.", "high", "The same.",
        "The other order is another map, and checkpoints do not carry over.",
        "Convolve the source, then project.",
        target.conv_before_projection,
    ),
    Item(
        "projection-untransposed", "P multiplies from the right, untransposed", "§3.2, Algorithm 1 line 6",
        "V̂ = (…) W_target.", "high",
        "The weight of `ttt_proj` is used as stored, unlike an ordinary linear layer.",
        "Loading a checkpoint into the transposed form changes every write without an error.",
        "Multiply by the stored matrix, not by its transpose.",
        target.projection_untransposed,
    ),
    Item(
        "target-gradient", "Gradient from the target into its source", "—",
        "Not stated.", "high", "It flows.",
        "With embeddings as source, the writes train the embedding table too.",
        "detach_target chooses.",
        state.target_gradient,
    ),
    Item(
        "start-conv", "The convolution starts at zero", "Appendix C.3, Initialization",
        "Zero.", "high",
        "Zero in training; one inference class leaves it random where keys are missing.",
        "A random convolution writes noise into a pretrained model from the first step.",
        "Convert again with this package, or set conv to zero.",
        None, start.start_conv,
    ),
    Item(
        "start-projection", "P starts diagonal, N(0, σ²)", "Appendix C.3, Initialization",
        "Off the diagonal 0, on it N(0, σ²) with the model's initializer range.", "high",
        "The same; under sharded training, the same values in every layer.",
        "P = 0 beside conv = 0 gets no gradient at all; a dense P mixes channels from the start.",
        "Convert again with this package.",
        None, start.start_projection,
    ),
    Item(
        "start-identity", "A converted model starts as its base", "Appendix C.3",
        "ΔW = 0 at step 0, so the model computes the same as before.", "high", "The same.",
        "Otherwise the comparison with the base starts with a handicap or a gift.",
        "Start conv at zero and leave every other weight alone.",
        None, start.start_identity,
    ),
)  # fmt: skip
