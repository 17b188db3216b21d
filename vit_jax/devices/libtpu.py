"""The TPU runtime on machines without a TPU. It is installed there too: `vit_jax plan` compiles with
it.
"""

import glob
import os

# Otherwise it would query the machine that it runs on, in vain and with errors, and refuse to be
# loaded by a second process.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# How drivers show TPUs: v2 to v4 and v5p, and v5e and later.
_TPU_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def silence_logs() -> None:
    """Keeps it from printing errors when JAX looks for TPUs where there are none; call it before
    that.
    """
    if not any(glob.glob(devices) for devices in _TPU_DEVICES):
        expect_no_tpu()


def expect_no_tpu() -> None:
    """Tells it by environment variables that there is no TPU; variables that are set stay."""
    for variable, value in _NO_TPU.items():
        os.environ.setdefault(variable, value)
