"""Shared by all tests: eight simulated CPU devices, and where the real data is."""

import os
import pathlib

# Before JAX is imported: meshes are tested on simulated devices.
# Half the time to compile; these programs run for milliseconds.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {QUICK}")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real images and official checkpoints beside the project; skips where it is
    absent.
    """
    path = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real data at {path}")
    return path
