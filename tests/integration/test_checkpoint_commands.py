"""What is done with a trained model on the command line: evaluate, predict, show, convert, and train it
anew from the recipe that it keeps.
"""

import csv
import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys
import types

import cv2
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

import vit_jax
from tests.integration.conftest import write_image
from vit_jax.base import schema
from vit_jax.base.errors import CheckpointError
from vit_jax.checkpoints import reading
from vit_jax.config import config_class, default_config
from vit_jax.interchange import formats
from vit_jax.prediction import images, predict
from vit_jax.prediction.overrides import load_for_images
from vit_jax.training.assembly import resolve
from vit_jax.training.upkeep import health


@pytest.fixture(scope="module")
def trained(finished_run):
    """(workdir, what the run ended with)."""
    return finished_run[:2]


def test_evaluate_needs_only_the_directory_and_repeats_the_accuracy_of_training(command, trained):
    workdir, result = trained
    code, out, _ = command("evaluate", f"--checkpoint={workdir}", "--json")
    assert code == 0
    evaluated = json.loads(out.splitlines()[-1])
    assert evaluated["accuracy"] == pytest.approx(result["accuracy"]) and evaluated[
        "loss"
    ] == pytest.approx(result["loss"], rel=1e-5)


def test_evaluating_on_data_with_other_classes_is_an_error(command, trained, tmp_path):
    for name in "ab":
        write_image(tmp_path / name / "0.png")
    code, _, err = command("evaluate", f"--checkpoint={trained[0]}",
                           "--config.data.name=folder", f"--config.data.path={tmp_path}",
                           "--config.data.eval_split=train", "--config.data.holdout=0")  # fmt: skip
    assert code == 2 and "the data has 2 classes, the model 10" in err


UNUSED = {
    "model.depth=3": "evaluate cannot use config.model.depth. Besides data and eval it takes batch_size, ",
    "optim.lr=1": "evaluate cannot use config.optim.lr",
    "data.train_crop=resize": "evaluate cannot use config.data.train_crop",
    "data.crop_scale=(0.5,1.0)": "evaluate cannot use config.data.crop_scale",
    "eval.every=1 epochs": "evaluate cannot use config.eval.every",
    "data.channels=1": "config.data.channels is 1, but the model takes images of 3 channels",
    "data.image_size=33": "image size 33 cannot be split into patches of 8",
    "model.patch=5": "image size 32 cannot be split into patches of 5",
    "data.eval_crop=centre": "config.data.eval_crop = 'centre' is not one of central, torchvision, transformers, "
    "squash, resize; did you mean 'central'?",
    "data.evalcrop=resize": "config has no field data.evalcrop; did you mean 'data.eval_crop'?",
}  # fmt: skip


@pytest.mark.parametrize("setting, message", UNUSED.items(), ids=UNUSED)
def test_evaluate_refuses_by_name_what_it_cannot_use(command, trained, setting, message):
    code, _, err = command("evaluate", f"--checkpoint={trained[0]}", f"--config.{setting}")
    assert code == 2 and message in err


def test_evaluate_computes_the_model_as_it_is_told(command, trained):
    how = ["--config.model.unroll=1", "--config.model.remat=full", "--config.eval.batch_size=8"]
    code, out, _ = command("evaluate", f"--checkpoint={trained[0]}", *how, "--json")
    evaluated = json.loads(out.splitlines()[-1])
    assert code == 0 and evaluated["loss"] == pytest.approx(trained[1]["loss"], rel=1e-5)


def test_images_may_have_a_height_and_a_width_in_every_command(trained):
    for size in ("32x64", "(32, 64)"):
        run = load_for_images(trained[0], [("data.image_size", size)], "inspect")
        assert run.model_config.image_size == run.config.data.image_size == (32, 64)


def test_a_format_that_computes_otherwise_says_how_to_accept_it(command, trained, tmp_path):
    arguments = ("convert", trained[0], tmp_path / "model.safetensors", "--to=timm")
    code, _, err = command(*arguments)
    assert code == 1 and "set --model=activation=gelu on the command line, or convert(" in err
    assert command(*arguments, "--model=activation=gelu")[0] == 0


