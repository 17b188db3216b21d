"""Errors that a user can cause. Their message is a sentence for the user: what, where, what to do;
no stack trace helps.
"""

_MOST_REASON = 200  # characters
_MOST_LINES = 100


class UserError(Exception):
    """Ends a command with its message and `exit_code`: 1 error, 2 wrong command line or config, 42
    start me again.
    """

    exit_code = 1


class ConfigError(UserError, ValueError):
    """The command line or the config is wrong. Raised before a device is touched or a file is
    written.
    """

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint cannot be found, read or written."""


def lines(problems: list[str]) -> str:
    """Problems, each on a line of its own, the first hundred of them: a file can have any number."""
    shown = problems[:_MOST_LINES]
    rest = len(problems) - _MOST_LINES
    if rest > 0:
        shown = [*shown, f"and {rest} more"]
    return "".join(f"\n  {line}" for line in shown)


def reason(error: BaseException) -> str:
    """What a library's error says, on a line and no longer than a sentence: it may quote whole files."""
    text = " ".join(str(error)[:_MOST_REASON].split())
    return text or type(error).__name__
