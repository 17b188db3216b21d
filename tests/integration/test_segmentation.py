"""A model that segments, from files of images and masks to masks of other images, by commands as users type them."""

import itertools
import json
import zipfile

import cv2
import jax
import numpy as np
import onnxruntime
import pytest
import tensorflow_datasets as tfds
from PIL import Image

import vit_jax
from tests.data.tiny_tfds import write_tfds
from tests.repeats import slow_unless

TINY = (
    "--config.data.image_size=16", "--config.model.dtype=float32", "--config.batch_size=8",
    "--config.duration=2 steps", "--config.optim.warmup=0 steps", "--config.log.tensorboard=False",
    "--config.optim.late_warmup=0 steps",
    "--config.init_from=", "--config.data.mean=(0.5,)", "--config.data.std=(0.5,)",
    "--config.data.interpolation=bilinear", "--config.model.name=ViT-mu/8", "--config.eval.every=100%",
    "--config.audit.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    for split, count in (("train", 4), ("val", 2)):
        for i in range(count):
            labels = np.random.default_rng(i).integers(0, 3, (4, 5)).repeat(6, 0).repeat(6, 1)
            for kind, pixels in (("images", np.stack([labels * 90] * 3, -1)), ("masks", labels)):
                path = folder / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    (folder / "classes.csv").write_text("name\nroad\ncar\nsky\n")
    return folder


def test_a_folder_of_masks_becomes_a_model_that_writes_masks(command, scenes, tmp_path, caplog):
    run, out = tmp_path / "run", tmp_path / "maps"
    recipe = "--config=configs/segmentation.py:linear", f"--config.data.path={scenes}"
    code, printed, err = command("train", *recipe, *TINY, f"--workdir={run}", "--json")
    assert code == 0, err
    trained = json.loads(printed.splitlines()[-1])

    code, printed, err = command("evaluate", f"--checkpoint={run}", "--json")
    assert code == 0, err
    judged = json.loads(printed.splitlines()[-1])
    assert judged["images"] == 2 and judged["mean_iou"] == trained["mean_iou"]

    (tmp_path / "broken.jpg").write_bytes(b"no image")
    images = str(scenes / "images/val/0.png"), str(tmp_path / "broken.jpg")
    code, printed, err = command("predict", f"--checkpoint={run}", *images, f"--out={out}")
    assert code == 1 and "broken.jpg" in caplog.text
    mask = Image.open(out / "0.png")
    assert mask.mode == "P" and mask.size == (30, 24) and np.asarray(mask).max() < 3
    assert Image.open(out / "0_overlay.png").size[0] > 30
    found = json.loads((out / "maps.json").read_text())
    assert found["classes"] == {"road": 0, "car": 1, "sky": 2}
    assert sum(found["images"][0]["classes"].values()) == pytest.approx(1)

    code, _, err = command("predict", f"--checkpoint={run}", images[0])
    assert code == 2 and "--out=FOLDER" in err
    loaded = vit_jax.load_run(run).segment(images[0])
    assert np.array_equal(loaded.labels, np.asarray(mask)) and loaded.overlay().width > 30


@pytest.fixture(scope="module")
def runs():
    """(workdir, metrics) of finished runs, by recipe."""
    return {}


@pytest.fixture
def trained(command, runs, scenes, things, tmp_path_factory):
    """`trained(recipe)`: the workdir and the metrics of a run, which the first test that asks makes."""

    def train(recipe):
        if recipe not in runs:
            data, small = (things, SMALL_QUERIES) if recipe == "panoptic" else (scenes, ())
            workdir = tmp_path_factory.mktemp(recipe)
            config = f"--config=configs/segmentation.py:{recipe}", f"--config.data.path={data}"
            arguments = (*config, *TINY, *small, f"--workdir={workdir}", "--json")
            code, printed, err = command("train", *arguments)
            assert code == 0, err
            runs[recipe] = workdir, json.loads(printed.splitlines()[-1])
        return runs[recipe]

    return train


# Each recipe once and each format once.
@pytest.mark.parametrize(
    ("recipe", "to"),
    slow_unless(
        [("panoptic", "stablehlo")],
        [*itertools.product(("multilevel", "panoptic"), ("onnx", "stablehlo"))],
    ),
)
def test_an_exported_model_gives_scores_of_pixels(
    command, trained, scenes, things, tmp_path, to, recipe
):
    data = things if recipe == "panoptic" else scenes
    (run, _), out = trained(recipe), tmp_path / ("m.onnx" if to == "onnx" else "m.zip")
    code, printed, err = command(
        "export", f"--checkpoint={run}", f"--to={to}", f"--out={out}", f"--images={data}/images/val", "--json"
    )  # fmt: skip
    assert code == 0, err
    description = json.loads(printed.splitlines()[-1])
    compared = description["compared"]
    assert compared["images"] == 2 and compared["same_best_class"] > 0.99
    assert compared["largest_difference"] < 1e-4 and "labelled" not in compared
    of_outputs = {name for name in compared if name.startswith("largest_difference_of_")}
    assert len(of_outputs) == (3 if recipe == "panoptic" else 0)
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    if to == "onnx":
        session = onnxruntime.InferenceSession(out)
        names = [output.name for output in session.get_outputs()]
        found = session.run(None, {"images": images})
    else:
        program = jax.export.deserialize(bytearray(zipfile.ZipFile(out).read("model.jax")))
        names, found = list(description["outputs"]), jax.tree.leaves(program.call(images))
    shapes = {name: ["batch", *x.shape[1:]] for name, x in zip(names, found, strict=True)}
    assert shapes == description["outputs"] and shapes["scores"][-1] == len(description["classes"])
    if recipe == "panoptic":
        assert shapes["masks"][-1] == 5 and shapes["classes"] == ["batch", 5, 3]
        joined = np.einsum("bhwq,bqk->bhwk", found[1], found[2][..., :-1])
        np.testing.assert_allclose(joined, found[0], atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (("--config.data.name=digits", "--config.data.path="), "has none"),
        (("--config.augment.randaugment_layers=2",), "randaugment_layers = 2"),
        (("--config.augment.mixup=0.2",), "cannot learn from mixed images"),
        (("--config.data.permute=patches", "--config.data.permute_patch=8"), "config.data.permute"),
    ],
)
def test_what_masks_cannot_be_combined_with_is_refused_at_once(
    command, scenes, tmp_path, changes, message
):
    recipe = "--config=configs/segmentation.py:linear", f"--config.data.path={scenes}"
    workdir = tmp_path / "run"
    code, _, err = command("train", *recipe, *TINY, *changes, f"--workdir={workdir}", "--dry_run")
    assert code == 2 and message in err and not workdir.exists()


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A folder of TFDS with pets, whose masks have the values 1, 2 and 3."""
    splits = {}
    for split, count in (("train", 4), ("test", 2)):
        splits[split] = []
        for i in range(count):
            values = np.random.default_rng(i).integers(1, 4, (4, 5)).repeat(6, 0).repeat(6, 1)
            pixels = np.stack([values * 80] * 3, -1)
            mask, image = (cv2.imencode(".png", x.astype(np.uint8))[1] for x in (values, pixels))
            fields = {"image": image.tobytes(), "segmentation_mask": mask.tobytes()}
            splits[split].append(fields | {"label": [i]})
    features = {
        "image": tfds.features.Image(),
        "label": tfds.features.ClassLabel(num_classes=37),
        "segmentation_mask": tfds.features.Image(shape=(None, None, 1)),
    }
    folder = tmp_path_factory.mktemp("tfds")
    write_tfds(folder / "oxford_iiit_pet/4.0.0", features, splits)
    return folder


def test_masks_of_tfds_are_trained_on_and_judged_as_those_of_a_prepared_set(
    command, pets, tmp_path
):
    run, stored = tmp_path / "run", tmp_path / "set"
    data = "--config.data.name=oxford_iiit_pet", f"--config.data.path={pets}"
    recipe = "--config=configs/segmentation.py:linear", *data
    code, printed, err = command("train", *recipe, *TINY, f"--workdir={run}", "--json")
    assert code == 0, err
    trained = json.loads(printed.splitlines()[-1])
    assert {"iou/foreground", "iou/background"} <= trained.keys()
    for field in ("mask_feature=segmentation_mask", "image_feature=image"):  # the same: it resumes
        change = f"--config.data.{field}"
        code, _, err = command("train", *recipe, *TINY, change, f"--workdir={run}", "--dry_run")
        assert code == 0, err
    table = tmp_path / "classes.csv"
    table.write_text("name,value\nforeground,1\nbackground,2\nbackground,3\n")
    change = f"--config.data.mask_table={table}"
    code, _, err = command("train", *recipe, *TINY, change, f"--workdir={run}", "--dry_run")
    assert code == 2 and "the training images" in err

    code, _, err = command(
        "prepare", "oxford_iiit_pet", f"--out={stored}", f"--data_dir={pets}", "--mask_feature=auto"
    )
    assert code == 0, err
    for of_set in ((), ("--config.data.name=prepared", f"--config.data.path={stored}")):
        code, printed, err = command("evaluate", f"--checkpoint={run}", *of_set, "--json")
        assert code == 0, err
        judged = json.loads(printed.splitlines()[-1])
        assert judged["images"] == 2 and judged["mean_iou"] == trained["mean_iou"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (("--config.data.mask_feature=",), "set --config.data.name=masks"),
        (("--config.data.mask_feature=trimap",), "has no such feature"),
        (("--config.data.mask_feature=", "--config.data.mask_table=a.csv"), "has no effect without"),
        (("--config.data.mask_table=absent.csv",), "absent.csv does not exist"),
        (("--config.objective.name=supervised", "--config.objective.head=None"), "learns from no masks"),
        (("--config.data.name=masks", "--config.data.mask_table=a.csv"), "has no effect with"),
        (("--config.data.path=/nowhere",), "is not prepared in /nowhere"),
    ],
)  # fmt: skip
def test_features_that_cannot_be_used_are_refused_at_once(
    command, pets, tmp_path, changes, message
):
    data = "--config.data.name=oxford_iiit_pet", f"--config.data.path={pets}"
    recipe = "--config=configs/segmentation.py:linear", *data
    workdir = tmp_path / "run"
    code, _, err = command("train", *recipe, *TINY, *changes, f"--workdir={workdir}", "--dry_run")
    assert code == 2 and message in err and not workdir.exists()


def test_an_objective_that_needs_classes_of_images_refuses_masks(command, scenes, tmp_path):
    data = "--config.data.name=masks", f"--config.data.path={scenes}"
    workdir = tmp_path / "run"
    code, _, err = command("train", "--config=configs/digits.py", *data, f"--workdir={workdir}")
    assert code == 2 and "has masks" in err and not workdir.exists()


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """Panoptic masks in COCO's form: two cars below a sky."""
    folder = tmp_path_factory.mktemp("things")
    for split, count in (("train", 8), ("val", 2)):
        annotations = []
        for i in range(count):
            ids = np.zeros((24, 32), int)
            ids[:12], ids[12:, 2 : 8 + i], ids[12:, 20 + i :] = 1, 1000, 70_000
            colors = np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)
            for kind in ("images", "masks"):
                path = folder / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(colors).save(path)
            infos = [
                {"id": 1, "category_id": 5},
                *({"id": n, "category_id": 6} for n in (1000, 70_000)),
            ]
            annotations.append({"file_name": f"{i}.png", "segments_info": infos})
        categories = [
            {"id": 5, "name": "sky", "isthing": 0},
            {"id": 6, "name": "car", "isthing": 1},
        ]
        content = {"categories": categories, "annotations": annotations}
        (folder / "masks" / f"{split}.json").write_text(json.dumps(content))
    return folder


