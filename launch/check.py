"""Checks the flags of the scripts in this folder, by the table of TPUs that `vit_jax plan` has; they
call it. Standard library only.

  python launch/check.py jobset --name=b16 --topology=v5e:8x8 --chips=4 --slices=2

prints what the script needs to know, on one line; or, in one sentence, what is wrong, and exits with
2. An empty value is one that the user did not set.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips

MAX_LABEL = 63  # characters of a name in DNS
COUNTS = {  # flag: the smallest value
    "slices": 1, "chips": 1, "max_restarts": 0, "grace": 0, "worker": 0, "slice": 0, "every": 0,
    "max_attempts": 1,
}  # fmt: skip
# google.com/tpu of a node: 1 for a single chip, 8 for v5e and v6e on one host, else 4.
CHIPS_OF_HOST = {"1x1": (1,), "2x4": (4, 8)}
SPOT_GRACE = 15


def main() -> None:
    script, *arguments = sys.argv[1:]
    try:
        flags = dict(argument[2:].split("=", 1) for argument in arguments)
        _check_counts(flags)
        print({"jobset": jobset, "tpu_vm": tpu_vm, "xpk": xpk}[script](flags))
    except ConfigError as error:
        sys.exit(_say(f"{script}.sh: {error}"))


def jobset(flags: dict[str, str]) -> str:
    """The accelerator as GKE calls it, the shape of a slice, and its hosts."""
    tpu, shape = chips.check_slice(flags["topology"])
    chips_of_host = int(flags["chips"])
    known = CHIPS_OF_HOST.get(shape, (4,))
    if chips_of_host not in known:
        options = " or ".join(f"--chips={count}" for count in known)
        raise ConfigError(
            f"--chips={chips_of_host}: not a number of chips that hosts of {flags['topology']} have; set "
            f"{options}"
        )
    hosts = chips.count_chips(shape) // chips_of_host
    # The longest name that is made of it, with the five random characters of a pod.
    pod = f"-slice-{int(flags['slices']) - 1}-{hosts - 1}-xxxxx"
    _check_label("name", flags["name"], MAX_LABEL - len(pod))
    for name in ("queue", "service_account"):
        if flags[name]:
            _check_label(name, flags[name], MAX_LABEL)
    _check_bucket(flags["bucket"])
    if flags["spot"] and int(flags["grace"]) > SPOT_GRACE:
        _say(
            f"jobset.sh: --grace={flags['grace']} holds when the JobSet is deleted. When GKE takes spot "
            f"nodes away it gives pods {SPOT_GRACE} s, or what their node pool is configured for, up "
            "to 120 s: what is not saved by then continues from the last checkpoint"
        )
    return f"{tpu.gke} {shape} {hosts}"


def tpu_vm(flags: dict[str, str]) -> str:
    """The software version of the VM."""
    slices, chosen = int(flags["slices"]), int(flags["slice"])
    _check_label("name", flags["name"], MAX_LABEL - (len(f"-{slices - 1}") if slices > 1 else 0))
    if chosen >= slices:
        raise ConfigError(f"--slice={chosen}: there are {slices}, which count from 0")
    if flags["bucket"]:
        _check_bucket(flags["bucket"])
    if not flags["type"]:
        return flags["version"]
    return flags["version"] or chips.check_vm_type(flags["type"]).vm_runtime


def xpk(flags: dict[str, str]) -> str:
    """Nothing that the script would have to know."""
    # xpk itself refuses longer names.
    _check_label("name", flags["name"], 40)
    if not flags["type"].startswith("tpu7x-"):
        chips.check_vm_type(flags["type"])
    return ""


def _check_counts(flags: dict[str, str]) -> None:
    for name in COUNTS.keys() & flags.keys():
        if not re.fullmatch(r"\d{1,9}", flags[name]) or int(flags[name]) < COUNTS[name]:
            raise ConfigError(
                f"--{name}={flags[name]}: must be a whole number, {COUNTS[name]} or more"
            )


def _check_label(flag: str, value: str, longest: int) -> None:
    """That a name can be one in DNS, where a letter comes first (RFC 1035), as JobSet wants it."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", value):
        raise ConfigError(
            f"--{flag}={value}: must be lower-case letters, digits and '-', a letter first, e.g. b-16"
        )
    if len(value) > longest:
        raise ConfigError(
            f"--{flag}={value}: has {len(value)} characters, must have {longest} or less"
        )


def _check_bucket(value: str) -> None:
    if not re.fullmatch(r"[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9]", value):
        raise ConfigError(f"--bucket={value}: must be the name of a bucket alone, without gs://")


def _say(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
