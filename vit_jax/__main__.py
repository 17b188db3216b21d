"""`python -m vit_jax`."""

from vit_jax.commands.main import run

if __name__ == "__main__":
    run()
