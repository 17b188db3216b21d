"""timm's files against timm itself: its weights here, ours there, the same logits and bytes.

timm is no dependency, because torchvision, which it imports, must match torch. To run these tests:
`pip install --no-deps timm`; torchvision is stubbed below where it is not there. Without timm or
torch they are skipped.
"""

import copy
import csv
import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests import lazily, without_torchvision
from tests.interchange import zoo
from tests.models import oracles
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import published, registry
from vit_jax.models.patch_kernels import resize_patch_embedding
from vit_jax.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD

torch = lazily.Package("torch")

VIT = dict(
    patch_size=4, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2.0, num_classes=5, img_size=12
)
# Arguments of timm's VisionTransformer, and what must be recognised beside the heads, which no tensor tells.
VITS = {
    "token": ({}, dict(pool="token", position_of_class=True)),
    "token without its own position": (dict(no_embed_class=True), dict(position_of_class=False)),
    "mean": (dict(class_token=False, global_pool="avg", fc_norm=False), dict(pool="mean")),
    "map": (dict(class_token=False, global_pool="map"), dict(pool="map")),
    "registers": (dict(reg_tokens=3, no_embed_class=True), dict(registers=3)),
    "registers and mean": (
        dict(
            reg_tokens=2, no_embed_class=True, class_token=False, global_pool="avg", fc_norm=False
        ),
        dict(registers=2, pool="mean"),
    ),
    "normed queries": (dict(qk_norm=True), dict(qk_norm=True)),
    "no head": (dict(num_classes=0), dict(num_classes=0)),
    "another patch and size": (dict(patch_size=8, img_size=32), dict(patch=8, image_size=32)),
}
MIXER = dict(
    patch_size=4, embed_dim=32, num_blocks=2, mlp_ratio=(0.5, 2.0), num_classes=5, img_size=12
)


@pytest.fixture(scope="module")
def theirs():
    """timm's modules for models, imported without torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    return without_torchvision.timm_models()


def randomize(model, scale=0.3):
    """Weights that hide nothing: norms near 1, the rest around 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(is_norm + noise * scale / (3 if is_norm else 1))
    return model.eval()


def images(size, count=2):
    return np.random.default_rng(0).uniform(-1, 1, (count, size, size, 3)).astype(np.float32)


def their_logits(model, x):
    """In float64, so that the rounding in a comparison is ours alone."""
    x = torch.from_numpy(x).double().permute(0, 3, 1, 2)
    with torch.no_grad():
        return copy.deepcopy(model).double()(x).numpy()


def our_output(checkpoint, x):
    definition, _ = registry.abstract(checkpoint.model_config)
    params = jax.tree.map(np.asarray, checkpoint.params)
    return jax.jit(lambda p, x: nnx.merge(definition, p)(x))(params, x)


def save(model, path):
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    specs = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    safetensors.write(path, tensors.items(), specs, {})
    return path


def check_both_ways(model, tmp_path, **overrides):
    """Theirs loads here with the same logits; written again it has the same bytes, and loads there strictly."""
    path = save(model, tmp_path / "theirs.safetensors")
    checkpoint = formats.read_checkpoint(path, **overrides)
    x = images(checkpoint.model_config.image_size)
    expected, output = their_logits(model, x), our_output(checkpoint, x)
    ours = output.features if output.logits is None else output.logits
    assert expected.std() > 0.05
    oracles.assert_close(ours, expected)
    formats.write_checkpoint(checkpoint, tmp_path / "ours.safetensors", "timm")
    before, after = (
        safetensors.read(tmp_path / f"{name}.safetensors")[0] for name in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    for name in before:
        assert np.asarray(before[name]).tobytes() == np.asarray(after[name]).tobytes(), name
    import safetensors.torch as official

    model.load_state_dict(official.load_file(tmp_path / "ours.safetensors"), strict=True)
    again = formats.read_checkpoint(tmp_path / "ours.safetensors")
    assert again.model_config == checkpoint.model_config
    return checkpoint


@pytest.mark.parametrize("kind", VITS)
def test_vits(theirs, tmp_path, kind):
    arguments, recognised = VITS[kind]
    model = randomize(theirs.VisionTransformer(**VIT | arguments))
    said = dict(heads=4, activation="gelu", pool=recognised.get("pool", "token"))
    config = check_both_ways(model, tmp_path, **said).model_config
    assert {name: getattr(config, name) for name in recognised} == recognised
    assert (config.activation, config.epsilon) == ("gelu", 1e-6)


def test_distilled_deits(theirs, tmp_path):
    model = randomize(theirs.VisionTransformerDistilled(**VIT))
    checkpoint = check_both_ways(model, tmp_path, heads=4)
    assert checkpoint.model_config.distilled and checkpoint.model_config.prefix == 2
    assert checkpoint.preprocessing.mean == IMAGENET_MEAN


def test_mixers(theirs, tmp_path):
    checkpoint = check_both_ways(randomize(theirs.MlpMixer(**MIXER)), tmp_path)
    assert (checkpoint.model_config.token_mlp_dim, checkpoint.model_config.image_size) == (16, 12)


def test_bits(theirs, tmp_path):
    from functools import partial

    from timm.layers import StdConv2d

    model = theirs.ResNetV2(
        layers=[2, 1, 1, 1],
        width_factor=0.5,
        num_classes=5,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-8),
    )
    checkpoint = check_both_ways(randomize(model), tmp_path, image_size=64)
    assert checkpoint.model_config.units == (2, 1, 1, 1) and checkpoint.model_config.root_zeros


