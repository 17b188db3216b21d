"""Training with images at sizes of their own: batches, the step, the run, and what cannot learn from them."""

import functools
import json
import shutil

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

import vit_jax
from tests.integration.conftest import TINY
from tests.training.test_step import make_config
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.data import native_sizes, sources, views
from vit_jax.data.augmentation import augment, patches
from vit_jax.data.batches import EvalBatches, TrainBatches, order_of, specs
from vit_jax.data.budget_batches import BudgetBatches
from vit_jax.data.order import repeated_places
from vit_jax.devices import meshes
from vit_jax.export.run import export_run
from vit_jax.inspection.run import inspect
from vit_jax.models import registry
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import cut_patches
from vit_jax.prediction.feature_files import write_features
from vit_jax.prediction.features import Wanted
from vit_jax.prediction.images import Named
from vit_jax.prediction.overrides import load_for_images
from vit_jax.serving.network import Network
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.gradient import make_gradient
from vit_jax.training.guards import check_batch

NATIVE = {"data.native_tokens": 16, "data.image_size": 32, "augment.mixup": 0.0}
SIZES = (20, 60), (90, 30), (33, 33), (8, 100), (1, 300)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of two classes, whose photos have several aspects: (height, width) of `SIZES`."""
    folder = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        for number in range(12):
            path = folder / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = SIZES[number % len(SIZES)]
            pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
            assert cv2.imwrite(str(path), pixels)
    return folder


def native_config(photos, **changes):
    options = {"data.name": "folder", "data.path": str(photos), "batch_size": 8}
    return resolve(make_config(**NATIVE | options | changes))


def test_batches_are_the_same_on_any_number_of_hosts(photos):
    config = native_config(photos)
    assert config.data.native_patch == 8
    source = sources.open_source(config.data, "train")

    def of_hosts(count):
        parts = []
        for host in range(count):
            batches = TrainBatches(source, config, np.arange(8).reshape(count, -1)[host])
            batch = batches.empty(3)
            batches.fill(batch, 3, slice(None))
            parts.append(batch)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    whole = of_hosts(1)
    assert whole["image"].shape == (8, 16, 192) and whole["grid"].shape == (8, 2)
    assert len({tuple(grid) for grid in whole["grid"].tolist()}) > 2
    counts = whole["grid"].prod(1)
    assert counts.max() <= 16 and not any(
        row[n:].any() for row, n in zip(whole["image"], counts, strict=True)
    )
    for count in (2, 4):
        for name, array in of_hosts(count).items():
            np.testing.assert_array_equal(array, whole[name])


def test_a_batch_has_one_of_several_lengths_drawn_by_step(photos):
    config = native_config(photos, **{"data.native_lengths": (4, 12, 30)})
    source = sources.open_source(config.data, "train")
    shapes = [spec["image"].shape for spec in specs(config, num_classes=2)]
    assert shapes == [(8, 4, 192), (8, 12, 192), (8, 30, 192)]
    batches = TrainBatches(source, config, np.arange(4))
    lengths = [batches.empty(step)["image"].shape[1] for step in range(300)]
    again = TrainBatches(source, config, np.arange(4, 8))
    assert lengths[100:] == [again.empty(step)["image"].shape[1] for step in range(100, 300)]
    assert all(lengths.count(length) == 100 for length in (4, 12, 30))
    assembly = assemble(config, num_classes=2, examples_per_epoch=12)
    whole = assembly.flops(0, 300)
    assert whole == assembly.flops(0, 100) + assembly.flops(100, 300)
    assert 0 < whole < 300 * assembly.step_flops


BUDGET = {
    "data.native_lengths": ((4, 2), (12, 1), (30, 1)), "data.native_budget": 120, "data.native_multiple": 4,
    "data.repeats": 2, "accumulate": 2,
}  # fmt: skip


def test_a_budget_of_patches_gives_every_host_its_rows_of_one_line_of_examples(photos):
    config = native_config(photos, **BUDGET)
    sizes = [len(spec["label"].shape) and spec["label"].shape[0] for spec in specs(config, 2)]
    assert sizes == [28, 8, 4] and views.images_per_step(config) == 17
    source = sources.open_source(config.data, "train")
    order = order_of(source, config.seed, "uniform")
    start = 0
    for step in range(8):
        hosts = [
            BudgetBatches(source, config, [np.arange(n).reshape(2, -1)[host] for n in sizes])
            for host in range(2)
        ]
        batches = [host.empty(step) for host in hosts]
        for host, batch in zip(hosts, batches, strict=True):
            host.fill(batch, step, slice(0, 64))
        size = sum(len(batch["label"]) for batch in batches)
        assert hosts[0].layout(step)[1] == size and views.images_before(config, step) == start
        ids = [i for host in hosts for i in host.examples(step, slice(0, 64))]
        line = (start + repeated_places(size, 2)) // 2
        assert ids == order(line).tolist()
        whole = BudgetBatches(source, config, [np.arange(n) for n in sizes])
        batch = whole.empty(step)
        whole.fill(batch, step, slice(0, 64))
        for name, array in batch.items():
            np.testing.assert_array_equal(array, np.concatenate([b[name] for b in batches]))
        start += size
    assert start == 2 * 4 * 17
    left_out = views.images_before(config, 3, [(1, 2)])
    assert left_out == views.images_before(config, 5) - sum(
        views.images_before(config, s + 1) - views.images_before(config, s) for s in (1, 2)
    )


def test_loss_and_rate_are_scaled_by_the_stated_rules():
    """A step of a batch of half the images, against one without a budget whose loss and rate are those."""
    options = {"batch_size": 8, "model.depth": 1, "optim.warmup": "0 steps", "optim.clip": 0.0}
    batch = {
        "image": np.random.default_rng(0).integers(0, 256, (4, 16, 192), np.uint8),
        "grid": np.full((4, 2), 4, np.int32), "label": np.arange(4, dtype=np.int32),
    }  # fmt: skip
    results, state = [], None
    for budget in (0, 64):
        given = {"data.native_budget": budget, "data.native_multiple": 4}
        given |= {"data.native_loss": "sqrt", "data.native_rate": "linear"}
        given |= {"optim.name": "sgd", "optim.weight_decay": 0.0} | options
        assembly = assemble(
            resolve(make_config(**NATIVE | given)), num_classes=10, examples_per_epoch=80
        )
        state = state or jax.jit(assembly.init)(jax.random.key(0))
        new, metrics = jax.device_get(jax.jit(assembly.train_step)(state, batch))
        results.append((optax.tree.sub(new.params, jax.device_get(state.params)), metrics))
    (plain, before), (scaled, after) = results
    loss, rate = 0.5**0.5, 0.5
    np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-6)
    np.testing.assert_allclose(after["gradient_norm"], loss * before["gradient_norm"], rtol=1e-5)
    np.testing.assert_allclose(after["learning_rate"], rate * before["learning_rate"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(scaled), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, loss * rate * b, rtol=1e-3, atol=1e-7)


def test_evaluation_sees_whole_images_and_fills_up_with_one_patch(photos):
    config = native_config(photos)
    source = sources.open_source(config.data, "test")
    batches = EvalBatches(source, config, np.arange(8), batch_size=8)
    batch = batches.empty(1)
    batches.fill(batch, 1, slice(None))
    assert batch["mask"].tolist() == [1.0] * 4 + [0.0] * 4  # 12 photos
    assert batch["grid"][4:].tolist() == [[1, 1]] * 4 and not batch["image"][4:].any()
    record = source[8]
    pixels = native_sizes.read_image(record.image, config.data, patch=8, tokens=16, name="")
    grid = tuple(batch["grid"][0].tolist())
    assert pixels.shape == (8 * grid[0], 8 * grid[1], 3)
    np.testing.assert_array_equal(
        batch["image"][0, : grid[0] * grid[1]], cut_patches(pixels[None], grid)[0]
    )


def test_a_crop_keeps_the_aspect_of_its_image():
    """As timm's RandomResizedCropToSequence: ratios are relative to the image's own."""
    data = make_config(**NATIVE | {"data.crop_aspect": (1.0, 1.0), "data.crop_area": (0.25, 0.25)})
    data = resolve(data).data
    wide = np.zeros((100, 400, 3), np.uint8)
    image = native_sizes.read_image(wide, data, patch=8, tokens=16, name="", draws=[0.5] * 40)
    assert image.shape == (16, 64, 3)


def test_flips_are_those_of_whole_images():
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 24, 3), np.uint8)
    key = jax.random.key(3)
    padded = np.zeros((6, 8, 192), np.uint8)
    padded[:, :6] = cut_patches(images, (2, 3))
    native = PatchBatch(jnp.asarray(padded), jnp.full((6, 2), jnp.array([2, 3]), jnp.int32))
    flipped = patches.flip(native, key, 3)
    expected = augment.flip(images, key)
    assert 0 < np.sum(np.any(expected != images, (1, 2, 3))) < 6
    np.testing.assert_array_equal(flipped.patches[:, :6], cut_patches(expected, (2, 3)))
    assert not flipped.patches[:, 6:].any()


def test_the_step_of_square_images_is_the_ordinary_one():
    """The same gradients and metrics, of flips and parts of a batch too; and as many operations."""
    changes = {"batch_size": 4, "accumulate": 2, "model.depth": 1}
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (4, 32, 32, 3), np.uint8)
    label = jnp.arange(4, dtype=jnp.int32)
    batches = [
        {"image": image, "label": label},
        {"image": cut_patches(image, (4, 4)), "grid": np.full((4, 2), 4, np.int32), "label": label},
    ]
    results = []
    for batch, options in zip(batches, ({"data.native_tokens": 0}, {}), strict=True):
        config = resolve(make_config(**NATIVE | changes | options))
        assembly = assemble(config, num_classes=10, examples_per_epoch=160)
        gradient_of = make_gradient(assembly.networks, assembly.learning_rate, config)
        state = jax.jit(assembly.init)(jax.random.key(0))
        results.append((*jax.jit(gradient_of)(state, batch)[:2], assembly.step_flops))
    (grads, metrics, flops), (native_grads, native_metrics, native_flops) = results
    assert flops == native_flops
    np.testing.assert_allclose(native_metrics["loss"], metrics["loss"], rtol=1e-5)
    for name, grad in patterns.named(grads).items():
        ours = patterns.named(native_grads)[name]
        np.testing.assert_allclose(ours, grad, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment.blur": 0.2}, "config.augment.blur = 0.2 changes whole images"),
        ({"augment.three_augment": True}, "three_augment = True changes whole images"),
        ({"data.train_crop": "pad"}, "config.data.train_crop = 'pad' cuts images of one size"),
        ({"data.native_tokens": 3}, "less than a row of patches .* 4: set it to about 16"),
        ({"data.native_lengths": (16, 2)}, "native_lengths: 2 is less than a row"),
        ({"data.native_lengths": (16, 16)}, "native_lengths = .* has a length twice"),
        ({"data.native_lengths": ((16, 0),)}, "native_lengths: .16, 0. is no number of patches"),
        ({"data.native_budget": 100}, "native_budget = 100 .* 6 images of 16 patches, fewer than .*128"),
        ({"data.native_budget": 20, "data.native_lengths": (16, 32), "data.native_multiple": 1}, "0 images of 32"),
        ({"model.position": "relative"}, "its layers have relative positions of one grid"),
        ({"model.position": "bias2d"}, "its layers have bias2d positions of one grid"),
        ({"data.native_budget": 640, "accumulate": 16}, "40 images is not divisible by .*16.*native_multiple"),
        ({"data.native_budget": 640, "data.native_rate": "sqrt", "optim.name": "schedule_free"}, "schedule_free"),
        ({"data.native_patch": 16}, "the model's patch is 8"),
        ({"data.size_schedule": ((0, 16), (0.5, 32))}, "config.data.size_schedule"),
        ({"eval.evaluators": (("loss", {}),)}, "the evaluator 'loss' .* measures images of one size"),
        ({"objective.name": "mae"}, "the objective 'mae' learns from images of one size"),
        ({"data.permute": "patches", "data.permute_patch": 8}, "permutes images of one size"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_with_patches_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=f"config.data.native_tokens.*{message}|{message}"):
        resolve(make_config(**NATIVE | changes))


def test_batches_that_devices_do_not_divide_are_refused(photos):
    mesh = meshes.make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    config = native_config(photos, **BUDGET | {"accumulate": 1, "data.native_multiple": 2})
    with pytest.raises(
        ConfigError, match="native_multiple: .*30 cannot .* 8 devices.*multiple of 8"
    ):
        check_batch(config, mesh)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("digits.py:mixer", "MLPs over tokens have a weight for each token"),
        ("digits.py:hybrid", "patches are those of a ResNet's map of the whole image"),
        ("digits.py:resnet", "layers work on the whole grid"),
        ("t2t_vit.py:smoke", "patches overlap"),
    ],
)
def test_a_family_of_one_size_says_why(recipe, reason):
    config = vit_jax.load_config(f"configs/{recipe}")
    config.data.native_tokens, config.data.train_crop = 64, "resize"
    with pytest.raises(ConfigError, match=f"native_tokens = 64: .* for its {reason}"):
        resolve(config)


def train(photos, workdir, cache, **changes):
    """The config of a run on the photos, its folder, and what it gave."""
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(
        TINY | NATIVE | {"compilation_cache": cache, "model.depth": 1, "batch_size": 8}
        | {"data.name": "folder", "data.path": str(photos), "data.train_crop": "inception"}
        | {"data.eval_split": "test", "data.train_split": "train"} | changes
    )  # fmt: skip
    config.checkpoint.keep = 9
    return config, workdir, vit_jax.train(config, workdir)


@pytest.mark.slow
def test_a_resumed_run_of_two_lengths_is_the_same_to_the_bit(photos, tmp_path, compilation_cache):
    config, workdir, result = train(
        photos, tmp_path / "whole", compilation_cache, **{
            "data.native_lengths": (8, (16, 2)), "data.native_budget": 128, "augment.mixup": 0.2,
            "augment.cutmix": 1.0, "augment.erasing": 0.5,
        },
    )  # fmt: skip
    killed = shutil.copytree(workdir, tmp_path / "killed")
    for folder in (killed / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > 4:
            shutil.rmtree(folder)
    assert vit_jax.train(config, killed)["loss"] == result["loss"]
    whole, again = (
        patterns.named(registry.split(vit_jax.load_run(folder).model)[1].params)
        for folder in (workdir, killed)
    )
    for name, x in again.items():
        np.testing.assert_array_equal(x, whole[name], err_msg=name)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["examples"] for line in lines if "examples" in line}
    before = functools.partial(views.images_before, resolve(config))
    assert logged == {step: before(step) for step in logged} and before(3) == 16 + 8 + 8


def test_a_run_trained_so_is_used_so(photos, tmp_path, compilation_cache):
    _, workdir, _ = train(photos, tmp_path / "run", compilation_cache, duration="1 steps")
    run = vit_jax.load_run(workdir)
    wide, tall = (np.random.default_rng(0).integers(0, 256, (*n, 3), np.uint8) for n in SIZES[:2])
    np.testing.assert_array_equal(
        run.features([wide, tall]), run.features([wide, tall], native_tokens=16)
    )
    assert np.abs(run.features([wide]) - run.features([wide], native_tokens=0)).max() > 1e-3
    (maps,) = run.features([wide, tall], layers=[-1], maps=True)
    grids = [native_sizes.choose_grid(*x.shape[:2], patch=8, tokens=16) for x in (wide, tall)]
    assert [x.shape[:2] for x in maps] == grids
    ((alone,),) = run.features([tall], layers=[-1], maps=True)
    np.testing.assert_allclose(alone, maps[1], atol=1e-5)
    write_features(
        load_for_images(workdir, (), "predict"), [Named("wide", wide), Named("tall", tall)],
        epath.Path(tmp_path) / "f.npz", batch_size=1, wanted=Wanted(layers=(-1,), maps=True),
    )  # fmt: skip
    with np.load(tmp_path / "f.npz") as file:
        assert file.files == ["features", "grids", "blocks.0.map.0", "blocks.0.map.1", "files"]
        for number, expected in enumerate(maps):
            np.testing.assert_allclose(file[f"blocks.0.map.{number}"], expected, atol=1e-5)
    assert run.evaluate(model__patch=16)["examples"] == 12
    page = functools.partial(inspect, workdir, [str(next(photos.rglob("*.png")))], tmp_path)
    for refused in (lambda: Network(run, 1), lambda: export_run(run, "x.onnx", to="onnx"), page):
        with pytest.raises(
            ConfigError, match="native_tokens = 16.*set --config.data.native_tokens=0"
        ):
            refused()
