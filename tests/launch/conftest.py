"""What whole runs under a launcher share with those in `tests/integration`."""

from tests.integration.conftest import compilation_cache  # noqa: F401