@pytest.mark.parametrize(("layers", "patch", "size"), [((2, 1), 1, 32), ((), 4, 32)])
def test_hybrids(theirs, tmp_path, layers, patch, size):
    """With kernels of size 1 the different epsilons of standardisation do not show."""
    from timm.models import vision_transformer_hybrid as hybrid

    backbone = hybrid._resnetv2(layers=layers)
    model = theirs.VisionTransformer(
        **VIT
        | dict(
            img_size=size,
            patch_size=patch,
            embed_layer=lambda **k: hybrid.HybridEmbed(backbone, **k),
        )
    )
    checkpoint = check_both_ways(randomize(model, 1.0), tmp_path, heads=4)
    assert checkpoint.model_config.units == layers and checkpoint.model_config.patch == patch


def test_the_name_in_config_json_and_its_arguments_build_the_model_there(theirs, tmp_path):
    """A tanh GELU, names of classes and preprocessing travel in the folder."""
    import timm as package

    config = registry.model_config(
        "ViT-mu/4", image_size=12, depth=2, width=48, heads=2, mlp_dim=100, num_classes=3
    )
    params = patterns.map_named(
        lambda _, x: np.random.default_rng(0).normal(0, 0.3, x.shape).astype(np.float32),
        registry.abstract(config)[1],
    )
    prepared = formats.Preprocessing(12, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "central", 16)
    checkpoint = formats.LoadedCheckpoint(config, params, ("cat", "dog", "emu"), prepared)
    formats.write_checkpoint(checkpoint, tmp_path / "out", "timm")
    model = package.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = images(12)
    oracles.assert_close(our_output(checkpoint, x).logits, their_logits(model, x))
    again = formats.read_checkpoint(tmp_path / "out")
    assert again.model_config == config
    assert (again.classes, again.preprocessing) == (checkpoint.classes, prepared)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViT-mu/4", dict(image_size=12, position="sincos2d", pool="mean")),
        ("DeiT-Ti/4", dict(image_size=12, depth=1, distilled=True)),
        ("Mixer-S/16", dict(image_size=48, activation="gelu", token_mlp_dim=7, mlp_dim=333)),
        ("R+ViT-Ti/16", dict(image_size=64, depth=1)),
        pytest.param("BiT-R50x1", dict(image_size=32, root_zeros=True), marks=pytest.mark.slow),
    ],
)
def test_folders_of_every_family_are_built_there_by_their_name(theirs, tmp_path, name, options):
    import timm as package

    config = registry.model_config(name, num_classes=3, **options)
    rng = np.random.default_rng(0)
    like = registry.abstract(config)[1]
    params = patterns.map_named(
        lambda name, x: (rng.normal(0, 0.3, x.shape) + name.endswith("scale")).astype(np.float32),
        like,
    )
    checkpoint = formats.LoadedCheckpoint(config, params)
    formats.write_checkpoint(checkpoint, tmp_path / "out", "timm")
    model = package.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = images(config.image_size, 4)
    # In float64: the 50 layers of BiT with random weights lose 2e-5 to float32. The hybrid's make 4e-6 of constants.
    logits = zoo.program(config, "float64")(params, {}, x).logits
    oracles.assert_close(logits, their_logits(model, x))


@pytest.mark.parametrize("resize", [17, 231, 248, 255, 256, 448])
@pytest.mark.parametrize("crop", ["central", "resize"])
def test_preprocessing_comes_back_from_a_folder(tmp_path, crop, resize):
    prepared = formats.Preprocessing(8, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop, resize)
    checkpoint = dataclasses.replace(vit(), preprocessing=prepared)
    formats.write_checkpoint(checkpoint, tmp_path / "out", "timm")
    again = formats.read_checkpoint(tmp_path / "out").preprocessing
    assert again == (
        prepared if crop == "central" else dataclasses.replace(prepared, eval_resize=256)
    )


