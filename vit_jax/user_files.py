"""The name under which files of users import `register`; it is in `recipes/user_files.py`."""

from vit_jax.recipes.user_files import register

__all__ = ["register"]
