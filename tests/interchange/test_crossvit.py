"""CrossViTs of their authors' code and of timm: the same logits, names and bytes."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from tests import lazily, without_torchvision
from tests.interchange import test_timm
from tests.models import oracles
from tests.repeats import slow_unless
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.models import registry
from vit_jax.models.preprocessing import IMAGENET_MEAN
from vit_jax.models.zoo import crossvit

torch = lazily.Package("torch")

TINY = dict(
    num_classes=5, heads=2, width=16, mlp_dim=32, small_width=8, small_mlp_dim=24, depths=((1, 2), (1, 1))
)  # fmt: skip
# timm's names of ours.
NAMES = {
    f"crossvit_{name}_{size}": (ours, size)
    for name, ours, sizes in (
        ("tiny", "Ti", [240]), ("small", "S", [240]), ("base", "B", [240]), ("9", "9", [240]),
        ("15", "15", [240]), ("18", "18", [240]), ("9_dagger", "9-dagger", [240]),
        ("15_dagger", "15-dagger", [240, 408]), ("18_dagger", "18-dagger", [240, 408]),
    )
    for size in sizes
}  # fmt: skip


@pytest.fixture(scope="module")
def timm():
    """The package, imported without torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    without_torchvision.timm_models()
    import timm

    return timm


def random(config):
    rng = np.random.default_rng(0)
    like = registry.abstract(config)[1]
    return jax.tree.map(lambda x: rng.normal(0.2, 0.3, x.shape).astype(np.float32), like)


@pytest.mark.parametrize("kind", ["plain", "dagger", "mlp4"])
def test_the_authors_answers_are_ours_and_their_file_comes_back(shared_data, tmp_path, kind):
    path = shared_data / "oracle" / "relatives" / f"crossvit_{kind}"
    io, tensors = np.load(f"{path}.io.npz"), np.load(f"{path}.ckpt.npz")
    (heads, _) = json.loads(str(io["meta"]))["arguments"]["num_heads"]
    assert formats.detect(f"{path}.ckpt.npz") == "authors"
    checkpoint = formats.read_checkpoint(f"{path}.ckpt.npz", heads=heads)
    output = test_timm.our_output(checkpoint, io["images"])
    # Theirs are in float32: ours in float64 are 9e-6 from them too.
    oracles.assert_close(output.logits, io["logits"])
    oracles.assert_close(output.exits[0], io["logits_branch_0"])
    oracles.assert_close(output.exits[1], io["logits_branch_1"])
    oracles.assert_close(
        output.features, np.concatenate([io["features_0"], io["features_1"]], axis=1)
    )
    oracles.assert_close(output.tokens[:1], io["tokens_1"])
    formats.write_checkpoint(checkpoint, tmp_path / "again.safetensors", "authors")
    again = safetensors.read(tmp_path / "again.safetensors")[0]
    assert sorted(again) == sorted(tensors)
    for name in again:
        assert np.asarray(again[name]).tobytes() == tensors[name].tobytes(), name
    assert (
        formats.read_checkpoint(tmp_path / "again.safetensors").model_config
        == checkpoint.model_config
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_crossvit_of_timm_is_recognised_by_its_tensors(timm, name):
    ours, size = NAMES[name]
    with torch.device("meta"):
        tensors = timm.create_model(name).state_dict()
    shapes = {n: tuple(tensor.shape) for n, tensor in tensors.items()}
    conversion = conversions_of(crossvit)["timm"]
    found = crossvit.Config(**conversion.recognise(shapes, {}).options)
    assert found == registry.model_config(f"CrossViT-{ours}", image_size=size)
    assert conversion.preprocessing(found).mean == IMAGENET_MEAN
    assert conversion.preprocessing(found).eval_resize == {240: 274, 408: 408}[size]


@pytest.mark.parametrize("dagger", slow_unless([True], [False, True]))
def test_timm_and_we_compute_the_same(timm, tmp_path, dagger):
    model = timm.models.crossvit.CrossVit(
        img_size=48, img_scale=(1, 32 / 48), patch_size=(12, 16), embed_dim=(8, 16), num_heads=(2, 2),
        depth=((1, 2, 0), (1, 1, 0)), mlp_ratio=(3, 2, 1), num_classes=5, multi_conv=dagger,
    )  # fmt: skip
    checkpoint = test_timm.check_both_ways(test_timm.randomize(model), tmp_path, heads=2)
    assert checkpoint.model_config == registry.model_config(
        f"CrossViT-9{'-dagger' if dagger else ''}", image_size=48, **TINY
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_timm_and_we_compute_the_same_at_full_size(timm, tmp_path, name):
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    checkpoint = formats.read_checkpoint(test_timm.save(model, tmp_path / "theirs.safetensors"))
    x = test_timm.images(checkpoint.model_config.image_size, 1)
    expected = test_timm.their_logits(model, x)
    assert expected.std() > 0.05
    oracles.assert_close(test_timm.our_output(checkpoint, x).logits, expected)


@pytest.mark.parametrize("options", [{}, dict(large_image_size="64x96", convolutional_stem=True)])
def test_a_folder_of_timm_is_built_there_also_for_images_that_are_no_squares(
    timm, tmp_path, options
):
    config = registry.model_config("CrossViT-9", image_size="48x72", **TINY | options)
    checkpoint = formats.LoadedCheckpoint(config, random(config))
    if not options:  # 32x48 of 48x72
        assert config.large_size == (32, 48) and config.height_width == (48, 72)
    formats.write_checkpoint(checkpoint, tmp_path / "out", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = np.random.default_rng(0).uniform(-1, 1, (1, 48, 72, 3)).astype(np.float32)
    expected = test_timm.their_logits(model, x)
    oracles.assert_close(test_timm.our_output(checkpoint, x).logits, expected)
    assert formats.read_checkpoint(tmp_path / "out").model_config == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(activation="gelu_tanh"), "timm computes with activation = 'gelu'"),
        (dict(epsilon=1e-5), "timm computes with epsilon = 1e-06"),
        (dict(large_image_size="32x64"), "timm scales height and width by one factor"),
    ],
)
def test_what_timm_has_not_is_not_written(tmp_path, options, words):
    config = registry.model_config("CrossViT-9", image_size=48, **TINY | options)
    with pytest.raises(CheckpointError, match=words):
        formats.write_checkpoint(
            formats.LoadedCheckpoint(config, random(config)), tmp_path / "out", "timm"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("head.1.bias"), r"head.1.bias \(5,\): missing in the file"),
        (lambda t: t.pop("pos_embed.1"), "looks like a crossvit model with the names of authors, but lacks"),
        (lambda t: t.update(extra=np.ones(2)), r"extra \(2,\): in the file, but not in the model"),
        (
            lambda t: t.update({"blocks.0.fusion.0.0.norm1.weight": np.ones(16)}),
            "several cross-attentions in a stage",
        ),
    ],
)  # fmt: skip
def test_every_tensor_is_accounted_for(tmp_path, change, words):
    config = registry.model_config("CrossViT-9", image_size=48, **TINY)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, random(config)), tmp_path / "a.safetensors", "authors"
    )
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    change(tensors)
    np.savez(tmp_path / "b.npz", **{n: t.astype(np.float32) for n, t in tensors.items()})
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(tmp_path / "b.npz", heads=2)
