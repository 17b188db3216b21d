"""Errors that a user can cause. Their message is a sentence for the user: the problem, the field or file, and the
remedy. A stack trace would not help.
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
    """Problems, one per line; only the first hundred, because a file can have any number."""
    shown = problems[:_MOST_LINES]
    rest = len(problems) - _MOST_LINES
    if rest > 0:
        shown = [*shown, f"and {rest} more"]
    return "".join(f"\n  {line}" for line in shown)


def reason(error: BaseException) -> str:
    """The message of a library's error, shortened to one line: it may quote whole files."""
    text = " ".join(str(error)[:_MOST_REASON].split())
    return text or type(error).__name__
