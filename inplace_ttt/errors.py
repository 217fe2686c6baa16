"""The one exception that tells a user what is wrong, where, and what to do."""


class InPlaceTTTError(ValueError):
    """Bad input or an impossible request; the message is one sentence a user can act on."""
