"""Locks the test environment: the installed versions of all that the extra `test` asks for, and of what that
needs, become `tests/constraints.txt`, by which `bash tests/run.sh` installs.

    rm -r .venv tests/constraints.txt && bash tests/run.sh      the newest releases that setup.py allows
    .venv/bin/python tools/lock.py                              once the tests pass: locks them

Only Python 3.11 is locked. Later ones have another JAX (docs/design.md), and show what newer releases break.
"""

import importlib.metadata
import pathlib
import platform
import re
import runpy

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "constraints.txt"
MARKER = 'python_version < "3.12"'
# `tests/run.sh` installs them without what they ask for.
ALONE = ("timm", "lightly", "lightly-utils")
# What PyTorch's wheels for GPUs bring, and those for CPUs do not.
_FOR_GPUS = re.compile(r"(nvidia|cuda|triton)\b")


def asked(python: str = platform.python_version()) -> list[Requirement]:
    """What setup.py asks for, with its extra `test`, on this platform and a version of Python."""
    given, setup = {}, setuptools.setup
    setuptools.setup = given.update
    try:
        runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = setup
    lines = (*given["install_requires"], *given["extras_require"]["test"])
    on = {"python_version": ".".join(python.split(".")[:2])}
    return [requirement for line in lines if _applies(requirement := Requirement(line), **on)]


def installed() -> dict[str, str]:
    """The versions of all packages that are asked for, directly or by another one, by canonical name.

    Raises:
      importlib.metadata.PackageNotFoundError: one is not installed.
    """
    versions = {name: importlib.metadata.version(name) for name in ALONE}
    waiting, seen = asked(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen or _FOR_GPUS.match(name):
                continue
            seen.add((name, extra))
            distribution = importlib.metadata.distribution(name)
            versions[name] = distribution.version.partition("+")[0]  # '+cpu' is on one index only
            further = map(Requirement, distribution.requires or ())
            waiting += [r for r in further if _applies(r, extra=extra)]
    return dict(sorted(versions.items()))


def locked() -> dict[str, str]:
    """The versions in `tests/constraints.txt` for this Python, by canonical name."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    requirements = filter(_applies, map(Requirement, lines))
    return {r.name: str(r.specifier).removeprefix("==") for r in requirements}


def _applies(requirement: Requirement, **environment: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""} | environment)


def main() -> None:
    head = "# Made by tools/lock.py: the versions with which the tests have passed.\n"
    lines = [f"{name}=={version}; {MARKER}\n" for name, version in installed().items()]
    FILE.write_text(head + "".join(lines))
    print(f"{FILE}: {len(lines)} packages")


if __name__ == "__main__":
    main()
