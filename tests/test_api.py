"""The Python API does what the commands do: on images of any kind, on layers, on data, on files."""

import io
import json
import pickle
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from huggingface_hub import constants
from PIL import Image

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import reading
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.commands.main import COMMANDS
from vit_jax.config import default_config
from vit_jax.data.record import BadImage
from vit_jax.interchange import remote
from vit_jax.models import registry
from vit_jax.prediction.features import Wanted, compile_features
from vit_jax.training.upkeep.stragglers import Stragglers


def tiny(compilation_cache, **fields):
    config = vit_jax.load_config("digits")
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    config.update_from_flattened_dict(TINY | {"compilation_cache": compilation_cache} | changes)
    return config


@pytest.fixture(scope="module")
def workdir(finished_run):
    return finished_run.workdir


@pytest.fixture(scope="module")
def run(workdir):
    return vit_jax.load_run(workdir)


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)


@pytest.fixture(scope="module")
def photo(pixels, tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "photo.png"
    Image.fromarray(pixels).save(path)
    return path


def test_an_image_of_any_kind_gets_the_answer_of_the_command(run, workdir, photo, pixels, command):
    code, out, _ = command("predict", f"--checkpoint={workdir}", photo, "--topk=3", "--json")
    said = json.loads(out.splitlines()[-1])[0]["predictions"]
    kinds = [photo, str(photo), photo.read_bytes(), Image.open(photo), pixels, jnp.asarray(pixels)]
    file = io.BytesIO(photo.read_bytes())
    file.seek(0, io.SEEK_END)  # where writing it leaves it
    for kind in (*kinds, file, bytearray(photo.read_bytes())):
        found = run(kind, topk=3)
        assert isinstance(found, vit_jax.Prediction) and len(found.names) == 3
        assert found.names == tuple(one["class"] for one in said)
        np.testing.assert_allclose(
            found.probabilities, [one["probability"] for one in said], rtol=1e-5
        )
    several = run([*kinds, pixels[:20, :11], Image.fromarray(pixels[..., 0])], topk=3)
    assert [one.names for one in several[: len(kinds)]] == [found.names] * len(kinds)
    assert len(several) == 8 and len(run(np.stack([pixels, pixels]))) == 2 and run([]) == []


def test_a_run_is_printed_as_a_line(run, workdir):
    assert repr(run).startswith(f"<{workdir}: ViT") and "step 12>" in repr(run)


def test_a_call_compiles_once_for_each_size_of_batches(run, pixels):
    run(pixels)
    with jax.no_tracing():
        run(pixels[::-1])


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (b"hello", BadImage, "^the image cannot be read"),
        ("there-is-none.png", BadImage, r"there-is-none\.png"),
        (
            [np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 300, np.int32)],
            BadImage,
            "^image 1 cannot",
        ),
        (np.zeros((4, 4, 7), np.uint8), BadImage, "7 channels"),
        (3, ConfigError, "the image is of the type int"),
        (io.StringIO("text"), ConfigError, "the image is a file opened as text: .* mode 'rb'"),
        (io.BytesIO(), BadImage, "the image cannot be read: it is empty"),
        ([None], ConfigError, "image 0 is of the type NoneType"),
        ({}, ConfigError, "the image is of the type dict"),
    ],
)
def test_what_is_no_image_is_refused_by_its_name(run, images, error, message):
    with pytest.raises(error, match=message):
        run(images)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run("x.png", topk=0), "topk=0"),
        (lambda run: run.features([]), "images is empty"),
        (lambda run: run.preprocess([]), "images is empty"),
        (lambda run: run.features("x.png", layers=1), "layers=1: must be a list"),
        (lambda run: run.features("x.png", layers="blocks/1"), "layers='blocks/1': must be a list"),
        (lambda run: run.evaluate("./nowhere"), "nowhere does not exist"),
        (lambda run: run.evaluate("nowhere"), "data.name = 'nowhere' is not prepared"),
        (
            lambda run: run.features("x.png", layers=("head",)),
            "'head'; the model has blocks/0, blocks/1$",
        ),
        (lambda run: vit_jax.train("digits", "W"), r"type str: pass .*load_config\('digits'\)"),
        (lambda run: vit_jax.train(None, "W", callbacks=print), "callbacks is one function"),
        (
            lambda run: vit_jax.train(None, "W", callbacks=["x"]),
            r"callbacks\[0\] is of the type str",
        ),
    ],
)
def test_a_wrong_argument_is_named(run, call, message):
    with pytest.raises(ConfigError, match=message):
        call(run)


