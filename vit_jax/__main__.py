"""`python -m vit_jax`."""

from vit_jax.main import run

if __name__ == "__main__":
    run()
