"""Classes computed by onnxruntime and OpenVINO, from an export that is kept, against XLA's."""

import json
import signal

import jax
import numpy as np
import pytest
from PIL import Image

from tests.models.conftest import parameters
from tests.serving.conftest import make_run
from vit_jax.base import signal_stack
from vit_jax.base.errors import ConfigError
from vit_jax.compute import choices
from vit_jax.export import engines, onnx
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.prediction.predict import make_best
from vit_jax.serving.network import Network

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def expected(run):
    return Network(run, largest=3).classify(IMAGES)


def probabilities(classifier):
    return np.asarray(jax.nn.softmax(classifier.logits(IMAGES)))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_export_is_made_once_and_has_the_classes_of_the_model(run, home, monkeypatch, engine):
    first = engines.make_classifier(run, engine)
    np.testing.assert_allclose(probabilities(first), expected(run), atol=1e-6)
    files = sorted(home.iterdir())
    assert [file.suffix for file in files] == [".json", ".onnx"]
    monkeypatch.setattr(onnx, "write", None)  # no other is made
    again = engines.make_classifier(run, engine)
    np.testing.assert_array_equal(again.logits(IMAGES), first.logits(IMAGES))
    assert sorted(home.iterdir()) == files


def test_signals_are_handled_after_openvino_has_computed(run, home):
    """It exchanges the memory that their handlers run on, and frees its own with the program."""
    before = signal_stack.of_thread()
    classifier = engines.make_classifier(run, "openvino")
    assert signal_stack.of_thread() == before
    classifier.logits(IMAGES)
    assert signal_stack.of_thread() == before
    del classifier
    handled = []
    earlier = signal.signal(signal.SIGTERM, lambda *_: handled.append("SIGTERM"))
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, earlier)
    assert handled == ["SIGTERM"]


@pytest.mark.parametrize(
    ("engine", "precision"), [("onnxruntime", "int8"), ("openvino", "bfloat16")]
)
def test_other_precisions_are_near_and_their_difference_is_kept(run, home, engine, precision):
    if precision == "bfloat16" and not choices.multiplies_bfloat16():
        with pytest.raises(ConfigError, match="no products in bfloat16"):
            engines.make_classifier(run, engine, precision)
        return
    rounded = engines.make_classifier(run, "auto", precision)
    assert (rounded.engine, rounded.precision) == (engine, precision)
    difference = np.abs(probabilities(rounded) - expected(run)).max()
    assert 1e-6 < difference < 0.05
    (notes,) = home.glob("*.json")
    kept = json.loads(notes.read_text())[f"{engine} {precision}"]
    assert 1e-6 < kept["difference"] < 0.05 and 0.5 <= kept["same_best_class"] <= 1


def test_a_precision_of_another_engine_is_refused(run, home):
    with pytest.raises(ConfigError, match="--precision=int8 .* set --engine=onnxruntime"):
        engines.make_classifier(run, "openvino", "int8")
    with pytest.raises(ConfigError, match="set --engine=openvino"):
        engines.make_classifier(run, "xla", "bfloat16")
    assert not home.exists()


def test_the_best_classes_are_those_of_xla(run, home):
    classifier = engines.make_classifier(run, "onnxruntime")
    ours = make_best(run, classifier.logits).function(None, IMAGES, 4)
    weights = registry.split(run.model)[1]
    probabilities, numbers = make_best(run).function(weights, IMAGES, 4)
    np.testing.assert_array_equal(ours[1], numbers)
    np.testing.assert_allclose(ours[0], probabilities, atol=1e-6)


def test_other_weights_have_another_file_and_a_server_takes_them(run, home):
    served = Network(run, largest=3, engine="openvino")
    other = make_run()
    other.model.head.bias[...] += np.arange(7, dtype=np.float32)
    served.replace(other)
    np.testing.assert_allclose(served.classify(IMAGES), expected(other), atol=1e-6)
    assert len(list(home.glob("*.onnx"))) == 2


def test_only_the_newest_exports_are_kept(run, home, monkeypatch):
    monkeypatch.setattr(engines, "_KEPT", 1)
    engines.make_classifier(run, "onnxruntime")
    (first,) = home.glob("*.onnx")
    other = make_run()
    other.model.head.bias[...] += 1.0
    engines.make_classifier(other, "onnxruntime")
    assert not first.exists() and len(list(home.iterdir())) == 2


def test_an_export_that_differs_is_refused(run, home, monkeypatch):
    monkeypatch.setattr(engines, "LARGEST_DIFFERENCE", 0.0)
    load = onnx.load_outputs

    def wrong(path):
        return lambda images: [1.5 * array for array in load(path)(images)]

    monkeypatch.setattr(onnx, "load_outputs", wrong)
    with pytest.raises(ConfigError, match="differs from the model by 0"):
        engines.make_classifier(run, "onnxruntime")
    assert not list(home.glob("*.json"))
    assert engines.make_classifier(run, "auto") is None


def test_auto_is_what_was_faster_here(run, home):
    engines.make_classifier(run, "auto")
    (measured,) = home.glob("*.json")
    notes = json.loads(measured.read_text())
    assert notes["seconds"].keys() == {"xla", "onnxruntime", "openvino"}
    for fastest in notes["seconds"]:
        seconds = dict.fromkeys(notes["seconds"], 2.0) | {fastest: 1.0}
        measured.write_text(json.dumps(notes | {"seconds": seconds}))
        chosen = engines.make_classifier(run, "auto")
        assert (chosen.engine if chosen else "xla") == fastest
    assert engines.make_classifier(run, "onnxruntime").engine == "onnxruntime"
    assert engines.make_classifier(run, "xla") is None


def test_auto_is_xla_where_bfloat16_is_multiplied(home, monkeypatch):
    monkeypatch.setattr(engines.choices, "multiplies_bfloat16", lambda: True)
    assert engines.make_classifier(make_run(dtype="bfloat16"), "auto") is None
    assert not home.exists()


def test_predict_says_the_same_by_either_engine(command, home, tmp_path):
    config = registry.model_config("ViT-mu/16", image_size=32, num_classes=7, head_init="normal")
    checkpoint = tmp_path / "tiny.npz"
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, parameters(config)), checkpoint, "official"
    )
    Image.fromarray(np.tile(IMAGES[0], (3, 3, 1))).save(tmp_path / "a.png")
    image_flags = [f"--config.data.{name}=(0.5, 0.5, 0.5)" for name in ("mean", "std")]

    def predicted(engine):
        code, out, err = command(
            "predict", f"--checkpoint={checkpoint}", f"--engine={engine}", "--json", *image_flags, tmp_path / "a.png"
        )  # fmt: skip
        assert code == 0, err
        return json.loads(out.splitlines()[-1])[0]["predictions"]

    found, expected = predicted("onnxruntime"), predicted("xla")
    assert [one["class"] for one in found] == [one["class"] for one in expected]
    np.testing.assert_allclose(
        [one["probability"] for one in found], [one["probability"] for one in expected], atol=1e-6
    )
    assert list(home.glob("*.onnx"))
