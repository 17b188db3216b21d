"""The TPU runtime on machines without a TPU. It is installed there too: `vit_jax plan` compiles with
it.
"""

import glob
import os

# Where it would otherwise ask for a machine that it runs on, in vain and aloud, and for nobody else
# who uses it.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# How drivers show TPUs: v2 to v4 and v5p, and v5e and later.
_TPU_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def hush() -> None:
    """Keeps it from printing errors when JAX looks for TPUs where there are none; before JAX does."""
    if not any(glob.glob(devices) for devices in _TPU_DEVICES):
        expect_no_tpu()


def expect_no_tpu() -> None:
    """Tells it that there is no TPU, by environment variables; those that are set stay."""
    for variable, value in _NO_TPU.items():
        os.environ.setdefault(variable, value)
