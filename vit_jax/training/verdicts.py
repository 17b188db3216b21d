"""The decisions about a run that an action can raise: the run ends, or goes back to its last checkpoint. All processes
of a run have to agree on a decision first, since all have to follow it.
"""

from vit_jax.base.errors import UserError


class EndRun(Exception):
    """The run is complete before its last step; the message says why, and is kept with the checkpoint."""


class Restore(UserError):
    """The state must not be trained on. The run goes back to its last checkpoint and continues from there."""
