"""The tiny ViT of the models' tests."""

from tests.models.conftest import kit  # noqa: F401