def test_the_published_crop_is_scaled_to_the_size_of_the_model_as_timm_scales_it(theirs, tmp_path):
    """A folder of timm's own training script at 160 pixels: floor(160 / 0.9), not 248."""
    folder = tmp_path / "20260101-deit_tiny_patch16_224-160"
    folder.mkdir()
    import timm as package

    model = package.create_model("deit_tiny_patch16_224", img_size=160, depth=1, num_classes=10)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "model_best.pth.tar")
    with pytest.raises(CheckpointError, match="depth"):  # it is not the published depth
        formats.read_checkpoint(folder / "model_best.pth.tar")
    model = package.create_model("deit_tiny_patch16_224", img_size=160, num_classes=10)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "model_best.pth.tar")
    read = formats.read_checkpoint(folder / "model_best.pth.tar").preprocessing
    assert (read.image_size, read.eval_resize, read.eval_crop) == (160, 177, "torchvision")


def test_every_published_crop_is_scaled_as_timm_scales_it():
    found = json.loads(published.FILE.read_text())["preprocessing"]
    for row in found:
        said = dict(zip(published._FIELDS, row, strict=True))
        for size in (160, 192, 384):
            expected = published.preprocessing_from(said | {"input_size": (3, size, size)})
            scaled = published.at_size(published.preprocessing_from(said), size, "test")
            assert scaled == expected, said


def vit(**options):
    config = registry.model_config(
        "ViT-mu/4", **dict(image_size=8, depth=1, num_classes=2, activation="gelu") | options
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), registry.abstract(config)[1])
    return formats.LoadedCheckpoint(config, params)


@pytest.mark.parametrize(
    ("options", "to", "words"),
    [
        (
            {"activation": "gelu_tanh"},
            "x.safetensors",
            "a file cannot tell timm of the activation 'gelu_tanh'",
        ),
        (
            {"epsilon": 1e-12},
            "x",
            "timm computes with epsilon = 1e-06 or 1e-05, this model with 1e-12",
        ),
        ({"representation": 7}, "x", "no layer before the head since version 0.8"),
        ({}, "x.pth", "pickles can run code"),
    ],
)
def test_what_timm_would_compute_otherwise_is_not_written(tmp_path, options, to, words):
    with pytest.raises(CheckpointError, match=words):
        formats.write_checkpoint(vit(**options), tmp_path / to, "timm")
    assert not list(tmp_path.iterdir())


def test_half_precision_is_read_exactly_and_written_as_it_was(tmp_path):
    formats.write_checkpoint(vit(), tmp_path / "a.safetensors", "timm")
    tensors, _ = safetensors.read(tmp_path / "a.safetensors")
    rng, half = np.random.default_rng(0), {}
    for i, (name, tensor) in enumerate(tensors.items()):
        dtype = (np.float16, safetensors.DTYPES["BF16"])[i % 2]
        half[name] = rng.standard_normal(tensor.shape).astype(dtype)
    specs = {name: (value.shape, value.dtype) for name, value in half.items()}
    safetensors.write(tmp_path / "half.safetensors", half.items(), specs, {})
    checkpoint = formats.read_checkpoint(tmp_path / "half.safetensors", heads=2)
    assert {np.asarray(leaf).dtype for leaf in jax.tree.leaves(checkpoint.params)} == {
        np.dtype("float32")
    }
    formats.write_checkpoint(checkpoint, tmp_path / "again.safetensors", "timm")
    again, _ = safetensors.read(tmp_path / "again.safetensors")
    for name, value in half.items():
        assert (
            again[name].dtype == value.dtype
            and np.asarray(again[name]).tobytes() == value.tobytes()
        )


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_in_it_is_an_error_and_no_code_runs(tmp_path, zipped):
    witness = tmp_path / "ran"
    torch.save(
        {"model": Evil(witness)}, tmp_path / "bad.pth", _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(CheckpointError, match="bad.pth is not read: .* which could run code"):
        formats.read_checkpoint(tmp_path / "bad.pth")
    assert not witness.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("norm.bias"), r"norm.bias \(32,\): missing in the file"),
        (
            lambda t: t.update({"blocks.0.ls3.gamma": np.ones(32)}),
            r"blocks.0.ls3.gamma \(32,\): in the file, but not",
        ),
        (
            lambda t: t.update({"head.weight": np.ones((2, 7))}),
            r"head.weight: \(2, 7\) in the file, \(2, 32\) in the",
        ),
        (
            lambda t: t.pop("patch_embed.proj.weight"),
            "looks like a vit model with the names of timm, but lacks 'patch_embed.proj.weight'",
        ),
        (
            lambda t: t.update(pos_embed=np.ones((1, 8, 32))),
            "position embedding of 8 rows is no square grid.*image_size='224x448'",
        ),
        (
            lambda t: t.update({"patch_embed.proj.weight": np.ones((32, 3))}),
            "looks like a vit model with the names of timm, but a tensor has other axes",
        ),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path, change, words):
    formats.write_checkpoint(vit(), tmp_path / "a.safetensors", "timm")
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    change(tensors)
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    safetensors.write(tmp_path / "b.safetensors", tensors.items(), specs, {})
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(tmp_path / "b.safetensors", heads=2)


