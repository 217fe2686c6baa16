"""Groups of ids for `Item.named_by`.

The items of a group can name a fault in one circumstance. Other items only detect that there is a fault.
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
