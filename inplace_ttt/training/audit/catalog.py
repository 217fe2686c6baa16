"""The items of a training recipe (paper Tables 4 to 8, appendix C.1 and C.2)."""

from ...audit.item import Item
from . import probes

RECIPE: tuple[Item, ...] = (
    Item(
        "trained-parameters", "Every parameter is trained", "§4.1",
        "Base and TTT model go through the same curriculum; the paper names no frozen parameter.", "medium",
        "All parameters.",
        "A frozen base cannot adapt to writes, and the comparison with the baseline changes.",
        "Set trainable: all, or declare the trained part.",
        probes.trained_parameters, choice=True,
    ),
    Item(
        "learning-rate", "Learning rate", "Tables 6, 7; from scratch Tables 4, 5, 8",
        "5e-6 for continual training; from scratch 5e-4 (500M) or 3e-4 (1.5B, 1.7B, 4B). One rate.", "high",
        "5e-6.",
        "From zero, 5000 steps at 5e-6 move an entry of conv by 0.0125 at most. Choose rate, start and η "
            "together.",
        "Set this rate, or declare another.",
        probes.learning_rate, expected={"paper": (5e-6, (3e-4, 5e-4)), "reference": (5e-6, (5e-6,))},
    ),
    Item(
        "training-loss", "Loss of training", "§4.1, Tables 4 to 8",
        "Next-token prediction; the paper names no other loss.", "medium",
        "Cross-entropy of the next token.",
        "Soft targets of another reading of the same text are an extension, and gains may come from them.",
        "Leave training.distillation out.",
        probes.training_loss,
    ),
    Item(
        "weight-decay", "Weight decay", "Tables 4 to 8",
        "0.1. Whether conv and P decay is not stated.", "high", "0.1, on conv and P too.",
        "Decay pulls conv and P towards zero, where they write nothing.",
        "Set weight_decay: 0.1, or declare another.",
        probes.weight_decay, expected={"paper": 0.1, "reference": 0.1},
    ),
    Item(
        "schedule", "Learning-rate schedule and warm-up", "Tables 4 to 8",
        "Not stated for continual training; from scratch 1024 steps or 1.6B tokens of warm-up.", "high",
        "Cosine, warm-up 2 %.",
        "The first Adam steps move a zero convolution by a large part of its later norm.",
        "State it with every result.",
        probes.schedule, choice=True,
    ),
    Item(
        "optimizer", "Optimizer and gradient clipping", "Tables 4 to 8",
        "AdamW; its betas are not stated. Gradient clipping 1.0 from scratch, not stated for continual "
            "training.",
        "high",
        "AdamW (0.9, 0.95), clipping 1.0.",
        "They determine the size of the first steps of conv and P.",
        "State them with every result.",
        probes.optimizer, choice=True,
    ),
    Item(
        "token-budget", "Tokens of training", "Tables 4-8",
        "About 20B in stage 1 (32k), about 15B in stage 2 (128k); from scratch 20B (500M), 60B (1.5B), "
            "120B (1.7B, 4B).",
        "high",
        "5000 steps of 64 rows of 65,536: 21B if every row is full.",
        "A short run shows that training works; it does not reproduce the paper's quality.",
        "Train on as many tokens, or declare the budget.",
        probes.token_budget,
        expected={
            "paper": {32768: (20e9,), 131072: (15e9,), "scratch": (20e9, 60e9, 120e9)},
            "reference": {65536: (21e9,)},
        },
    ),
    Item(
        "stages", "Length of the training rows", "Tables 6, 7",
        "32,768 tokens; for Qwen3-4B then 131,072.", "high", "65,536 in one stage.",
        "The length of a row limits the chunks of a document, and so the distance from a write to its reads.",
        "Set sequence_length: 32768, then 131072, or declare another.",
        probes.stages, expected={"paper": (32768, 131072), "reference": (65536,)},
    ),
    Item(
        "yarn", "RoPE extension", "Tables 6, 7",
        "None in stage 1; YaRN in stage 2 (its factor is not stated, 4 is implied).", "high",
        "None in any config.",
        "An extended RoPE changes the base at all lengths, so gains may not come from the writes.",
        "Set the stage's rope_parameters, or declare others.",
        probes.yarn, expected={"paper": 131072, "reference": None},
    ),
    Item(
        "long-documents", "Tokens in documents longer than a chunk", "Appendix C.1",
        "A short part like the pre-training mix and a long part; the shares are not stated.", "high",
        "Not stated.",
        "Only these tokens train conv and P. Without them the two get no gradient.",
        "Use longer documents or smaller chunks.",
        probes.long_documents,
    ),
    Item(
        "data-rows", "Rows match their documents", "§3.4, appendix C.1",
        "Packed documents are separate: the fast weight is reset at each border. Every token but a "
            "document's first is a target.",
        "high", "The same, by cu_seqlens.",
        "With wrong positions or labels, training solves another task, and its loss looks plausible.",
        "Look at position_ids and labels of these rows; `build_data` makes both correctly.",
        probes.data_rows,
    ),
)  # fmt: skip