def test_a_damaged_checkpoint_is_said_in_a_line(run_cli, trained, tmp_path):
    shutil.copytree(trained[0] / "checkpoints" / "4", tmp_path / "4")
    for file in (tmp_path / "4" / "state").glob("ocdbt.process_0/d/*"):
        file.write_bytes(file.read_bytes()[:10])
    code, _, err = run_cli("evaluate", f"--checkpoint={tmp_path}/4")
    (line,) = (line for line in err.splitlines() if line.startswith("vit_jax:"))
    assert code == 1 and f"{tmp_path}/4 is damaged" in line and "bound method" not in line
    assert "exception was never retrieved" not in err


def test_a_picture_that_cannot_be_written_is_said_before_any_work(command, tmp_path):
    picture = tmp_path / "nowhere" / "sheet.png"
    code, _, err = command("predict", "--checkpoint=/nowhere", "a.png", f"--picture={picture}")
    assert code == 2 and f"--picture={picture}: there is no folder {picture.parent}" in err


def test_predict_names_unreadable_files_goes_on_and_exits_with_1(
    command, trained, tmp_path, caplog
):
    good = [tmp_path / f"{i}.png" for i in range(3)]
    for path in good:
        write_image(path)
    (tmp_path / "text.png").write_text("no image")
    files = [good[0], tmp_path / "text.png", good[1], tmp_path / "missing.png", good[2]]
    code, out, err = command("predict", f"--checkpoint={trained[0]}", *files, "--json", "--batch_size=2", "--topk=3",
                             f"--picture={tmp_path}/sheet.png")  # fmt: skip
    assert code == 1 and "2 of 5 images cannot be read" in err
    assert "text.png cannot be read" in caplog.text and "missing.png cannot be read" in caplog.text
    rows = json.loads(out.splitlines()[-1])
    assert [row["file"] for row in rows] == list(map(str, good))
    for row in rows:
        probabilities = [p["probability"] for p in row["predictions"]]
        assert (
            len(probabilities) == 3
            and probabilities == sorted(probabilities, reverse=True)
            and sum(probabilities) <= 1
        )
    assert cv2.imread(str(tmp_path / "sheet.png")) is not None


def test_predict_prints_comma_separated_values(command, trained, tmp_path):
    write_image(tmp_path / "a.png")
    code, out, _ = command(
        "predict", f"--checkpoint={trained[0]}", tmp_path / "a.png", "--csv", "--topk=2"
    )
    lines = out.splitlines()[-3:]
    assert (
        code == 0
        and lines[0] == "file,rank,class,probability"
        and lines[1].startswith(f"{tmp_path}/a.png,1,")
    )


def test_predict_takes_folders_and_standard_input(command, trained, tmp_path, monkeypatch, caplog):
    names = ["b/2.png", "b/10.PNG", "a.png", ".hidden.png"]
    for name in names:
        write_image(tmp_path / "images" / name)
    (tmp_path / "images" / "photo.nef").write_text("no image")
    names = [str(tmp_path / "images" / name) for name in names]

    def predicted(source, standard_input=b""):
        stream = io.BufferedReader(io.BytesIO(standard_input))
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=stream))
        code, out, err = command("predict", f"--checkpoint={trained[0]}", source, "--json")
        assert code == 0, err
        return json.loads(out)

    folder = predicted(tmp_path / "images")
    assert [row["file"] for row in folder] == [names[2], names[0], names[1]]
    assert "1 files are not used" in caplog.text and "photo.nef" in caplog.text
    listed = predicted("-", "".join(f"{row['file']}\n" for row in folder).encode())
    assert listed == folder
    ((name, alone),) = (row.values() for row in predicted("-", pathlib.Path(names[2]).read_bytes()))
    assert name == "-"
    # Alone, an image is rounded as in a batch but for the last bit.
    assert alone == [
        one | {"probability": pytest.approx(one["probability"], rel=1e-6)}
        for one in folder[0]["predictions"]
    ]
    assert predicted("-") == []


