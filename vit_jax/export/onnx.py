"""A trained model as ONNX, for onnxruntime and others."""

import contextlib
import functools
import json
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.base import outputs, places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.install import pip_install
from vit_jax.compute import choices
from vit_jax.export.precision import FLOAT16, is_large, rounded_to_int8
from vit_jax.models.registry import Weights

SUFFIX = ".onnx"
PRODUCER = "vit_jax"  # of the files that are written here
_MOST_BYTES = 2**31 - 2**20  # what one file of protocol buffers holds
_IR_VERSION = 10  # of onnxruntime 1.18 and newer


def how(names: Sequence[str]) -> str:
    """The line of Python that calls a file with outputs of these names."""
    load = "import onnxruntime; model = onnxruntime.InferenceSession(FILE)"
    call = "model.run(None, {'images': images})"
    if len(names) == 1:
        return f"{load}; answers = {call}[0]"
    return f"{load}; {', '.join(names)} = {call}"


def check_installed() -> None:
    """Raises `ConfigError` if what it needs is not installed."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"export --to=onnx needs onnx: {pip_install('onnx')}") from error


def write(
    path: pathlib.Path,
    answer: Callable[[Weights, jax.Array], jax.Array],
    weights: Weights,
    images: jax.ShapeDtypeStruct,
    description: dict[str, Any],
    precision: str,
) -> dict[str, Any]:
    """Writes `answer` with its weights; see `run.export`. The description is in the file's metadata, as JSON.

    Returns:
      The description.

    Raises:
      ConfigError: the model computes what has no rule, or is too large.
    """
    from onnx import checker, helper

    from vit_jax.export import onnx_graph, onnx_rules

    graph = onnx_graph.build(
        onnx_rules.RULES,
        functools.partial(answer, weights),
        images,
        list(description["outputs"]),
        functools.partial(_stored, precision),
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", onnx_graph.OPSET)], ir_version=_IR_VERSION,
        producer_name=PRODUCER,
    )  # fmt: skip
    helper.set_model_props(model, {name: json.dumps(value) for name, value in description.items()})
    if (size := model.ByteSize()) > _MOST_BYTES:
        raise ConfigError(
            f"the model takes {size / 2**30:.1f} GiB, and an ONNX file holds 2: set --weights=bfloat16 or int8"
        )
    checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return description


def load_description(path: pathlib.Path) -> dict[str, Any]:
    """The description that `write` has stored; {} of a file of another program.

    Raises:
      ConfigError: onnx is not installed.
      CheckpointError: the file is damaged.
    """
    check_installed()
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with places.open_bytes(path) as file:
            model = onnx.load(file, load_external_data=False)
    except DecodeError as error:
        raise CheckpointError(f"{path} is damaged, or no ONNX file: {error}") from error
    if model.producer_name != PRODUCER:
        return {}
    return {entry.key: json.loads(entry.value) for entry in model.metadata_props}


def load_outputs(path: pathlib.Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    """The program of a file: images to all its outputs. Raises `ConfigError` without onnxruntime."""
    onnxruntime = _import_onnxruntime()
    options = onnxruntime.SessionOptions()
    # Threads that wait would take the cores from the processes that decode.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (images,) = session.get_inputs()
    return lambda x: session.run(None, {images.name: x})


def _import_onnxruntime() -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"to run an ONNX file needs onnxruntime: {pip_install('onnx')}"
        ) from error
    return onnxruntime


def with_int8_products(path: pathlib.Path) -> pathlib.Path:
    """The file, beside `path`, whose products of matrices are of int8: weights are rounded once, a scale for each
    column, and activations as they come (onnxruntime's dynamic quantization). Made if it is not there. Raises
    `ConfigError` without onnxruntime.
    """
    _import_onnxruntime()
    target = path.with_stem(f"{path.stem}_int8")
    if target.exists():
        return target
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Instructions before VNNI add two products in 16 bits, in which only numbers of seven bits have room.
    has_vnni = {"avx512_vnni", "avx_vnni"} & choices.cpu_instructions()
    with outputs.writing(epath.Path(target)) as partial, _without_advice():
        quantize_dynamic(
            path, partial, op_types_to_quantize=["MatMul"], per_channel=True, reduce_range=not has_vnni,
            weight_type=QuantType.QInt8,
        )  # fmt: skip
    return target


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """onnxruntime warns that another tool of its own could prepare the model, which changes nothing here."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _stored(precision: str, name: str, array: np.ndarray) -> tuple[dict, list]:
    """What the file has of a constant, and the nodes that make float32 of it; see `onnx_graph.build`."""
    from onnx import TensorProto, helper, numpy_helper

    def tensor(array: np.ndarray, ending: str = "") -> dict:
        return {name + ending: numpy_helper.from_array(array, name + ending)}

    if precision in ("float32", FLOAT16) or not is_large(
        array
    ):  # kernels of a float16 program come as float16
        return tensor(array), []
    if precision == "bfloat16":
        half = tensor(array.astype(jnp.bfloat16), "_bfloat16")
        return half, [helper.make_node("Cast", list(half), [name], to=TensorProto.FLOAT)]
    axis = 0 if array.ndim == 4 else array.ndim - 1  # what kernels and matrices give
    numbers, scale = rounded_to_int8(array, {axis})
    stored = tensor(numbers, "_int8") | tensor(scale.ravel(), "_scale")
    return stored, [helper.make_node("DequantizeLinear", list(stored), [name], axis=axis)]
