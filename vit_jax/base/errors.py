"""Errors that a user can cause. Their message is a sentence for the user: what, where, what to do;
no stack trace helps.
"""


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
