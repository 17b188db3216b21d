"""Exports that compute in float16, against float32 and against PyTorch's halves."""

import jax
import numpy as np
import onnx
import pytest
from PIL import Image

import vit_jax
from tests import lazily
from tests.export.test_onnx import network
from tests.interchange.test_probabilities import build, picture
from tests.repeats import slow_unless
from tests.serving import test_maps
from tests.serving.conftest import make_run
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.export import onnx as onnx_writer
from vit_jax.export import openvino
from vit_jax.export.onnx import load_outputs
from vit_jax.export.precision import FLOAT16_TOLERANCE
from vit_jax.export.run import export_run
from vit_jax.prediction.images import Named

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")


def stored(path) -> dict[str, int]:
    """Numbers by type of what a file stores."""
    counts = {}
    for tensor in onnx.load(path).graph.initializer:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        counts[name] = counts.get(name, 0) + int(np.prod(tensor.dims))
    return counts


@pytest.mark.parametrize("normalization", slow_unless(["inside"], ["inside", "beside"]))
def test_products_are_in_float16_and_answers_near_those_of_transformers(tmp_path, normalization):
    model = build(tmp_path / "model", "ViTForImageClassification")
    file = tmp_path / "m.onnx"
    options = {"outputs": ["logits", "features"], "normalization": normalization}
    vit_jax.load_run(tmp_path / "model").export(str(file), precision="float16", **options)
    images = np.stack([picture(seed) for seed in range(4)])
    pixels = np.float32(images) / 127.5 - 1
    with torch.no_grad():
        expected = model(pixel_values=torch.tensor(pixels).permute(0, 3, 1, 2)).logits.numpy()
    given = images if normalization == "inside" else pixels
    for load in (load_outputs, openvino.load_outputs):
        logits, features = load(file)(given)
        assert logits.dtype == features.dtype == np.float32
        difference = np.abs(logits - expected).max() / np.abs(expected).max()
        assert difference < FLOAT16_TOLERANCE
    assert np.abs(load_outputs(file)(given)[0] - expected).max() > 1e-6
    numbers = stored(file)
    assert numbers["FLOAT16"] > 4 * numbers["FLOAT"]
    graph = onnx.load(file).graph
    halves = {
        tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16
    }
    products = [
        node for node in graph.node if node.op_type == "MatMul" and set(node.input) & halves
    ]
    assert len(products) >= 4


@pytest.mark.slow
def test_the_export_compares_with_the_model_in_float32(tmp_path):
    Image.fromarray(picture(side=16)).save(tmp_path / "a.png")
    files = [Named(str(tmp_path / "a.png"))]
    options = {"to": "onnx", "outputs": ["logits", "features"], "precision": "float16"}
    compared = export_run(make_run(), str(tmp_path / "m.onnx"), files=files, **options)["compared"]
    assert 1e-6 < compared["largest_relative_difference"] < FLOAT16_TOLERANCE
    assert compared["same_best_class"] == 1


def test_numbers_that_become_too_large_are_an_error_of_the_comparison(tmp_path):
    run = make_run()
    kernel = run.model.embedding.kernel
    kernel[...] = 60_000 * np.sign(kernel[...])
    Image.fromarray(picture(side=16)).save(tmp_path / "a.png")
    files = [Named(str(tmp_path / "a.png"))]
    with pytest.raises(UserError, match="answers in float16 differ .* set --weights=bfloat16"):
        export_run(run, str(tmp_path / "m.onnx"), to="onnx", precision="float16", files=files)


def test_weights_that_float16_does_not_have_are_refused_by_name(tmp_path):
    run = make_run()
    run.model.head.kernel[...] += 70_000.0
    with pytest.raises(ConfigError, match="its weights head/kernel have numbers above 65504"):
        export_run(run, str(tmp_path / "m.onnx"), to="onnx", precision="float16")
    assert not list(tmp_path.iterdir())


def test_stablehlo_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--weights=float16 is for --to=onnx"):
        export_run(make_run(), str(tmp_path / "m.zip"), to="stablehlo", precision="float16")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["linear", "eomt"])
def test_a_model_that_segments_computes_in_float16_too(tmp_path, head):
    Image.fromarray(picture(side=16)).save(tmp_path / "a.png")
    files = [Named(str(tmp_path / "a.png"))]
    options = {"to": "onnx", "precision": "float16", "files": files}
    compared = export_run(test_maps.make_run(head), str(tmp_path / "m.onnx"), **options)["compared"]
    assert compared["largest_relative_difference"] < FLOAT16_TOLERANCE
    assert stored(tmp_path / "m.onnx")["FLOAT16"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("Mixer-S/16", 32), ("BiT-R26x1", 32), ("R+ViT-Ti/16", 32), ("DeepViT-16", 32), ("LocalViT-T", 32),
        ("CrossViT-9-dagger", 48), ("T2T-ViT-7", 32), ("FF-Ti/16", 32), ("Axial-ViT-B/16", 32),
    ],
)  # fmt: skip
def test_other_families_compute_in_float16(tmp_path, name, side):
    function, weights = network(name, side)
    half = network(name, side, dtype="float16")[0]
    images = np.random.default_rng(1).integers(0, 256, (3, side, side, 3), np.uint8)
    like = jax.ShapeDtypeStruct(images.shape, np.uint8)
    file = tmp_path / "m.onnx"
    onnx_writer.write(file, half, weights, like, {"outputs": {"logits": []}}, "float16")
    expected = np.asarray(jax.jit(function)(weights, images))
    difference = np.abs(load_outputs(file)(images)[0] - expected).max()
    assert difference < FLOAT16_TOLERANCE * np.abs(expected).max()
    assert stored(file)["FLOAT16"] > stored(file)["FLOAT"]
