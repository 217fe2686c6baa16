"""The exceptions that tell a user what is wrong, where, and what to do."""


class InPlaceTTTError(ValueError):
    """Bad input or an impossible request; the message is one sentence a user can act on."""

    exit_code = 2


class NotSoError(InPlaceTTTError):
    """What was to be proved does not hold."""

    exit_code = 1
