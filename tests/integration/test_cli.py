"""The command line as a user meets it: help, exit codes, and a clear sentence for everything that
can be wrong.
"""

import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys
import time
import types

import cv2
import numpy as np
import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.checkpoints import reading
from vit_jax.data import decoders
from vit_jax.evaluation import images, predict
from vit_jax.training.assembly import resolve


def test_help_answers_in_two_seconds_and_names_every_command():
    began = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-m", "vit_jax", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert time.monotonic() - began < 2
    for name in ("train", "evaluate", "predict", "models", "plan", "benchmark"):
        assert f"  {name} " in out


def test_help_of_a_command_lists_the_fields_of_the_config(command):
    code, out, _ = command("train", "--help")
    assert (
        code == 0
        and "--workdir" in out
        and "--config.optim.lr=0.001\n      peak learning rate" in out
    )


WRONG = {
    "no config": ((), "which config"),
    "no such file": (("--config=configs/digit.py",), "there is no file configs/digit.py"),
    "argument not taken": (("--config=configs/digits.py:B",), "takes no argument"),
    "unknown field": (("--config.optim.lrr=1",), "config has no field optim.lrr; did you mean 'optim.lr'?"),
    "field in the wrong section": (("--config.lr=1",), "did you mean 'optim.lr'"),
    "wrong type": (("--config.optim.lr=fast",), "config.optim.lr = 'fast' must be a number"),
    "unknown model": (("--config.model.name=Vit-B/16",), "unknown model 'Vit-B/16'; did you mean 'ViT-B/16'"),
    "unknown size": (("--config.model.name=ViT-XL/16",), "there is no ViT of size 'XL'"),
    "unknown pooling": (("--config.model.pool=avg",), "config.model.pool = 'avg' is not one of token, mean, map"),
    "unknown optimizer": (("--config.optim.name=adam",), "is not an optimizer; did you mean 'adamw'"),
    "unknown objective": (("--config.objective.name=mae",), "'mae' is no objective; known: supervised"),
    "unknown data set": (("--config.data.name=digit",), "digits"),
    "image size not divisible by patch": (("--config.data.image_size=30",), "30 cannot be cut into patches of 8"),
    "no duration": (("--config.duration=soon",), "'soon' is not a duration"),
    "classes contradict the data": (("--config.model.num_classes=7",), "is 7, but the data has 10 classes"),
    "batch not divisible by devices": (("--config.batch_size=12",), "12 cannot be spread over 8 devices"),
    "mesh that does not fit": (("--config.mesh.tensor=3",), "does not fit the 8 devices"),
    "freezing nothing": (("--config.optim.freeze=('heads/.*',)",), "config.optim.freeze"),
    "negative number": (("--config.optim.weight_decay=-1",), "config.optim.weight_decay = -1.0 must be at least 0"),
    "missing checkpoint to start from": (("--config.init_from=/nowhere",), "/nowhere does not exist"),
    "half a mean": (("--config.data.mean=(0.5,0.5)",), "config.data.mean = (0.5, 0.5) must be 3 values or none"),
    "one number for two": (("--config.data.crop_area=0.2",), "config.data.crop_area = (0.2,) must be 2 values"),
    "texts without quotes": (("--config.optim.freeze=a.*,b.*",), "put quotes around each of several texts"),
    "half a number": (("--config.seed=1.5",), "config.seed = 1.5 must be a whole number"),
    "neither true nor false": (("--config.augment.flip=maybe",), "config.augment.flip = 'maybe' must be True or False"),
    "a section": (("--config.optim=sgd",), "config.optim is a section: say one of its fields"),
    "no value": (("--config.optim.lr",), "--config.optim.lr=VALUE: the value is missing"),
    "mistyped flag": (("--coordinate=x:1",), "there is no flag --coordinate; did you mean '--coordinator'?"),
    "a recipe that lacks its checkpoint": (("--config=configs/digits_finetune.py",), "recipe starts from a checkpoint"),
    "and the same": (("--config=configs/finetune.py:cifar10",), "say which with --config.init_from=DIR_OR_FILE"),
    "no folder": (("--config.data.name=folder", "--config.data.path=/nowhere"), "/nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_a_sentence_with_exit_code_2(
    command, tmp_path, arguments, message
):
    config = (
        ()
        if message == "which config" or any(a.startswith("--config=") for a in arguments)
        else ("--config=configs/digits.py",)
    )
    overrides = [f"--config.{k}={v}" for k, v in TINY.items()] if config else []
    code, _, err = command("train", *config, *overrides, *arguments, f"--workdir={tmp_path}/run")
    assert message in err and "Traceback" not in err
    if message != "/nowhere does not exist":
        assert code == 2 and not (tmp_path / "run" / "checkpoints").exists()


def test_a_workdir_that_cannot_be_written_is_said_before_any_work(command, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command("train", "--config=configs/digits.py", f"--workdir={tmp_path}/file/run")
    assert code == 2 and f"cannot write to --workdir={tmp_path}/file/run" in err


@pytest.mark.parametrize("workdir", [(), ("--workdir=",)])
def test_a_missing_workdir_is_asked_for(command, workdir):
    code, _, err = command("train", "--config=configs/digits.py", *workdir)
    assert code == 2 and "--workdir=DIR is missing: where checkpoints and logs go" in err


def test_a_flag_with_a_value_it_cannot_have_says_what_it_takes(command):
    code, _, err = command("models", "--image_size=big")
    assert code == 2 and "--image_size=big must be a positive integer: side of the" in err
    code, _, err = command("models", "--json=maybe")
    assert code == 2 and "--json=maybe must be true or false" in err


def test_flags_take_their_value_after_a_space_too_and_switches_need_none(command):
    code, out, _ = command("train", "--config", "configs/digits.py", "--config.optim.lr", "-1",
                           "--config.augment.flip", "--help")  # fmt: skip
    assert code == 0 and "--config.optim.lr=-1.0\n" in out and "--config.augment.flip=True\n" in out
    _, out, _ = command(
        "train", "--config", "configs/digits.py", "--noconfig.log.tensorboard", "--help"
    )
    assert "--config.log.tensorboard=False\n" in out


RECIPES = {
    "returns nothing": ("def get_config():\n    pass\n", "get_config() of {} returned None"),
    "returns a dict": ("def get_config():\n    return {{}}\n", "returned a dict. It must return a config that starts"),
    "returns another config": (
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({{'lr': 1}})\n",
        "config has no field lr; known: seed",
    ),
    "lacks a section": (
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({{'seed': 1}})\n",
        "config lacks the field duration",
    ),
    "is no Python": ("\ndef get_config(:\n", "{}, line 2: invalid syntax: 'def get_config(:'"),
    "fails when read": ("import nothing_of_that_name\n", "{}, line 1, 'import nothing_of_that_name': ModuleNotFound"),
    "fails when asked": ("def get_config():\n    return 1 / 0\n", "{}, line 2, 'return 1 / 0': ZeroDivisionError"),
    "sets no field": (
        "from vit_jax.config import default_config\ndef get_config():\n    default_config().optim.lrr = 1\n",
        "{}, line 3, 'default_config().optim.lrr = 1': AttributeError",
    ),
    "needs an argument": ("def get_config(size):\n    pass\n", "{} needs an argument: --config={}:ARGUMENT"),
    "defines nothing": ("", "{} defines no function get_config"),
}  # fmt: skip


@pytest.mark.parametrize("text, message", RECIPES.values(), ids=RECIPES)
def test_a_recipe_that_is_none_is_said_with_file_and_line(command, tmp_path, text, message):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text.format())
    code, _, err = command("train", f"--config={recipe}", f"--workdir={tmp_path}/run")
    assert code == 2 and message.replace("{}", str(recipe)) in err and "Traceback" not in err


@pytest.mark.parametrize("path", ["nothing", "empty", "file"])
def test_a_checkpoint_that_is_none_is_said(command, tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    code, _, err = command("predict", f"--checkpoint={tmp_path}/{path}", "image.png")
    assert code == 1 and str(tmp_path / path) in err and "Traceback" not in err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(TINY | {"compilation_cache": "", "duration": "4 steps"})
    workdir = tmp_path_factory.mktemp("cli_trained")
    return workdir, vit_jax.train(config, workdir)


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
    "eval.every=1 epochs": "evaluate cannot use config.eval.every",
    "data.image_size=64": "config.data.image_size is 64, but the model takes images of 32 pixels; for another size "
    "fine-tune it, with --config.init_from=",
    "data.eval_crop=centre": "config.data.eval_crop = 'centre' is not one of central, resize; did you mean 'central'?",
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


def test_a_format_that_computes_otherwise_says_how_to_accept_it(command, trained, tmp_path):
    arguments = ("convert", trained[0], tmp_path / "model.safetensors", "--to=timm")
    code, _, err = command(*arguments)
    assert code == 1 and "say --model=activation=gelu on the command line, or convert(" in err
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


def write_image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(
        str(path), np.random.default_rng(len(str(path))).integers(0, 255, (20, 30, 3), np.uint8)
    )


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


def test_predict_takes_folders_and_standard_input(command, trained, tmp_path, monkeypatch):
    names = ["b/2.png", "b/10.PNG", "a.png", ".hidden.png"]
    for name in names:
        write_image(tmp_path / "images" / name)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    names = [str(tmp_path / "images" / name) for name in names]

    def predicted(source, standard_input=b""):
        stream = io.BufferedReader(io.BytesIO(standard_input))
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=stream))
        code, out, err = command("predict", f"--checkpoint={trained[0]}", source, "--json")
        assert code == 0, err
        return json.loads(out)

    folder = predicted(tmp_path / "images")
    assert [row["file"] for row in folder] == [names[2], names[0], names[1]]
    listed = predicted("-", "".join(f"{row['file']}\n" for row in folder).encode())
    assert listed == folder
    piped = predicted("-", pathlib.Path(names[2]).read_bytes())
    assert piped == [folder[0] | {"file": "-"}]
    assert predicted("-") == []


