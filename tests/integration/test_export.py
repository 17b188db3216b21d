"""Exported models, called in a process that does not have this package."""

import itertools
import json
import pathlib
import subprocess
import sys
import zipfile

import jaxlib
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.repeats import slow_unless

CALL = """
import json, sys, zipfile
sys.path = [p for p in sys.path if p]
sys.modules["vit_jax"] = None
import numpy as np
from jax import export
archive = zipfile.ZipFile(sys.argv[1])
model = export.deserialize(bytearray(archive.read("model.jax")))
images = np.load(sys.argv[2])
np.save(sys.argv[3], model.call(images))
"""


@pytest.fixture(scope="module")
def trained(finished_run):
    return finished_run.workdir


def test_an_exported_model_answers_alike_without_this_package(command, trained, tmp_path):
    out = tmp_path / "model.zip"
    code, said, err = command(
        "export", f"--checkpoint={trained}", "--to=stablehlo", f"--out={out}", "--json"
    )
    assert code == 0, err
    description = json.loads(zipfile.ZipFile(out).read("model.json"))
    assert description == json.loads(said) and description["classes"] == list("0123456789")
    assert description["input"] == {"images": ["batch", 32, 32, 3], "dtype": "uint8"}
    assert description["written"]["jaxlib"] == jaxlib.__version__
    assert f"6 months after jaxlib {jaxlib.__version__}" in description["readable"]
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    script, answers = tmp_path / "call.py", tmp_path / "answers.npy"
    script.write_text(CALL)
    subprocess.run(
        [sys.executable, script, out, tmp_path / "images.npy", answers],
        check=True, cwd=tmp_path, env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    logits = logits_of(trained, images)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = np.load(answers)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (found.argmax(-1) == expected.argmax(-1)).all()


def logits_of(trained, images):
    model = vit_jax.load_run(trained).model
    return np.asarray(model(images.astype(np.float32) / 127.5 - 1).logits, np.float64)


@pytest.mark.parametrize("normalization", ["inside", "beside"])
def test_an_onnx_file_answers_alike_in_onnxruntime(command, trained, tmp_path, normalization):
    import onnxruntime

    out = tmp_path / "model.onnx"
    code, said, err = command(
        "export", f"--checkpoint={trained}", "--to=onnx", f"--out={out}", "--json",
        f"--normalization={normalization}",
    )  # fmt: skip
    assert code == 0, err
    session = onnxruntime.InferenceSession(out)
    description = session.get_modelmeta().custom_metadata_map
    description = {name: json.loads(value) for name, value in description.items()}
    assert description == json.loads(said) and description["classes"] == list("0123456789")
    for count in (1, 5):
        images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), np.uint8)
        given = images
        if normalization == "beside":
            how = description["preprocessing"]["normalization"]
            given = (images.astype(np.float32) / 255 - np.float32(how["mean"])) / how["std"]
            given = given.astype(np.float32)
        (found,) = session.run(["probabilities"], {"images": given})
        logits = logits_of(trained, images)
        expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize(
    ("weights", "to"),
    slow_unless(
        [("bfloat16", "stablehlo"), ("int8", "onnx")],
        [*itertools.product(("bfloat16", "int8"), ("onnx", "stablehlo"))],
    ),
)
def test_weights_in_fewer_bits_are_smaller_and_compared(command, trained, tmp_path, to, weights):
    random = np.random.default_rng(0)
    for name in ("3", "7", "other"):
        (tmp_path / "images" / name).mkdir(parents=True)
        pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name / "a.png")
    suffix = {"onnx": "onnx", "stablehlo": "zip"}[to]
    sizes, found = {}, {}
    (tmp_path / "images" / "torn.png").write_bytes(b"no image")
    for kind in ("float32", weights):
        out = tmp_path / f"{kind}.{suffix}"
        code, said, err = command(
            "export", f"--checkpoint={trained}", f"--to={to}", f"--out={out}", f"--weights={kind}",
            f"--images={tmp_path / 'images'}", "--json",
        )  # fmt: skip
        assert code == 1 and "1 of 4 images cannot be read" in err
        sizes[kind], found[kind] = out.stat().st_size, json.loads(said)["compared"]
    assert sizes[weights] < sizes["float32"] * {"bfloat16": 0.85, "int8": 0.75}[weights]
    assert found["float32"]["largest_difference"] < 1e-6
    assert 1e-6 < found[weights]["largest_difference"] < 0.05
    assert found[weights]["images"] == 3 and found[weights]["unreadable"] == 1
    assert found[weights]["labelled"] == 2
    assert found[weights]["accuracy"] == found["float32"]["accuracy_of_the_file"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to=stablehlo", "--out=model.bin"], "--out=model.bin: name it .zip"),
        (
            ["--to=stablehlo", "--out=/nowhere/m.zip"],
            "--out=/nowhere/m.zip: there is no folder /nowhere",
        ),
        (["--to=onnx", "--out=model.zip"], "--out=model.zip: name it .onnx"),
        (["--to=onx", "--out=m.zip"], "stablehlo"),
        (["--to=stablehlo"], "--out=FILE"),
    ],
)
def test_what_cannot_be_exported_is_said_before_any_work(command, flags, message):
    code, _, err = command("export", "--checkpoint=/nowhere", *flags)
    assert code == 2 and message in err and not pathlib.Path("m.zip").exists()
