"""Ids of items that name what is wrong in one circumstance, for those that only see that something is
(`Item.named_by`)."""

PIECES = (
    "chunked-prefill",
    "token-by-token",
    "streaming-target",
    "stream-reset",
    "open-chunk",
    "generated-tokens",
    "apply-then-update",
)