@pytest.mark.parametrize("keep", [0.3, 0.9999, 12])
def test_a_file_cut_short_is_an_error(tmp_path, keep):
    formats.write_checkpoint(vit(), tmp_path / "a.safetensors", "timm")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[: keep if keep > 1 else int(len(data) * keep)])
    with pytest.raises(CheckpointError, match="b.safetensors is damaged"):
        formats.read_checkpoint(tmp_path / "b.safetensors")


def test_our_files_are_what_the_package_safetensors_reads_and_the_other_way_round(tmp_path):
    import safetensors.numpy as official

    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((2, 3)).astype(np.float32),
        "b": np.arange(3, dtype=np.int64),
        "c": np.float16(1),
    }
    tensors = {name: np.asarray(value) for name, value in tensors.items()}
    specs = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    safetensors.write(tmp_path / "ours", tensors.items(), specs, {"who": "me"})
    official.save_file(tensors, tmp_path / "theirs", {"who": "me"})
    for read in (official.load_file(tmp_path / "ours"), safetensors.read(tmp_path / "theirs")[0]):
        assert read.keys() == tensors.keys()
        for name, value in tensors.items():
            np.testing.assert_array_equal(np.asarray(read[name]), value)
    assert safetensors.read(tmp_path / "theirs")[1] == {"who": "me"}
    assert json.loads((tmp_path / "ours").read_bytes()[8:].split(b"}}")[0] + b"}}")[
        "__metadata__"
    ] == {"who": "me"}


@pytest.mark.parametrize("new", [(6, 6), (3, 5), (12, 12)])
def test_patches_are_resized_as_there_without_antialiasing(theirs, new):
    from timm.layers import resample_patch_embed

    kernel = np.random.default_rng(0).standard_normal((8, 8, 3, 4)).astype(np.float32)
    expected = resample_patch_embed(
        torch.from_numpy(kernel).permute(3, 2, 0, 1), new, "bilinear", antialias=False
    )
    np.testing.assert_allclose(
        resize_patch_embedding(kernel, new), expected.permute(2, 3, 1, 0), atol=2e-5
    )


@pytest.mark.slow
def test_the_real_deit_classifies_real_images(shared_data):
    """top-1 80.5 %, top-5 97.0 % of 200 images, as timm: short side 248 bicubic, middle 224."""
    checkpoint = formats.read_checkpoint(
        shared_data / "weights" / "deit_tiny_patch16_224_lnq.timm.safetensors"
    )
    assert checkpoint.model_config == registry.model_config("DeiT-Ti/16", init="vit")
    definition, _ = registry.abstract(checkpoint.model_config)
    params = jax.tree.map(np.asarray, checkpoint.params)
    logits = jax.jit(lambda p, x: nnx.merge(definition, p)(x).logits)
    folder = shared_data / "imagenet_sample"
    with (folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    ranks = []
    for start in range(0, len(rows), 20):
        batch = rows[start : start + 20]
        x = np.stack([prepared(folder / row["file"]) for row in batch])
        order = np.argsort(-np.asarray(logits(params, x)), axis=1)
        ranks += [list(o).index(int(row["label"])) for o, row in zip(order, batch, strict=True)]
    assert np.mean(np.array(ranks) < 1) == pytest.approx(0.805, abs=0.005)
    assert np.mean(np.array(ranks) < 5) == pytest.approx(0.970, abs=0.005)


def prepared(path):
    """(224, 224, 3) normalised, by Pillow; sides are rounded as in torchvision, which decides about three images."""
    image = Image.open(path).convert("RGB")
    image = image.resize(
        [248 * side // min(image.size) for side in image.size], Image.Resampling.BICUBIC
    )
    left, top = (round((side - 224) / 2) for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
    return (pixels - np.float32(IMAGENET_MEAN)) / np.float32(IMAGENET_STD)


def test_a_hybrid_on_a_resnet_with_batch_norms_is_refused_by_name(tmp_path):
    shapes = {
        "cls_token": (1, 1, 8), "pos_embed": (1, 50, 8), "patch_embed.proj.weight": (8, 16, 1, 1),
        "patch_embed.backbone.conv1.0.weight": (4, 3, 3, 3), "patch_embed.backbone.bn1.weight": (4,),
    }  # fmt: skip
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    specs = {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()}
    safetensors.write(tmp_path / "resnet26d.safetensors", tensors.items(), specs, {})
    with pytest.raises(CheckpointError, match="ResNet with batch norms .*resnet26d"):
        formats.read_checkpoint(tmp_path / "resnet26d.safetensors")