SMALL_QUERIES = (
    "--config.objective.queries=5", "--config.objective.segments=5", "--config.objective.points=32",
    "--config.objective.blocks=1", "--config.model.depth=1", "--config.model.width=32",
    "--config.model.heads=2", "--config.model.mlp_dim=32",
    "--config.eval.evaluators=(('segmentation',{'score':0.0,'overlap':0.0}),)",
)  # fmt: skip


def test_panoptic_masks_become_a_model_that_finds_things(command, trained, things, tmp_path):
    (run, metrics), out = trained("panoptic"), tmp_path / "maps"
    assert {"pq", "sq", "rq", "pq_things", "pq_stuff", "mean_iou"} <= metrics.keys()

    image = str(things / "images/val/0.png")
    code, _, err = command("predict", f"--checkpoint={run}", image, f"--out={out}")
    assert code == 0, err
    written = json.loads((out / "panoptic.json").read_text())
    assert [c["name"] for c in written["categories"]] == ["sky", "car"]
    (annotation,) = written["annotations"]
    colors = np.asarray(Image.open(out / annotation["file_name"]), int)
    ids = colors[..., 0] + colors[..., 1] * 256 + colors[..., 2] * 256**2
    assert set(np.unique(ids)) - {0} == {info["id"] for info in annotation["segments_info"]}
    assert colors.shape == (24, 32, 3) and written["images"][0]["width"] == 32

    code, _, err = command(
        "predict", f"--checkpoint={run}", image, f"--out={out}", "--windows=sliding"
    )
    assert code == 2 and "sees whole images" in err


@pytest.mark.parametrize(
    "changes, message",
    [
        (("--config.objective.queries=2",), "has 3 segments"),
        (
            ("--config.eval.evaluators=(('segmentation',{'windows':'sliding'}),)",),
            "sees whole images",
        ),
    ],
)
def test_what_things_cannot_be_learned_with_is_refused_at_once(
    command, things, tmp_path, changes, message
):
    recipe = "--config=configs/segmentation.py:panoptic", f"--config.data.path={things}"
    workdir = tmp_path / "run"
    small = (*TINY, *SMALL_QUERIES, *changes)
    code, _, err = command("train", *recipe, *small, f"--workdir={workdir}", "--dry_run")
    assert code == 2 and message in err and not workdir.exists()
