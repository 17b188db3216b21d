"""Shared by all tests: eight simulated CPU devices, compiled programs, and where the real data is."""

import gc
import importlib.metadata
import os
import pathlib
import signal
import sys
import tempfile

# Before JAX is imported: meshes are tested on simulated devices.
# A tenth of the time to compile; these programs run for milliseconds.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib").startswith(
    "0.10."
):  # 0.12 ends at a flag that it does not know
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {QUICK}")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# All processes of these tests, and those that they start, compile the same small programs again and again: the
# first keeps them for the others.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory(prefix="vit_jax_", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS.name
# PyTorch's threads wait for each other by counting, on cores that other tests could use.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nor does each of them parse every file again, as it would in images that keep Python from writing bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tracing makes many objects that live: to look through them after each 700 took 4.3 of 58 s.
gc.set_threshold(50_000, 20, 100)

import pytest  # noqa: E402

pytest_plugins = [
    "tests.services.buckets",
    "tests.services.launching",
    "tests.services.runs",
    "tests.services.stopping",
    "tests.lowering_contexts",
    "tests.skips",
    "tests.processor_time",
]

# Files of few tests that take long, and of processes that wait for each other: begun first, lest one process of the
# tests is still at them when all others are done.
FIRST = ("tests/integration/", "tests/launch/", "tests/planning/", "tests/test_")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish():
    gc.freeze()  # modules and items stay: no need to look through them again


def pytest_sessionfinish():
    # Nor do pytest and Python at their end, through all that tests have made: after five seconds of that, execnet has a
    # process of the tests interrupt itself, by a KeyboardInterrupt wherever it is.
    gc.freeze()


# Few other tests run their programs: to write one takes 8 ms or more, a fourteenth of the time to compile it. Training
# steps, which take longest, do come again: a tenth of the time that all their programs compile.
ALONE = tuple(
    f"tests/{folder}/"
    for folder in ("compute", "data", "evaluation", "export", "inspection", "interchange", "models", "objectives",
                   "optim", "training")
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    alone = item.nodeid.startswith(ALONE) and "compilation_cache" not in item.fixturenames
    if jax := sys.modules.get("jax"):
        least = 0.4 if alone else float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real images and official checkpoints beside the project; skips where it is
    absent.
    """
    path = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real data at {path}")
    return path


@pytest.fixture(scope="session")
def compilation_cache() -> str:
    """The folder of all compiled programs of these tests."""
    return os.environ["JAX_COMPILATION_CACHE_DIR"]


@pytest.fixture
def command(monkeypatch, capfd):
    """`command(*arguments)`: runs vit_jax in this process: (exit code, standard output, standard
    error).
    """
    from absl import flags

    from vit_jax.commands.main import run

    def call(*arguments):
        before, on_interrupt = set(flags.FLAGS), signal.getsignal(signal.SIGINT)
        monkeypatch.setattr(sys, "argv", ["vit_jax", *map(str, arguments)])
        code = 0
        try:
            run()
        except SystemExit as exit:
            code = exit.code or 0
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
            # What this command defined must not be there for the next one.
            for name in set(flags.FLAGS) - before:
                if name.split(".")[0] == "config" or flags.FLAGS.find_module_defining_flag(
                    name
                ).startswith("vit_jax."):
                    delattr(flags.FLAGS, name)
        return code, *capfd.readouterr()

    return call
