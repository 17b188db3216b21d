"""`vit_jax.main:run`, the entry point of earlier installs; the commands are in `commands/`."""

from vit_jax.commands.main import run

__all__ = ["run"]
