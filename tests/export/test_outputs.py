"""The outputs of exported files that are asked for, against transformers' own model of the same weights."""

import json

import jax
import numpy as np
import onnxruntime
import pytest
from PIL import Image

import vit_jax
from tests import lazily
from tests.interchange.test_probabilities import SIDE, build
from tests.repeats import slow_unless
from tests.serving.conftest import make_run
from vit_jax.base.errors import ConfigError
from vit_jax.export import onnx, openvino, stablehlo
from vit_jax.export.run import export, export_run

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

IMAGES = np.random.default_rng(5).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
NAMES = ("features", "logits", "probabilities")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build(folder, "ViTForImageClassification")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """What transformers computes, by name."""
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    pixels = torch.tensor(np.float32(IMAGES) / 127.5 - 1).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits
        features = model.vit(pixel_values=pixels).last_hidden_state[:, 0]
    arrays = {"features": features, "logits": logits, "probabilities": logits.softmax(-1)}
    return {name: array.numpy() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("file", "load"),
    slow_unless(
        [("m.onnx", onnx.load_outputs)],
        [
            ("m.onnx", onnx.load_outputs),
            ("m.onnx", openvino.load_outputs),
            ("m.zip", stablehlo.load_outputs),
        ],
    ),
    ids=["onnxruntime", "openvino", "stablehlo"],
)
def test_all_outputs_are_those_of_transformers_by_name_and_in_the_order_asked_for(
    folder, expected, tmp_path, file, load
):
    description = vit_jax.load_run(folder).export(str(tmp_path / file), outputs=NAMES)
    assert list(description["outputs"]) == list(NAMES)
    assert f"{', '.join(NAMES)} = model." in description["how"]
    for name, array in zip(NAMES, load(tmp_path / file)(IMAGES), strict=True):
        np.testing.assert_allclose(array, expected[name], atol=1e-5)
        assert description["outputs"][name] == ["batch", *array.shape[1:]]


def test_the_graph_has_what_is_asked_for_alone(folder, expected, tmp_path):
    file = tmp_path / "m.onnx"
    vit_jax.load_run(folder).export(str(file), outputs=["features"], normalization="beside")
    session = onnxruntime.InferenceSession(file)
    assert [output.name for output in session.get_outputs()] == ["features"]
    pixels = np.float32(IMAGES) / 127.5 - 1
    np.testing.assert_allclose(
        session.run(["features"], {"images": pixels})[0], expected["features"], atol=1e-5
    )


def test_the_command_compares_every_output(command, folder, tmp_path):
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")

    def compared(names):
        code, out, err = command(
            "export", f"--checkpoint={folder}", "--to=onnx", f"--out={tmp_path}/{names}.onnx", "--json",
            f"--outputs={names}", f"--images={tmp_path}/a.png",
        )  # fmt: skip
        assert code == 0, err
        return json.loads(out)["compared"]

    both = compared("features,logits")
    assert both["same_best_class"] == 1 and both["largest_difference_of_features"] < 1e-5
    assert both["largest_difference_of_logits"] < 1e-5
    assert "same_best_class" not in compared("features")


@pytest.mark.slow
def test_the_answer_of_a_wrong_program_is_seen_in_each_output(folder, monkeypatch, tmp_path):
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    load = onnx.load_outputs

    def wrong(path):
        program = load(path)

        def answer(images):
            features, logits = program(images)
            return [features + 0.25, logits]

        return answer

    monkeypatch.setattr(onnx, "load_outputs", wrong)
    found = export(
        folder, str(tmp_path / "m.onnx"), to="onnx", outputs=("features", "logits"), images=[str(tmp_path / "a.png")]
    )["compared"]  # fmt: skip
    assert found["largest_difference_of_features"] == pytest.approx(0.25, abs=1e-4)
    assert found["largest_difference_of_logits"] < 1e-5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("embedding",), "--outputs=embedding: .* are probabilities, logits, features"),
        (("logits", "features", "logits"), "name logits once"),
    ],
)
def test_other_outputs_are_refused_before_anything_is_written(folder, tmp_path, names, message):
    run = vit_jax.load_run(folder)
    with pytest.raises(ConfigError, match=message):
        export_run(run, str(tmp_path / "m.onnx"), to="onnx", outputs=names)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_without_head_has_features_alone(tmp_path):
    run = make_run(num_classes=0)
    with pytest.raises(ConfigError, match="--outputs=logits: the outputs of this model are feat"):
        export_run(run, str(tmp_path / "m.zip"), to="stablehlo", outputs=("logits",))
    description = export_run(run, str(tmp_path / "m.zip"), to="stablehlo")
    assert list(description["outputs"]) == ["features"]
    (answer,) = stablehlo.load_outputs(tmp_path / "m.zip")(np.zeros((2, 16, 16, 3), np.uint8))
    features = jax.jit(lambda model, x: model(x).features)(
        run.model, -np.ones((2, 16, 16, 3), np.float32)
    )
    np.testing.assert_allclose(answer, features, atol=1e-5)