def test_the_model_of_preprocessed_images_gives_the_probabilities(run, photo, pixels):
    images = run.preprocess([photo, pixels])
    assert images.shape == (2, 32, 32, 3) and images.dtype == np.float32
    probabilities = jax.nn.softmax(run.model(images).logits)
    np.testing.assert_allclose(
        np.sort(probabilities[0])[::-1], run(photo, topk=10).probabilities, atol=1e-5
    )


def test_features_are_those_of_the_command_and_of_every_layer(
    run, workdir, photo, pixels, tmp_path, command
):
    code, out, err = command(
        "predict", f"--checkpoint={workdir}", photo, "--features", "--layers=0,-1", "--maps", f"--out={tmp_path}/f.npz",
        "--image_size=48x64",
    )  # fmt: skip
    assert code == 0 and "  blocks.1.map 1x6x8x32" in out, err
    with np.load(tmp_path / "f.npz") as written:
        assert set(written) == {"files", "features", "blocks.0.map", "blocks.1.map"}
        at_size = run.features(photo, layers=(0, -1), maps=True, image_size="48x64")
        for layer, found in enumerate(at_size):
            np.testing.assert_allclose(found, written[f"blocks.{layer}.map"], atol=1e-5)
        pooled = run.features(photo, image_size=(48, 64))
        np.testing.assert_allclose(pooled, written["features"], atol=1e-5)
    wide = np.tile(pixels, (1, 5, 1))  # 40 x 150: of up to 24 patches 2 x 9; 40 x 30: 5 x 4
    alone, together = (
        run.features([wide], native_tokens=24),
        run.features([pixels, wide], native_tokens=24),
    )
    np.testing.assert_allclose(together[1:], alone, atol=1e-5)
    code, _, err = command(
        "predict", f"--checkpoint={workdir}", photo, f"--features={tmp_path}/n.npz", "--native_tokens=24"
    )  # fmt: skip
    assert code == 0, err
    np.testing.assert_allclose(np.load(tmp_path / "n.npz")["features"], together[:1], atol=1e-5)
    options = "--native_tokens=24", "--topk=2", "--json"
    code, out, err = command("predict", f"--checkpoint={workdir}", photo, *options)
    assert code == 0 and len(json.loads(out.splitlines()[-1])[0]["predictions"]) == 2, err
    code, *_ = command("predict", f"--checkpoint={workdir}", photo, f"--features={tmp_path}/g.npz")
    assert code == 0
    np.testing.assert_allclose(
        run.features(photo), np.load(tmp_path / "g.npz")["features"], atol=1e-5
    )
    first, last = run.features([photo] * 3, layers=(0, -1))
    assert first.shape == last.shape == (3, 16, 32)
    (grid,) = run.features(photo, layers=("blocks/1",), maps=True)
    np.testing.assert_allclose(grid.reshape(1, 16, 32), last[:1, -16:], atol=1e-6)
    (larger,) = run.features(photo, layers=[1], maps=True, image_size=(48, 64))
    assert larger.shape == (1, 6, 8, 32)
    (raw,) = run.features(photo, layers=[-1], norm=False)
    normed = run.model.last_norm(jnp.asarray(raw), "blocks/1")
    np.testing.assert_allclose(normed, last[:1], atol=1e-5)
    np.testing.assert_allclose(last.mean(1), run.features([photo] * 3), atol=1e-5)
    ((patches, class_token),) = run.features(photo, layers=[0], class_token=True)
    assert patches.shape == (1, 16, 32) and class_token is None  # the model pools a mean
    with pytest.raises(ConfigError, match="there is no layer 2: the model has 2"):
        run.features(photo, layers=(0, 2))
    with pytest.raises(ConfigError, match="there is no layer 'block/1'; did you mean 'blocks/1'"):
        run.features(photo, layers=["block/1"])


