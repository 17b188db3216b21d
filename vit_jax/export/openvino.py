"""ONNX files computed by OpenVINO on CPUs."""

import pathlib
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np

from vit_jax.base import signal_stack
from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install

_HINTS = {"float32": "f32", "bfloat16": "bf16"}


def load_outputs(
    path: pathlib.Path, precision: str = "float32"
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """The program of a file: images to all its outputs.

    Raises:
      ConfigError: OpenVINO is not installed, or this CPU has no products in bfloat16.
    """
    core = _import_openvino().Core()
    if precision == "bfloat16" and "BF16" not in core.get_property(
        "CPU", "OPTIMIZATION_CAPABILITIES"
    ):
        raise ConfigError("--precision=bfloat16: this CPU has no products in bfloat16: set float32")
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": _HINTS[precision]}
    with signal_stack.restored():
        compiled = core.compile_model(path, "CPU", hints)
        request = compiled.create_infer_request()

    def answer(images: np.ndarray) -> list[np.ndarray]:
        with signal_stack.restored():
            arrays = request.infer({0: images})
        return [arrays[output].copy() for output in compiled.outputs]

    return answer


def _import_openvino() -> ModuleType:
    """OpenVINO without its converter of models, which would report the import to its makers, from a fork of the
    process, and take the log's handler away. OpenVINO does without it.
    """
    converter = "openvino.tools.ovc"
    absent = {} if converter in sys.modules else {converter: None}
    sys.modules.update(absent)  # pyrefly: ignore
    try:
        import openvino
    except ImportError as error:
        raise ConfigError(f"--engine=openvino needs OpenVINO: {pip_install('openvino')}") from error
    finally:
        for name in absent:
            del sys.modules[name]
    return openvino
