"""What accelerators can do, by the name that JAX gives them (`jax.Device.device_kind`)."""

# Dense bfloat16 peak in FLOP/s of one JAX device, as the vendors publish it:
# cloud.google.com/tpu/docs (one TensorCore of v2 and v3 is a device, so half a chip) and NVIDIA's
# data sheets, without sparsity.
PEAK_BFLOAT16 = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s; `None` for a device not known here, of which no
    MFU is told.
    """
    return PEAK_BFLOAT16.get(device_kind)