def test_windows_that_slide_give_the_map_of_a_larger_image(run):
    image = np.random.default_rng(0).integers(0, 256, (64, 32, 3), np.uint8)
    windows = [image[top : top + 32] for top in (0, 16, 32)]
    each = run.features(windows, layers=[-1], maps=True)[0]
    (found,) = run.features(image, layers=[-1], maps=True, image_size="64x32", stride=16)
    expected, rows = np.zeros((8, 4, 32)), 2
    expected[:rows], expected[-rows:] = each[0][:rows], each[2][rows:]
    expected[rows : 2 * rows] = (each[0][rows:] + each[1][:rows]) / 2
    expected[2 * rows : 3 * rows] = (each[1][rows:] + each[2][:rows]) / 2
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    pooled = run.features(image, image_size="64x32", stride=16)
    np.testing.assert_allclose(pooled[0], run.features(windows).mean(0), atol=1e-5)
    for options, message in (
        (dict(stride=16), "stride is for windows .* set image_size too"),
        (dict(stride=12, image_size="64x32"), "stride = 12 must be a multiple of 8"),
        (
            dict(stride=16, image_size="60x32"),
            "a side of image_size, 60, 32 and a multiple of 8 more",
        ),
        (
            dict(stride=16, image_size=16),
            "a side of 16 pixels, smaller than the model's windows of 32",
        ),
        (dict(stride=40, image_size=72), "stride = 40 leaves pixels between windows of 32"),
        (dict(image_size=30), "30.*cannot be split into patches of 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            run.features(image, layers=[-1], **options)


@pytest.mark.parametrize(
    ("name", "size", "layers", "shapes"),
    [
        ("Mixer-S/16", 32, (1,), [(1, 2, 2, 512)]),
        ("ResNet-R50x1", 32, ("stage2", -1), [(1, 4, 4, 512), (1, 1, 1, 2048)]),
        ("CrossViT-Ti", 240, ("small_blocks/2", 3), [(1, 20, 20, 96), (1, 14, 14, 192)]),
        pytest.param(
            "EfficientNet-B0",
            32,
            (0, "stage7"),
            [(1, 16, 16, 32), (1, 1, 1, 320)],
            marks=pytest.mark.slow,
        ),  # stages as a ResNet has
        ("T2T-ViT-7", 32, (0,), [(1, 2, 2, 256)]),
    ],
)
def test_layers_of_other_families_are_maps_and_tokens(name, size, layers, shapes):
    config = registry.model_config(name, image_size=size)
    model = nnx.eval_shape(lambda: registry.build(config, rngs=nnx.Rngs(0)))
    settings = default_config()
    settings.data.image_size = size
    run = TrainedModel(model, config, settings, (), 0, epath.Path("nowhere"))
    images = jax.ShapeDtypeStruct((1, size, size, 3), np.uint8)

    function = compile_features(run, Wanted(layers)).function
    _, found = jax.eval_shape(function, registry.split(model)[1], images)
    assert [(1, *x.grid, x.tokens.shape[-1]) for x in found] == shapes
    for layer, (_, rows, columns, _) in zip(found, shapes, strict=True):
        assert layer.tokens.shape[1] == rows * columns + layer.has_class_token


def test_evaluation_is_that_of_the_run_and_of_a_folder(run, workdir, photo, tmp_path, command):
    result = json.loads((workdir / "result.json").read_text())
    found = run.evaluate()
    assert found["examples"] == 359 and found == pytest.approx({n: result[n] for n in found})
    for name in ("3", "7"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "a.png").write_bytes(photo.read_bytes())
    found = run.evaluate(tmp_path / "photos", suite="classification")
    code, out, err = command(
        "evaluate", f"--checkpoint={workdir}", "--config.data.name=folder", f"--config.data.path={tmp_path}/photos",
        "--evaluators=classification", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert found == pytest.approx(json.loads(out.splitlines()[-1]))
    with pytest.raises(
        ConfigError, match="there is no suite or evaluator 'classificaton'; did you mean"
    ):
        run.evaluate(tmp_path / "photos", suite="classificaton")


def test_a_saved_and_an_exported_model_answer_as_the_run_does(run, photo, tmp_path):
    expected = run(photo, topk=10)
    run.save(tmp_path / "timm", format="timm")
    again = vit_jax.load_run(tmp_path / "timm")(photo, topk=10)
    assert again.names == expected.names
    np.testing.assert_allclose(again.probabilities, expected.probabilities, atol=1e-5)
    run.model.head.bias[...] += jnp.arange(10.0)  # what is saved is the model as it is now
    try:
        run.save(tmp_path / "changed")
        changed = vit_jax.load_run(tmp_path / "changed").model.head.bias[...]
        np.testing.assert_array_equal(changed, run.model.head.bias[...])
    finally:
        run.model.head.bias[...] -= jnp.arange(10.0)
    description = run.export(str(tmp_path / "model.zip"), batch_size=1)
    assert description["classes"] == list("0123456789")
    with pytest.raises(ConfigError, match=r"model\.pt: name the file"):
        run.export("model.pt")


def test_a_callback_that_raises_ends_a_run_which_goes_on_until_one_ends_it(
    tmp_path, compilation_cache, monkeypatch
):
    """And each gets the metrics of each log."""

    def broken(step, metrics):
        if step == 4:
            raise RuntimeError("no space left for plots")

    config = tiny(compilation_cache, checkpoint__every="100%")
    with pytest.raises(RuntimeError, match="no space left for plots"):
        vit_jax.train(config, tmp_path, callbacks=[broken])
    assert reading.find_checkpoint(tmp_path).name == "4"

    seen, compared = {}, []
    monkeypatch.setattr(Stragglers, "log", lambda _, step: compared.append(step))

    def on_log(step, metrics):
        seen.setdefault(step, {}).update(metrics)
        return step >= 8

    result = vit_jax.train(config, tmp_path, callbacks=[on_log])
    # No evaluation was due at step 4: there are as many as in a run without a failure.
    assert list(seen) == [8] and result["step"] == 8
    assert compared == [8], "who is slow is looked for at each log"
    assert seen[8]["loss"] > 0 and seen[8]["eval/accuracy"] == result["accuracy"]
    # Ended is ended.
    assert vit_jax.train(config, tmp_path)["step"] == 8


def test_names_of_timm_are_known_and_offline_it_says_what_to_do(monkeypatch, tmp_path):
    assert (
        remote.timm_address("vit_base_patch16_224")
        == "hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k"
    )
    assert remote.timm_address("vit_base_patch16_224.nonsense") == ""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    remote.fetch.cache_clear()
    name = "vit_base_patch16_224.augreg_in21k"
    for call in (vit_jax.create_model, vit_jax.load, vit_jax.load_run):
        with pytest.raises(CheckpointError, match=f"hf download timm/{name}"):
            call(name)
    assert vit_jax.create_model("ViT-mu/16", image_size=32, num_classes=0).config.width == 32


def test_a_mistyped_name_of_timm_gets_the_nearest():
    with pytest.raises(CheckpointError, match="did you mean 'vit_base_patch16_224.augreg_in21k'"):
        vit_jax.load_run("vit_base_patch16_224.augreg_in21kk")


def test_models_are_listed_by_patterns():
    assert {"ViT-B/16", "ViT-L/16"} <= set(vit_jax.list_models("ViT-*/16"))
    assert "ViT-B/32" not in vit_jax.list_models("ViT-*/16")
    published = vit_jax.list_models("ViT-*/16", pretrained=True)
    assert "vit_base_patch16_224.augreg_in21k" in published
    assert not any("patch32" in name for name in published)
    assert vit_jax.list_models("Mixer-L/16", pretrained=True) == vit_jax.list_models(
        "mixer_l16*", pretrained=True
    )


def test_a_transform_gives_one_image_what_preprocess_gives_several(run, photo, pixels):
    transform = pickle.loads(pickle.dumps(run.transform))  # as a loader sends it to its workers
    np.testing.assert_allclose(transform(photo), run.preprocess(photo)[0], rtol=1e-6, atol=1e-6)
    assert transform(pixels).dtype == np.float32
    with pytest.raises(ConfigError, match="one image at a time"):
        transform([photo])


def test_an_export_refuses_a_precision_that_there_is_not(run, tmp_path):
    with pytest.raises(ConfigError, match="precision='int4': must be float32 or bfloat16 or int8"):
        run.export(str(tmp_path / "m.onnx"), precision="int4")


@pytest.mark.parametrize(
    ("name", "pointer"),
    [
        ("predict", "run = vit_jax.load_run(CHECKPOINT); run(IMAGES)"),
        ("evaluate", "run.evaluate(DATA)"),
        ("serve", "it is a command, 'vit_jax serve --help'"),
        ("creat_model", "did you mean 'create_model'"),
        ("Model", "vit_jax' has no attribute 'Model'"),
    ],
)
def test_a_name_that_is_not_there_points_to_what_is(name, pointer):
    with pytest.raises(AttributeError, match=re.escape(pointer)):
        getattr(vit_jax, name)


def test_a_pointer_names_what_there_is():
    assert all(name == "predict" or hasattr(vit_jax.Run, name) for name in vit_jax._METHODS)
    assert set(vit_jax._COMMANDS) <= set(COMMANDS)


def test_errors_are_public_names():
    assert issubclass(vit_jax.BadImage, vit_jax.DataError)
    for error in (vit_jax.ConfigError, vit_jax.CheckpointError, vit_jax.DataError):
        assert issubclass(error, vit_jax.UserError)


def test_help_lists_the_public_names():
    text = pydoc.plaintext.document(vit_jax)
    for name in vit_jax.__all__:
        assert f"{name}(" in text or f"class {name}" in text, name
