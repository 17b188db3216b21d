"""Building the compiled part: where it cannot be, with every compiler that is there, and with
sanitizers.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.data.damage import damaged, whole_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = ROOT / "vit_jax" / "data" / "native"
FLAGS = ["-ffp-contract=off", "-Wno-psabi", "-Wall", "-Werror"]  # of setup.py, and no warnings
COMPILERS = [
    "gcc",
    *(f"gcc-{n}" for n in range(9, 16)),
    "clang",
    *(f"clang-{n}" for n in range(9, 21)),
]
EMULATED = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


def test_an_install_without_a_c_compiler_goes_on_and_says_what_is_lost(tmp_path):
    build = [sys.executable, "setup.py", "--quiet", "build_ext", f"--build-lib={tmp_path}"]
    done = subprocess.run(
        [*build, f"--build-temp={tmp_path}"], cwd=ROOT, env=os.environ | {"CC": "/bin/false"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and not list(tmp_path.rglob("*.so"))
    assert "WARNING: the compiled JPEG decoder was not built: " in done.stderr
    assert "40 % of the speed" in done.stderr and "apt-get install gcc" in done.stderr


def driver(compiler, folder, *flags):
    """Compiles `native_driver.c`: a program that cuts parts out of files."""
    program = folder / f"driver-{compiler}"
    sources = [path for path in sorted(NATIVE.glob("*.c")) if path.name != "module.c"]
    command = [
        compiler,
        *FLAGS,
        *flags,
        f"-I{NATIVE}",
        ROOT / "tests/data/native_driver.c",
        *sources,
    ]
    subprocess.run([*command, "-lm", "-o", program], check=True, timeout=300)
    return program


def files(folder, count):
    """Files of all kinds, whole and damaged, in a folder."""
    random, paths = np.random.default_rng(0), []
    for kind, whole in whole_files().items():
        for i, file in enumerate([whole, *damaged(whole, count, random)]):
            paths.append(folder / f"{kind.replace(' ', '_')}-{i}")
            paths[-1].write_bytes(file)
    return paths


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_compiler_and_processor_gives_the_same_bits(tmp_path):
    """Of those that are there: GCC 9 and later, Clang, and for ARM in an emulator."""
    paths = files(tmp_path, 20)
    found = {
        compiler: output(driver(compiler, tmp_path, "-O3"), *paths)
        for compiler in COMPILERS
        if shutil.which(compiler)
    }
    if all(map(shutil.which, EMULATED)):
        program = driver(EMULATED[0], tmp_path, "-O3", "-static")
        found["ARM"] = output(EMULATED[1], program, *paths)
    if not found:
        pytest.skip("there is no C compiler")
    print("compared:", *found)
    first = next(iter(found.values()))
    assert first.count("\n") == len(paths) and "32 " in first
    assert [name for name, text in found.items() if text != first] == []


@pytest.mark.slow
def test_sanitizers_find_nothing_in_what_damaged_files_do(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no GCC")
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = driver("gcc", tmp_path, *flags)
    paths = files(tmp_path, 600)
    for first in range(0, len(paths), 1000):
        output(program, *paths[first : first + 1000])