@pytest.mark.parametrize("name", ["features.npz", "features.parquet"])
def test_features_are_written_with_the_names_of_the_images(
    command, trained, tmp_path, caplog, name
):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    (tmp_path / "images").mkdir()
    for number, image in enumerate(pixels):
        cv2.imwrite(str(tmp_path / "images" / f"{number}.png"), image[..., ::-1])
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    out, pattern = tmp_path / name, f"{tmp_path}/images/*.png"
    code, said, err = command("predict", f"--checkpoint={trained[0]}", pattern, f"--features={out}", "--batch_size=2",
                              "--json")  # fmt: skip
    assert code == 1 and "1 of 5 images cannot be read" in err and "3.png cannot" in caplog.text
    assert json.loads(said) == {"images": 4, "unreadable": 1, "width": 32}
    if out.suffix == ".npz":
        with np.load(out) as archive:
            files, rows = archive["files"].tolist(), archive["features"]
    else:
        table = pyarrow.parquet.read_table(out)
        files, rows = table["file"].to_pylist(), np.array(table["features"].to_pylist())
    assert files == [f"{tmp_path}/images/{number}.png" for number in (0, 1, 2, 4)]
    model = vit_jax.load_run(trained[0]).model
    expected = model(jnp.asarray(pixels[[0, 1, 2, 4]], jnp.float32) / 127.5 - 1).features
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--features=x.csv", "name it .npz or .parquet"),
        ("--features=/nowhere/x.npz", "--features=/nowhere/x.npz: there is no folder /nowhere"),
        ("--features --out=/nowhere/x.npz", "--out=/nowhere/x.npz: there is no folder /nowhere"),
        ("--features", "--out=FILE.npz is missing"),
        ("--layers=3", "--layers is for --features"),
        ("--features=x.npz --nonorm", "--nonorm is for --layers"),
        ("--features=x.npz --image_size=3x", "--image_size = '3x' is no image size"),
    ],
)
def test_features_that_cannot_be_written_are_refused_before_any_work(command, flag, message):
    code, _, err = command("predict", "--checkpoint=/nowhere", "a.png", *flag.split())
    assert code == 2 and message in err


def test_a_folder_without_images_is_said_before_any_work(command, tmp_path):
    code, _, err = command("predict", "--checkpoint=/nowhere", tmp_path)
    assert code == 2 and f"{tmp_path} has no images (.jpg, " in err