def test_a_folder_without_images_is_said_before_any_work(command, tmp_path):
    code, _, err = command("predict", "--checkpoint=/nowhere", tmp_path)
    assert code == 2 and f"{tmp_path} has no images (.jpg, " in err


def test_predict_prints_each_image_before_it_reads_those_of_later_batches(trained, tmp_path):
    write_image(tmp_path / "a.png")
    read = []

    def names():
        for number in range(5):
            read.append(number)
            yield images.Named(str(tmp_path / "a.png"))

    run = vit_jax.load_run(trained[0])
    for number, _ in enumerate(predict.predict(run, names(), topk=1, batch_size=2)):
        assert len(read) <= 2 * (number // 2 + 1)


def test_show_says_what_a_checkpoint_is(command, trained, tmp_path):
    workdir, result = trained
    code, out, _ = command("show", workdir)
    assert code == 0 and "ViT-mu/8, 24,170 parameters" in out
    assert "10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in out and "32 pixels (resize), mean [0.5" in out
    assert "digits: train, 1,438 images; evaluated on test" in out
    _, out, _ = command("show", workdir, "--json")
    shown = json.loads(out)
    assert (shown["step"], shown["format"], shown["init_from"]) == (4, "orbax", "")
    assert shown["metrics"]["accuracy"] == result["accuracy"] and shown["versions"]["jax"]
    file = tmp_path / "model.npz"
    assert command("convert", workdir, file, "--to=official")[0] == 0
    _, out, _ = command("show", file, "--json")
    other = json.loads(out)
    assert (other["format"], other["parameters"]) == ("official", shown["parameters"])
    assert other["classes"] is None and "step" not in other
    code, _, err = command("show", tmp_path / "nothing")
    assert code == 1 and f"{tmp_path}/nothing does not exist" in err


def test_dry_run_prints_a_recipe_that_resolves_to_the_same_config(command, tmp_path):
    changes = ["--config.optim.lr=0.01", "--config.model.depth=2", "--config.duration=3 epochs"]
    arguments = ["--config=configs/digits.py", *changes, "--dry_run"]
    code, out, err = command("train", *arguments, f"--workdir={tmp_path}/run")
    assert code == 0, err
    assert "digits, 1,438 images to train on (train), 359 to evaluate on (test)" in out
    assert "training: 67 steps of 64 images (2.98 epochs)" in out
    (tmp_path / "again.py").write_text(out)
    _, again, _ = command("train", f"--config={tmp_path}/again.py", "--dry_run")
    _, out, _ = command("train", *arguments, "--json")
    planned = json.loads(out)
    assert again.strip() == planned["config"].strip() and not (tmp_path / "run").exists()
    assert (planned["model"], planned["steps"], planned["examples"]) == ("ViT-S/4", 67, 1438)
    assert "config.optim.lr = 0.01\n" in again and "config.model.depth = 2\n" in again


def test_a_run_keeps_a_recipe_that_trains_the_same(trained):
    workdir, _ = trained
    kept = vit_jax.load_config(str(workdir / "config.py"))
    description = reading.newest_description(workdir)
    saved = json.loads(json.dumps(dataclasses.asdict(resolve(kept))))
    assert saved == description["config"] | {"compilation_cache": ""}


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
    assert process.stdout == "4\n", process.stderr
    assert " I data: digits, 1,438 images to train on" in process.stderr
    assert " I step 4  eval/accuracy " in process.stderr


@pytest.mark.parametrize("arguments", [("help", "train"), ("train", "-h")])
def test_help_of_a_command_may_be_asked_for_in_two_ways(command, arguments):
    code, out, _ = command(*arguments)
    assert code == 0 and out.startswith("Train or fine-tune") and "--dry_run" in out


def test_the_version_is_told(command):
    assert command("--version")[:2] == (0, f"vit_jax {vit_jax.__version__}\n")


def test_models_lists_every_name_with_the_exact_count(command):
    code, out, _ = command("models", "--json")
    rows = {row["name"]: row for row in json.loads(out.splitlines()[-1])}
    assert code == 0 and rows["ViT-B/16"]["parameters"] == 86_567_656 and "ViT-22B/14" in rows


@pytest.mark.parametrize("what", ["step", "input"])
def test_benchmark_reports_throughput_with_its_context(command, what):
    overrides = [f"--config.{k}={v}" for k, v in TINY.items()]
    code, out, _ = command(
        "benchmark", what, "--config=configs/digits.py", *overrides, "--steps=2", "--json"
    )
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["images_per_second"] > 0 and result["jax"] and result["devices"]


def test_training_never_imports_tensorflow(run_cli, tmp_path):
    script = (
        "import sys; sys.argv[0] = 'vit_jax'; from vit_jax.main import run; run();"
        "assert 'tensorflow' not in sys.modules"
    )
    arguments = [f"--config.{k}={v}" for k, v in (TINY | {"duration": "2 steps"}).items()]
    process = subprocess.run(
        [sys.executable, "-c", script, "train", "--config=configs/digits.py", *arguments, f"--workdir={tmp_path}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr


def test_a_folder_of_images_trains_with_nothing_else_edited(run_cli, tmp_path):
    for label in ("cat", "dog"):
        for i in range(12):
            write_image(tmp_path / "data" / label / f"{i}.jpg")
    code, _, err = run_cli(
        "train", "--config=configs/folder.py", f"--config.data.path={tmp_path}/data", f"--workdir={tmp_path}/run",
        "--config.duration=2 steps", "--config.batch_size=8", "--config.data.image_size=32", "--config.model.depth=1",
        "--config.optim.warmup=1 steps", "--config.data.holdout=0.3", "--config.augment.randaugment_layers=0",
    )  # fmt: skip
    assert code == 0, err
    assert vit_jax.load_run(tmp_path / "run").classes == ("cat", "dog")


def test_an_unreadable_training_image_names_the_file(run_cli, tmp_path):
    for label in ("cat", "dog"):
        for i in range(12):
            write_image(tmp_path / "data" / label / f"{i}.jpg")
    broken = tmp_path / "data" / "cat" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    arguments = (
        "train", "--config=configs/folder.py", f"--config.data.path={tmp_path}/data", "--config.duration=4 steps",
        "--config.batch_size=8", "--config.data.image_size=32", "--config.model.depth=1",
        "--config.optim.warmup=1 steps",
        "--config.data.holdout=0", "--config.data.eval_split=train", "--config.augment.randaugment_layers=0",
    )  # fmt: skip
    code, _, err = run_cli(*arguments, f"--workdir={tmp_path}/run")
    assert code == 1 and str(broken) in err and "Traceback" not in err.split("vit_jax: ")[-1]
    code, _, err = run_cli(
        *arguments, f"--workdir={tmp_path}/run2", "--config.data.on_bad_image=skip"
    )
    assert code == 0 and f"{broken} cannot be read" in err, err
    assert "another takes its place" in err and "it is left out of evaluation" in err
    description = reading.read_description(reading.find(tmp_path / "run2"))
    assert description["decoder"] == decoders.name() and "images are decoded by" in err


def test_plan_tells_what_a_run_needs_and_which_slices_there_are(command):
    small = [f"--config.model.{size}" for size in ("depth=2", "width=32", "mlp_dim=64", "heads=2")]
    planned = ["plan", "--config=configs/digits.py", *small, "--json"]
    code, out, _ = command(*planned, "--topology=cpu:8")
    plan = json.loads(out.splitlines()[-1])
    assert code == 0 and plan["fits"] and plan["batch_per_chip"] == 8
    assert plan["memory"]["peak"] > plan["memory"]["state"] > 0
    assert plan["collectives"][0]["kind"] == "all-reduce"
    code, _, err = command(*planned, "--topology=v5e:3x3")
    assert code == 2 and "v5e has no slice '3x3'; it has: 1x1, 2x2" in err
