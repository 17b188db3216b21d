"""`predict` of a file that `export` wrote, against transformers' model of the same weights and against the run."""

import json
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests import lazily
from tests.interchange.test_probabilities import build, picture, their_logits
from tests.repeats import slow_unless
from tests.serving.conftest import make_run
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.data.record import BadImage
from vit_jax.export import exported
from vit_jax.export import run as exporting
from vit_jax.export.run import export_run
from vit_jax.prediction.images import Named
from vit_jax.prediction.predict import predict

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of transformers with independent sigmoids, and photos of its size."""
    folder = tmp_path_factory.mktemp("model")
    build(folder, "ViTForImageClassification", problem_type="multi_label_classification")
    (folder / "photos").mkdir()
    for seed in range(3):
        Image.fromarray(picture(seed)).save(folder / "photos" / f"{seed}.png")
    return folder


CASES = [
    ("m.onnx", {}, []),
    ("m.onnx", {"normalization": "beside", "outputs": ["features", "logits"]}, []),
    ("m.onnx", {"batch_size": 2}, ["--engine=openvino"]),
    ("m.zip", {"batch_size": 2, "outputs": ["features", "probabilities"]}, []),
]


@pytest.mark.parametrize(
    ("file", "options", "flags"),
    slow_unless(CASES[1:2], CASES),
)
def test_the_command_prints_what_transformers_computes(
    command, folder, tmp_path, file, options, flags
):
    vit_jax.load_run(folder).export(str(tmp_path / file), **options)
    code, out, err = command(
        "predict", f"--checkpoint={tmp_path / file}", folder / "photos", "--json", *flags
    )
    assert code == 0, err
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    printed = json.loads(out.splitlines()[-1])
    assert len(printed) == 3
    for seed, row in enumerate(printed):
        expected = their_logits(model, picture(seed)).sigmoid().numpy()
        assert row["file"].endswith(f"{seed}.png")
        found = {one["class"]: one["probability"] for one in row["predictions"]}
        for number, name in model.config.id2label.items():
            assert found[name] == pytest.approx(expected[number], abs=1e-5)


@pytest.mark.parametrize(
    "crop", slow_unless(["central"], ["central", "torchvision", "transformers", "squash", "resize"])
)
def test_images_are_prepared_as_the_run_does(tmp_path, crop):
    run = make_run()
    fields = {"eval_crop": crop, "eval_resize": 20, "interpolation": "bicubic", "max_value": 4095}
    run.config.data.update(fields)
    export_run(run, str(tmp_path / "m.onnx"), to="onnx")
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (37, 29, 3), np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(random.integers(0, 4096, (29, 41), np.uint16)).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"no image")
    files = [Named(str(tmp_path / name)) for name in ("a.png", "c.png", "b.png")]
    classifier = exported.read_classifier(tmp_path / "m.onnx")
    found = list(exported.predict_with(classifier, files, topk=3, batch_size=2))
    expected = list(predict(run, files, topk=3, batch_size=2))
    assert isinstance(found[1], BadImage)
    for ours, theirs in ((found[0], expected[0]), (found[2], expected[2])):
        assert (ours.file, ours.names) == (theirs.file, theirs.names)
        np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
        np.testing.assert_array_equal(ours.image, theirs.image)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of a model with classes, and of one without."""
    folder = tmp_path_factory.mktemp("files")
    export_run(make_run(), str(folder / "classes.onnx"), to="onnx")
    export_run(make_run(num_classes=0), str(folder / "features.zip"), to="stablehlo")
    (folder / "damaged.onnx").write_bytes((folder / "classes.onnx").read_bytes()[:5000])
    with zipfile.ZipFile(folder / "damaged.zip", "w") as archive:
        archive.writestr("model.jax", b"")
    import onnx

    model = onnx.load(folder / "classes.onnx")
    model.producer_name = "another"
    onnx.save(model, folder / "foreign.onnx")
    return folder


@pytest.mark.parametrize(("name", "to"), [("classes.onnx", "onnx"), ("features.zip", "stablehlo")])
def test_a_file_is_replaced_by_the_same_export_alone(files, tmp_path, monkeypatch, name, to):
    class Loaded(Exception):
        """The model would be loaded now."""

    def load(*_):
        raise Loaded

    monkeypatch.setattr(exporting, "load_for_images", load)
    out = tmp_path / name
    shutil.copy(files / name, out)
    before = out.read_bytes()
    with pytest.raises(Loaded):
        exporting.export("here", str(out), to=to)
    with pytest.raises(ConfigError, match="other arguments \\(checkpoint\\): name"):
        exporting.export("there", str(out), to=to)
    with pytest.raises(ConfigError, match="other arguments \\(options\\): name"):
        exporting.export("here", str(out), to=to, precision="int8")
    with pytest.raises(ConfigError, match="other arguments \\(options\\): name"):
        export_run(make_run(), str(out), to=to, batch_size=2)
    assert out.read_bytes() == before
    out.write_bytes(b"of another program")
    with pytest.raises(ConfigError, match="is there and would be replaced, and no earlier run"):
        exporting.export("here", str(out), to=to)
    assert out.read_bytes() == b"of another program"


@pytest.mark.parametrize(
    ("name", "engine", "error", "message"),
    [
        ("features.zip", "", ConfigError, "gives features, which are no classes of images"),
        ("features.zip", "openvino", ConfigError, "--engine=openvino cannot compute it: set xla"),
        ("foreign.onnx", "", ConfigError, "has no description of its classes, input"),
        ("damaged.onnx", "", CheckpointError, "damaged.onnx is damaged, or no ONNX file"),
        ("damaged.zip", "", CheckpointError, "damaged.zip is damaged"),
    ],
)
def test_other_files_are_refused_with_a_sentence(files, name, engine, error, message):
    assert exported.is_export(files / name)
    with pytest.raises(error, match=message):
        exported.read_classifier(files / name, engine)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.data.eval_crop=resize", "--config.data.eval_crop is for checkpoints"),
        ("--model=heads=2", "--model is for checkpoints"),
        ("--features=x.npz", "for --features and --out pass the checkpoint"),
        ("--precision=int8", "--precision is for checkpoints"),
    ],
)
def test_flags_for_checkpoints_are_refused(command, files, folder, flag, message):
    code, _, err = command("predict", f"--checkpoint={files}/classes.onnx", folder / "photos", flag)
    assert code == 2 and message in err


def test_another_command_says_who_takes_the_file(command, files):
    code, _, err = command("show", files / "classes.onnx")
    assert code == 1 and "'vit_jax predict' takes it" in err


def test_an_answer_that_is_no_number_ends_it(files, tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    classifier = exported.read_classifier(files / "classes.onnx")
    broken = classifier.__class__(
        **vars(classifier)
        | {
            "probabilities": lambda images: np.where(
                np.arange(7) == 3, np.nan, np.zeros((len(images), 7))
            )
        }
    )
    with pytest.raises(CheckpointError, match=r"a\.png: what .* answers is not finite"):
        list(exported.predict_with(broken, [Named(str(tmp_path / "a.png"))], topk=2, batch_size=1))
