"""The exceptions that tell a user what is wrong, where, and what to do."""


class InPlaceTTTError(ValueError):
    """Bad input or an impossible request; the message is one sentence a user can act on."""

    exit_code = 2


class NotSoError(InPlaceTTTError):
    """What was to be proved does not hold."""

    exit_code = 1


def one_line(error: BaseException) -> str:
    """The first line of an error of somebody else's."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
