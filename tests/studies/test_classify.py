"""`vit_jax classify` on a phone's folder: all that is wrong with it is counted, no copy is on both sides, and it ends
with a model and a page. Photos with several labels are judged against scikit-learn.
"""

import collections
import csv
import io
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

import vit_jax
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.evaluation.mistakes import surest_mistakes
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.prediction.images import Named
from vit_jax.prediction.overrides import load_to_evaluate
from vit_jax.prediction.predict import predict
from vit_jax.studies import classify, time_budget
from vit_jax.studies.linear_head import Speed
from vit_jax.studies.time_budget import HEAD, WHOLE

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)
CLASSES = ("Füße", "🐈 cat", "bird", "dog", "house")


def photo_files(shared_data):
    """The 200 photos with a class of five each: (label number, path)."""
    rows = csv.DictReader((shared_data / "imagenet_sample/labels.csv").open())
    return [
        (int(row["label"]) // 200, shared_data / "imagenet_sample" / row["file"]) for row in rows
    ]


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def phone(shared_data, root, files, *, copies, twice, side):
    """A folder as a phone leaves it: `files` image files of five classes, other crops and qualities of the 200 photos,
    of which `copies` are copies of others and `twice` of these in another class.
    """
    random, photos = np.random.default_rng(0), photo_files(shared_data)
    random.shuffle(photos)
    odd = 4  # an empty one, a cut one, HEIC, and a name with signs
    for folder in (*CLASSES, "empty"):
        (root / folder).mkdir(parents=True)
    (root / CLASSES[0] / "empty.jpg").write_bytes(b"")
    whole = []
    for number in range(files - copies - odd):
        label, path = photos[number % len(photos)]
        image = Image.open(path).convert("RGB")
        corner = number // len(photos)
        image = image.crop((corner, corner, image.width, image.height))
        image.thumbnail((side, side))
        exif = Image.Exif()
        if number % 7 == 0:
            exif[0x0112] = 6
        mode = "CMYK" if number % 11 == 0 else "RGB"
        content = encoded(image.convert(mode), exif=exif, quality=int(random.integers(70, 95)))
        whole.append((label, f"IMG_{number:04}", content))
        (root / CLASSES[label] / f"IMG_{number:04}.jpg").write_bytes(content)
    (root / CLASSES[1] / "cut.jpg").write_bytes(whole[0][2][:-200])
    (root / CLASSES[2] / "photo.heic").write_bytes(HEIC)
    (root / CLASSES[3] / "Grün 🌳.png").write_bytes(
        encoded(Image.open(photos[0][1]).resize((side, side)), "PNG")
    )
    for number in range(copies):
        label, name, content = whole[number]
        place = (label + 1) % 5 if number < twice else label
        (root / CLASSES[place] / f"{name} (1).jpg").write_bytes(content)
    (root / CLASSES[3] / "._IMG_0001.jpg").write_bytes(b"\0\5\26\7AppleDouble")
    (root / CLASSES[3] / "film.mov").write_bytes(b"film")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A tiny ViT with random weights, of 16 classes that are none of the photos'."""
    options = {"num_classes": 16, "depth": 1, "width": 32, "heads": 2, "mlp_dim": 32}
    config = registry.model_config("ViT-Ti/16", image_size=32, **options)
    params = jax.jit(lambda key: registry.initialize(config, key))(jax.random.key(0))
    classes = tuple(map(str, range(16)))
    path = tmp_path_factory.mktemp("weights") / "tiny"
    checkpoint = formats.LoadedCheckpoint(config, params, classes, formats.Preprocessing(32))
    formats.write_checkpoint(checkpoint, path, "orbax")
    return str(path)


def test_a_phones_folder_ends_with_a_head_and_every_finding_counted(shared_data, tmp_path, weights):
    photos = phone(shared_data, tmp_path / "photos", 90, copies=10, twice=3, side=64)
    out = tmp_path / "out"
    result = classify.classify(photos, out, seconds=1e-3, weights=weights)
    check_findings(result["photos"], files=90, copies=10, twice=3)
    assert result["way"].startswith(HEAD) and result["accuracy"] == result["head_accuracy"]
    kept = json.loads((out / "photos.json").read_text("utf-8"))
    assert kept == result["photos"] and (out / "commands.sh").read_text().count("vit_jax ") == 5
    page = (out / "report.html").read_text("utf-8")
    assert not re.search(r'(src|href)="(?!data:|#)', page) and "🐈 cat" in page and "Füße" in page
    judged = out / "head/judged"
    rows = list(csv.DictReader((judged / "images.csv").open(encoding="utf-8")))
    wrong = [row for row in rows if row["class"] != row["predicted"]]
    right = 1 - len(wrong) / len(rows)
    assert len(rows) == result["held_out"] and right == pytest.approx(result["accuracy"])
    shown = list(csv.DictReader((judged / "mistakes.csv").open(encoding="utf-8")))
    assert {row["image"] for row in shown} == {row["image"] for row in wrong} and shown
    assert all((judged / row["picture"]).read_bytes()[:2] == b"\xff\xd8" for row in shown)
    sure = [float(row["probability"]) for row in shown]
    assert sure == sorted(sure, reverse=True) and page.count("<figure>") == len(shown)
    # The head that was written is the one that was measured, and the same command has nothing left to do.
    again = classify.classify(photos, out, seconds=1e-3, weights=weights)
    assert again["accuracy"] == result["accuracy"]
    with pytest.raises(ConfigError, match="made with --time in seconds = 0.001, not 5"):
        classify.classify(photos, out, seconds=5, weights=weights)


def test_the_whole_model_trains_where_there_is_time_and_the_page_is_of_the_run(
    shared_data, tmp_path, weights, compilation_cache
):
    photos = phone(shared_data, tmp_path / "photos", 40, copies=2, twice=1, side=48)
    changes = [("duration", "3 steps"), ("optim.warmup", "1 steps"), ("log.tensorboard", "False")]
    changes += [("compilation_cache", compilation_cache)]
    result = classify.classify(
        photos, tmp_path / "out", seconds=1e6, weights=weights, changes=changes
    )
    assert result["way"].startswith(WHOLE) and result["head_accuracy"] is not None
    run, config = load_to_evaluate(tmp_path / "out/run", ())
    assert run.step == 3 and set(run.classes) == {*CLASSES} and config.data.holdout_by == "class"
    page = (tmp_path / "out/report.html").read_text("utf-8")
    for heading in ("Accuracy", "The surest mistakes", "The photos", "How it was trained", "Table"):
        assert f">{heading}</h2>" in page, heading


def scenes(folder, count):
    """A list of images with any of three colours, each in a place of its own, and of a rare dark half; some have none.

    Returns:
      The list, and the labels of each image by its name.
    """
    random = np.random.default_rng(0)
    labels = {}
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        pixels = random.integers(0, 120, (32, 32, 3), np.uint8)
        *colours, dark = random.random(4) < (0.5, 0.35, 0.3, 0.15)
        for channel, is_there in enumerate(colours):
            pixels[:16, 10 * channel : 10 * channel + 10, channel] += np.uint8(130 * is_there)
        pixels[16:] *= not dark
        path = folder / f"images/{number}.png"
        Image.fromarray(pixels).save(path)
        named = zip(("red", "green", "blue", "dark"), (*colours, dark), strict=True)
        labels[str(path)] = [name for name, is_there in named if is_there]
    rows = [f"{path},{'|'.join(names)}" for path, names in labels.items()]
    (folder / "list.csv").write_text("\n".join(["path,labels", *rows]) + "\n")
    return folder / "list.csv", labels


def check_several_labels(result, labels):
    """What `classify` says of several labels, against scikit-learn on the answers of the checkpoint that it names."""
    assert result["metric"] == "mean_average_precision"
    judged = pathlib.Path(result["report"]).parent.rglob("judged/images.csv")
    held_out = [row["image"] for row in csv.DictReader(next(judged).open())]
    assert len(held_out) == result["held_out"] == result["photos"]["test"]
    run = vit_jax.load_run(result["checkpoint"])
    files = [Named(name) for name in held_out]
    answers = predict(run, files, topk=len(run.classes), batch_size=16)
    shape = (len(held_out), len(run.classes))
    targets, probabilities, decided = (np.zeros(shape) for _ in range(3))
    for row, (name, answer) in enumerate(zip(held_out, answers, strict=True)):
        for place, probability, yes in zip(
            answer.names, answer.probabilities, answer.decided, strict=True
        ):
            column = run.classes.index(place)
            targets[row, column] = place in labels[name]
            probabilities[row, column] = probability
            decided[row, column] = yes
    assert 0 < result["photos"]["unlabelled"][1] == np.sum(~targets.any(-1))
    precision = metrics.average_precision_score(targets, probabilities, average="macro")
    assert result["mean_average_precision"] == pytest.approx(precision, abs=1e-6)
    for average in ("macro", "micro"):
        name = "f1" if average == "macro" else "f1_micro"
        f1 = metrics.f1_score(targets, decided, average=average)
        assert result[name] == pytest.approx(f1, abs=1e-6)
    chance = targets.mean()
    assert precision > 1.5 * chance
    page = pathlib.Path(result["report"]).read_text("utf-8")
    assert f"Mean average precision {precision:.1%} on {len(held_out)} held-out images" in page
    assert "average precision</th>" in page and "was chosen on these very images" in page


def test_photos_with_several_labels_are_judged_by_average_precision(tmp_path, weights):
    listed, labels = scenes(tmp_path / "scenes", 90)
    arguments = {"seconds": 1e-3, "weights": weights}
    with pytest.raises(ConfigError, match="--config.data.label_separator"):
        classify.classify(listed, tmp_path / "out", **arguments)
    separated = [("data.label_separator", "|")]
    result = classify.classify(listed, tmp_path / "out", **arguments, changes=separated)
    assert result["way"].startswith(HEAD)
    of_head = result["head_mean_average_precision"]
    assert result["mean_average_precision"] == pytest.approx(of_head, abs=1e-3)
    check_several_labels(result, labels)
    counts = result["photos"]["classes"]
    for name in ("red", "green", "blue", "dark"):
        assert sum(counts[name]) == sum(name in names for names in labels.values())
    commands = (tmp_path / "out/commands.sh").read_text()
    assert "--evaluators=classification" in commands and "convert" in commands


def test_labels_on_one_side_alone_are_refused(tmp_path, weights):
    listed, _ = scenes(tmp_path / "scenes", 30)
    rows = [row.split(",") for row in listed.read_text().splitlines()[1:]]
    lines = [
        f"{path},{'' if number < 5 else 'red;blue'},{'test' if number < 5 else 'train'}"
        for number, (path, _) in enumerate(rows)
    ]
    listed.write_text("\n".join(["path,labels,split", *lines]) + "\n")
    with pytest.raises(ConfigError, match="no image that is held out .* has a label"):
        classify.classify(listed, tmp_path / "out", weights=weights)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_trains_the_whole_model_for_several_labels(command, tmp_path, weights):
    listed, labels = scenes(tmp_path / "scenes", 200)
    fields = [
        "--config.duration=60 steps",
        "--config.optim.warmup=5 steps",
        "--config.data.label_separator=|",
    ]
    code, out, err = command(
        "classify", listed, f"--weights={weights}", "--time=1h", f"--out={tmp_path / 'out'}", "--json", *fields
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["way"].startswith(WHOLE)
    value = result["mean_average_precision"]
    assert value >= result["head_mean_average_precision"] > 0
    check_several_labels(result, labels)
    run, config = load_to_evaluate(tmp_path / "out/run", ())
    assert run.step == 60 and config.objective.loss == "sigmoid"
    page = pathlib.Path(result["report"]).read_text("utf-8")
    assert "mean average precision on held-out photos" in page
    code, printed, err = command(
        "classify",
        listed,
        f"--weights={weights}",
        "--time=1h",
        f"--out={tmp_path / 'out'}",
        *fields,
    )
    assert code == 0, err
    assert f"mean average precision {value:.1%} on {result['held_out']} photos" in printed


@pytest.mark.slow
def test_two_thousand_files_of_a_phone(shared_data, tmp_path, weights):
    photos = phone(shared_data, tmp_path / "photos", 2000, copies=100, twice=19, side=320)
    result = classify.classify(photos, tmp_path / "out", seconds=1, weights=weights)
    check_findings(result["photos"], files=2000, copies=100, twice=19)


def check_findings(found, *, files, copies, twice):
    assert found["train"] + found["test"] == files
    assert {name.rsplit("/")[-1] for name in found["unreadable"]} == {
        "empty.jpg", "cut.jpg", "photo.heic",
    }  # fmt: skip
    assert found["copied"] == copies and len(found["conflicting_labels"]) == twice
    assert found["copies_across_sides"] == {"test": []}
    assert found["empty_classes"] == ["empty"] and found["hidden_files"] == 1
    assert [name.rsplit("/")[-1] for name, _ in found["no_images"]] == ["film.mov"]
    readable = collections.Counter({name: sum(both) for name, both in found["classes"].items()})
    assert set(readable) == set(CLASSES) and readable.total() == files - 3
    assert all(train and test for train, test in found["classes"].values())


def test_what_cannot_be_classified_is_refused(tmp_path, weights):
    (tmp_path / "photos").mkdir()
    image = encoded(Image.new("RGB", (32, 32)))
    for number in range(40):  # so that none of two sides is empty
        (tmp_path / f"photos/{number}.jpg").write_bytes(image)
    with pytest.raises(ConfigError, match="no labels.*path,label"):
        classify.classify(tmp_path / "photos", tmp_path / "out", weights=weights)
    shutil.rmtree(tmp_path / "photos")
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "0.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match="a class needs two images"):
        classify.classify(tmp_path / "photos", tmp_path / "out", weights=weights)
    for name in ("a", "b"):
        (tmp_path / "photos" / name / "1.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match="none of the .* images can be read: it is empty"):
        classify.classify(tmp_path / "photos", tmp_path / "out", weights=weights)
    with pytest.raises(ConfigError, match="inside of"):
        classify.classify(tmp_path / "photos", tmp_path / "photos/out", weights=weights)
    for name in ("a", "b"):
        for number in range(4):
            pixels = np.full((32, 32, 3), 40 * number, np.uint8)
            (tmp_path / "photos" / name / f"{number}.jpg").write_bytes(
                encoded(Image.fromarray(pixels + np.uint8(name == "b")))
            )
    with pytest.raises(CheckpointError, match="nothing"):
        classify.classify(tmp_path / "photos", tmp_path / "out", weights=str(tmp_path / "nothing"))


def test_without_a_network_published_weights_are_none_and_named_ones_an_error(monkeypatch, caplog):
    def unreachable(name):
        raise CheckpointError(f"{name}: the hub cannot be reached")

    monkeypatch.setattr(classify.formats, "read_checkpoint", unreachable)
    monkeypatch.setattr(classify, "_is_time_for_small", lambda *_: False)
    assert classify._weights(classify.AUTO, [], None, 60) == ("", 0)
    assert (
        "a small model is trained from scratch" in caplog.text and "--weights=FILE" in caplog.text
    )
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        classify._weights("vit_small_patch16_224.dino", [], None, 60)


def test_what_fits_the_time_is_chosen():
    speed = Speed(seconds_each=0.02, compiling=1.0)

    def chosen(seconds, **options):
        sizes = {"images": 2000, "held_out": 200, "batch_size": 64, "steps": 300} | options
        ways = time_budget.ways(speed, [160, 224], seconds=seconds, **sizes)
        return time_budget.choose(ways, seconds)

    assert chosen(60).kind == HEAD and chosen(1).kind == HEAD
    smaller, whole, long = (chosen(seconds) for seconds in (300, 600, 3600))
    assert (smaller.kind, smaller.image_size) == (WHOLE, 160) and 100 <= smaller.steps < 300
    assert (whole.image_size, long.image_size, long.steps) == (224, 224, 300)
    assert smaller.seconds <= 300 and whole.seconds <= 600
    assert chosen(300, steps=20).steps == 20  # never more than the recipe's
    assert chosen(1, with_head=False).kind == WHOLE
    assert time_budget.smaller_size(224, 16) == 160 and time_budget.smaller_size(518, 14) == 364
    assert time_budget.smaller_size(128, 16) is None


def test_the_surest_mistakes_come_first_and_right_answers_never():
    targets = np.eye(3, dtype=bool)[[0, 1, 2, 0]]
    probabilities = np.array([[0.4, 0.6, 0], [0.1, 0.8, 0.1], [0.9, 0, 0.1], [0.5, 0.3, 0.2]])
    assert surest_mistakes(targets, probabilities).tolist() == [2, 0]