def test_predict_reads_few_batches_ahead_of_what_it_prints(trained, tmp_path):
    write_image(tmp_path / "a.png")
    read = []

    def names():
        for number in range(20):
            read.append(number)
            yield images.Named(str(tmp_path / "a.png"))

    run = vit_jax.load_run(trained[0])
    for number, _ in enumerate(predict.predict(run, names(), topk=1, batch_size=2)):
        # One batch is printed, one waits, one is handed over and one is being read.
        assert len(read) <= 2 * (number // 2 + 4)


def test_show_says_what_a_checkpoint_is(command, trained, tmp_path):
    workdir, result = trained
    code, out, _ = command("show", workdir)
    assert code == 0 and "ViT-mu/8 with depth 2 and mlp_dim 64, 24,170 parameters" in out
    # What is as usual is not printed.
    assert "patch 8, depth 2, width 32, mlp_dim 64, heads 2, pool mean" in out and "rope" not in out
    assert (
        "10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in out
        and "32 pixels (resize, bilinear), mean (0.5" in out
    )
    assert "digits: train, 1,438 images; evaluated on test" in out
    _, out, _ = command("show", workdir, "--json")
    shown = json.loads(out)
    assert (shown["step"], shown["format"], shown["init_from"]) == (12, "orbax", "")
    assert shown["metrics"]["accuracy"] == result["accuracy"] and shown["versions"]["jax"]
    _, out, _ = command("show", workdir, "--parameters")
    assert "| head/kernel " in out and "| (2, 32, 64) " in out and "Total: 24,170" in out
    _, out, _ = command("show", workdir, "--parameters", "--json")
    assert json.loads(out)["shapes"]["head/kernel"] == [32, 10]
    file = tmp_path / "model.npz"
    assert command("convert", workdir, file, "--to=official")[0] == 0
    _, out, _ = command("show", file, "--json")
    other = json.loads(out)
    assert (other["format"], other["parameters"]) == ("official", shown["parameters"])
    assert other["classes"] is None and "step" not in other
    code, _, err = command("show", tmp_path / "nothing")
    assert code == 1 and f"{tmp_path}/nothing does not exist" in err


def test_a_run_keeps_a_recipe_that_trains_the_same(trained):
    workdir, _ = trained
    kept = vit_jax.load_config(str(workdir / "config.py"))
    description = reading.newest_description(workdir)
    saved = json.loads(json.dumps(dataclasses.asdict(resolve(kept))))
    assert saved == description["config"]


def test_training_from_python_logs_and_works_in_a_thread(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    script = f"""
import threading, vit_jax
config = vit_jax.load_config("{tmp_path}/run/config.py")
thread = threading.Thread(target=lambda: print(vit_jax.train(config, "{tmp_path}/run")["step"]))
thread.start()
thread.join()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout == "12\n", process.stderr
    assert " I data: digits, 1,438 images to train on" in process.stderr
    assert " I step 12  eval/accuracy " in process.stderr


def test_predict_writes_no_cell_that_a_spreadsheet_runs(command, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("=cmd|calc.png", "plain.png"):
        write_image(tmp_path / name)
    checkpoint = f"--checkpoint={trained[0]}"
    code, out, _ = command("predict", checkpoint, "--csv", "--topk=1", "=cmd|calc.png", "plain.png")
    assert code == 0
    names = [row[0] for row in csv.reader(out.splitlines()[1:])]
    assert names == ["./=cmd|calc.png", "plain.png"]


REFUSED = {
    "mean": (("predict", "x.png", "--config.data.mean=nan"), "config.data.mean = ('nan',)"),
    "threshold": (("predict", "x.png", "--threshold=-1,5"), "--threshold=-1,5"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_numbers_that_make_no_sense_are_refused(command, trained, tmp_path, arguments, message):
    write_image(tmp_path / "x.png")
    arguments = [str(tmp_path / one) if one == "x.png" else one for one in arguments]
    code, _, err = command(*arguments, f"--checkpoint={trained[0]}")
    assert code == 2 and message in err


def test_a_report_is_not_written_into_a_run(command, trained):
    before = sorted(path.name for path in pathlib.Path(trained[0]).iterdir())
    code, _, err = command("report", trained[0], f"--out={trained[0]}")
    assert code == 2 and f"--out={trained[0]} is a run's workdir" in err
    assert sorted(path.name for path in pathlib.Path(trained[0]).iterdir()) == before


@pytest.mark.parametrize(
    "steps, sentence", [([], "no checkpoint before it"), ([3, 8], "of step 8, is good")]
)
def test_a_run_that_ends_badly_names_a_checkpoint_only_if_there_is_one(steps, sentence):
    params = {"kernel": jnp.ones(2)}
    bad = health.healthy(params).replace(first_bad_step=jnp.int32(9))
    config = schema.typed(config_class(), default_config())
    with pytest.raises(health.NonFiniteError, match=sentence):
        health.check_health(bad, params, config, lambda: steps)


def test_weights_that_are_no_numbers_are_named_and_neither_saved_nor_answered_with(
    command, trained, tmp_path
):
    write_image(tmp_path / "x.png")
    run = vit_jax.load_run(trained[0])
    checkpoint = run._checkpoint({})
    checkpoint.params["head"]["kernel"] = np.full_like(checkpoint.params["head"]["kernel"], np.nan)
    formats.write_checkpoint(checkpoint, tmp_path / "diverged", "orbax")
    for arguments in (
        ("predict", str(tmp_path / "x.png"), "--json"),
        ("export", "--to=onnx", f"--out={tmp_path}/x.onnx"),
    ):
        code, out, err = command(*arguments, f"--checkpoint={tmp_path}/diverged")
        assert code == 1 and "head/kernel are not finite" in err and "NaN" not in out
    run.model.head.kernel[...] = jnp.full_like(run.model.head.kernel[...], jnp.nan)
    for save in (
        lambda: run.save(tmp_path / "saved"),
        lambda: run.push("me/x", dry_run=True),
    ):
        with pytest.raises(CheckpointError, match="head/kernel: .* numbers are not finite"):
            save()
    assert not (tmp_path / "saved").exists()
