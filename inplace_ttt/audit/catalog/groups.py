"""Groups of ids for `Item.named_by`.

Their items name a fault in one circumstance. Other items only detect that there is one.
"""

PIECES = (
    "chunked-prefill",
    "token-by-token",
    "streaming-target",
    "stream-reset",
    "open-chunk",
    "generated-tokens",
    "apply-then-update",
)
