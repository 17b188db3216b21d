"""The command line as a user meets it: help, exit codes, and a clear sentence for everything that
can be wrong.
"""

import collections
import json
import os
import re
import resource
import subprocess
import sys

import pytest

import vit_jax
from tests.conftest import QUICK
from tests.integration.conftest import TINY, write_image
from tests.repeats import slow_unless
from tests.waiting import until
from vit_jax.base import logs
from vit_jax.checkpoints import reading
from vit_jax.data.decoding import decode
from vit_jax.models import registry
from vit_jax.recipes import user_files
from vit_jax.recipes.shipped import recipe_names, recipes_folder


def test_help_takes_less_than_a_second_and_names_every_command():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(
        [sys.executable, "-m", "vit_jax", "--help"], capture_output=True, text=True, check=True
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: the clock measures what else the machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    for name in ("train", "evaluate", "predict", "models", "plan", "benchmark"):
        assert f"  {name} " in out


def test_lists_of_models_and_recipes_build_no_network(command, monkeypatch):
    """Nor do they run a recipe's file twice, except one that another starts from."""

    traced, loaded = [], collections.Counter()
    abstract, load = registry.abstract_weights, user_files._load
    monkeypatch.setattr(registry, "abstract_weights", lambda c: traced.append(c) or abstract(c))
    monkeypatch.setattr(
        user_files, "_load", lambda path, where: loaded.update([where]) or load(path, where)
    )
    code, out, err = command("models")
    assert code == 0 and "ViT-B/16" in out and "parameters" not in out.splitlines()[0], err
    code, out, err = command("recipes")
    assert not traced
    assert code == 0 and "\nvit_i1k:B/16\n    " in out and "hours of a TPU" in out, err
    assert all(loaded[f"--config={recipes_folder() / name}.py"] <= 1 for name in recipe_names())


def test_train_runs_the_file_of_its_recipe_once(command, tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(f"print('ran')\n{(recipes_folder() / 'digits.py').read_text()}")
    for flag in ("--dry_run", "--help"):
        code, out, err = command("train", f"--config={recipe}", flag)
        assert code == 0 and out.count("ran\n") == 1, err


def test_help_of_a_command_lists_the_fields_of_the_config(command):
    code, out, _ = command("train", "--help")
    assert code == 0 and "--workdir" in out
    assert re.search(r"--config\.optim\.lr=0\.001 +peak learning rate", out)


WRONG = {
    "no config": ((), "which config"),
    "no such file": (("--config=configs/digit.py",), "there is no file configs/digit.py"),
    "argument not taken": (("--config=configs/folder.py:B",), "takes no argument"),
    "unknown field": (("--config.optim.lrr=1",), "config has no field optim.lrr; did you mean 'optim.lr'?"),
    "field in the wrong section": (("--config.lr=1",), "did you mean 'optim.lr'"),
    "wrong type": (("--config.optim.lr=fast",), "config.optim.lr = 'fast' must be a number"),
    "unknown model": (("--config.model.name=Vit-B/16",), "unknown model 'Vit-B/16'; did you mean 'ViT-B/16'"),
    "unknown size": (("--config.model.name=ViT-XL/16",), "there is no ViT of size 'XL'"),
    "unknown pooling": (("--config.model.pool=avg",), "config.model.pool = 'avg' is not one of token, mean, map"),
    "unknown optimizer": (("--config.optim.name=adam",), "is not an optimizer; did you mean 'adamw'"),
    "the wrong case": (("--config.model.name=vit-b16",), "did you mean 'ViT-B/16'"),
    "a word of timm's": (("--config.model.in_chans=4",), "did you mean 'data.channels'"),
    "a model of timm's": (("--config.model.name=vit_base_patch16_224",), "hf://timm/vit_base_patch16_224"),
    "another library's network": (("--config.model.name=resnet50",), "did you mean 'BiT-R50x1'"),
    "a word that is alike by chance": (("--config.optim.name=zorn",), "'zorn' is not an optimizer; known: adamw"),
    "unknown objective": (("--config.objective.name=byol",), "'byol' is no objective; known: supervised"),
    "unknown data set": (("--config.data.name=digit",), "digits"),
    "image size not divisible by patch": (("--config.data.image_size=30",), "30 cannot be split into patches of 8"),
    "no duration": (("--config.duration=soon",), "'soon' is not a duration"),
    "classes contradict the data": (("--config.model.num_classes=7",), "is 7, but the data has 10 classes"),
    "batch not divisible by devices": (("--config.batch_size=12",), "12 cannot be spread over 8 devices"),
    "mesh that does not fit": (("--config.mesh.tensor=3",), "does not fit the 8 devices"),
    "freezing nothing": (("--config.optim.freeze=('heads/.*',)",), "config.optim.freeze"),
    "negative number": (("--config.optim.weight_decay=-1",), "config.optim.weight_decay = -1.0 must be at least 0"),
    "missing checkpoint to start from": (("--config.init_from=/nowhere",), "/nowhere does not exist"),
    "half a mean": (("--config.data.mean=(0.5,0.5)",), "(0.5, 0.5) has 2 numbers, and config.data.channels is 3"),
    "one number for two": (("--config.data.crop_area=0.2",), "config.data.crop_area = (0.2,) must be 2 values"),
    "texts without quotes": (("--config.optim.freeze=a.*,b.*",), "put quotes around each of several texts"),
    "half a number": (("--config.seed=1.5",), "config.seed = 1.5 must be a whole number"),
    "neither true nor false": (("--config.augment.flip=maybe",), "config.augment.flip = 'maybe' must be True or False"),
    "a section": (("--config.optim=sgd",), "config.optim is a section: set one of its fields"),
    "no value": (("--config.optim.lr",), "--config.optim.lr=VALUE: the value is missing"),
    "mistyped flag": (("--coordinate=x:1",), "there is no flag --coordinate; did you mean '--coordinator'?"),
    "a recipe that lacks its checkpoint": (("--config=configs/digits_finetune.py",), "recipe starts from a checkpoint"),
    "and the same": (("--config=configs/finetune.py:cifar10",), "set --config.init_from=CHECKPOINT"),
    "a report of no classifier": (("--config.objective.name=mae", "--report"), "--report is for classifiers"),
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


def test_a_mistyped_command_is_answered_with_the_nearest(command):
    code, _, err = command("trian", "--config=configs/digits.py")
    assert code == 2 and "'trian'; did you mean 'train'?" in err


@pytest.mark.parametrize("name", ["evaluate", "show", "predict"])
def test_a_run_that_has_saved_nothing_yet_is_not_taken_for_an_unknown_format(
    command, tmp_path, name
):
    (tmp_path / ".lock").touch()
    arguments = ("--checkpoint=", "cat.jpg") if name == "predict" else ("--checkpoint=",)
    arguments = (tmp_path,) if name == "show" else (f"{arguments[0]}{tmp_path}", *arguments[1:])
    code, _, err = command(name, *arguments)
    assert code == 1 and f"{tmp_path} is a run that has no checkpoint yet" in err


def test_what_takes_long_is_logged_with_its_time(caplog):
    caplog.set_level("INFO")
    with logs.with_elapsed_time("counting", after=0.05, every=0.05):
        until(lambda: len(caplog.records) >= 2)
    with logs.with_elapsed_time("something quick"):
        pass
    messages = [record.message for record in caplog.records]
    assert len(messages) >= 3 and messages[0] == "counting … 0 s"
    assert re.fullmatch(r"counting took \d+ s", messages[-1]) and "quick" not in caplog.text


def test_a_flag_with_a_value_it_cannot_have_says_what_it_takes(command):
    code, _, err = command("models", "--image_size=big")
    assert code == 2 and "--image_size=big must be a positive integer: side of the" in err
    code, _, err = command("models", "--json=maybe")
    assert code == 2 and "--json=maybe must be true or false" in err
    code, _, err = command("export", "--checkpoint=W", "--to=onx", "--out=x")
    assert code == 2 and "--to=onx must be onnx or stablehlo: what the program" in err


def test_flags_take_their_value_after_a_space_too_and_switches_need_none(command):
    code, out, _ = command("train", "--config", "configs/digits.py", "--config.optim.lr", "-1",
                           "--config.augment.flip", "--help")  # fmt: skip
    assert code == 0 and "--config.optim.lr=-1.0 " in out and "--config.augment.flip=True " in out
    _, out, _ = command(
        "train", "--config", "configs/digits.py", "--noconfig.log.tensorboard", "--help"
    )
    assert "--config.log.tensorboard=False " in out


RECIPES = {
    "returns nothing": ("def get_config():\n    pass\n", "get_config() of {} returned None"),
    "returns a dict": ("def get_config():\n    return {{}}\n", "returned a dict. It must return a config that starts"),
    "returns another config": (
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({{'quux': 1}})\n",
        "config has no field quux; known: seed",
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
    first, second = (
        [
            line for line in text.strip().splitlines() if not line.startswith("estimate")
        ]  # of a measured speed
        for text in (again, planned["config"])
    )
    assert first == second and not (tmp_path / "run").exists()
    assert planned["model"] == "ViT-mu/4 with depth 2, width 64, mlp_dim 256 and heads 4"
    assert (planned["steps"], planned["examples"]) == (67, 1438)
    assert "config.optim.lr = 0.01\n" in again and "config.model.depth = 2\n" in again


@pytest.mark.parametrize("arguments", [("help", "train"), ("train", "-h")])
def test_help_of_a_command_may_be_asked_for_in_two_ways(command, arguments):
    code, out, _ = command(*arguments)
    assert code == 0 and out.startswith("Train or fine-tune") and "--dry_run" in out


def test_the_version_is_told(command):
    assert command("--version")[:2] == (0, f"vit_jax {vit_jax.__version__}\n")


@pytest.mark.slow
def test_models_lists_every_name_with_the_exact_count(command):
    code, out, _ = command("models", "--json")
    rows = {row["name"]: row for row in json.loads(out.splitlines()[-1])}
    assert code == 0 and rows["ViT-B/16"]["parameters"] == 86_567_656 and "ViT-22B/14" in rows


# A step is timed in `test_benchmark.py`.
@pytest.mark.parametrize("what", slow_unless(["input"], ["step", "input"]))
def test_benchmark_reports_throughput_with_its_context(command, what):
    overrides = [f"--config.{k}={v}" for k, v in TINY.items()]
    code, out, _ = command(
        "benchmark", what, "--config=configs/digits.py", *overrides, "--steps=2", "--json"
    )
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["images_per_second"] > 0 and result["jax"] and result["devices"]


@pytest.fixture
def photos(tmp_path, compilation_cache):
    """The arguments of a short run on two classes of twelve images each, in tmp_path/data."""
    for label in ("cat", "dog"):
        for i in range(12):
            write_image(tmp_path / "data" / label / f"{i}.jpg")
    return [
        "train", "--config=configs/folder.py", f"--config.data.path={tmp_path}/data", "--config.duration=3 steps",
        "--config.batch_size=8", "--config.data.image_size=32", "--config.model.depth=1",
        "--config.model.width=32", "--config.model.heads=2", "--config.model.mlp_dim=64",
        "--config.optim.warmup=1 steps", "--config.augment.randaugment_layers=0", "--config.log.tensorboard=False",
        "--config.data.examine=False", "--config.data.on_bad_image=error", "--config.audit.every=0",
        f"--config.compilation_cache={compilation_cache}",
    ]  # fmt: skip


def test_a_folder_of_images_trains_with_nothing_else_edited_and_imports_no_other_framework(
    photos, tmp_path
):
    script = (
        "import sys; sys.argv[0] = 'vit_jax'; from vit_jax.commands.main import run; run();"
        "assert 'tensorboardX' in sys.modules;"
        "assert not {'tensorflow', 'torch', 'sklearn', 'boto3'} & sys.modules.keys()"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, *photos, f"--workdir={tmp_path}/run", "--config.data.holdout=0.3",
         "--config.log.tensorboard=True", "--report"],
        capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": QUICK},  # one device
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert vit_jax.load_run(tmp_path / "run").classes == ("cat", "dog")
    page = (tmp_path / "run/report/report.html").read_text("utf-8")
    assert "held-out images are classified correctly" in page and "training loss" in page.lower()


def test_an_unreadable_training_image_names_the_file(command, photos, tmp_path, caplog):
    broken = tmp_path / "data" / "cat" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    photos += ["--config.data.holdout=0", "--config.data.eval_split=train"]
    code, _, err = command(*photos, f"--workdir={tmp_path}/run")
    assert code == 1 and str(broken) in err and "Traceback" not in err.split("vit_jax: ")[-1]
    caplog.clear()
    skip = "--config.data.on_bad_image=skip"
    code, _, err = command(*photos, f"--workdir={tmp_path}/run2", skip)
    assert code == 0 and f"{broken} cannot be read" in caplog.text, err
    assert "another takes its place" in caplog.text
    assert "it is excluded from evaluation" in caplog.text
    description = reading.read_description(reading.find_checkpoint(tmp_path / "run2"))
    assert description["pixels"] == decode.PIXELS
    # A recipe of now does not change the split that a run began with.
    examine = "--config.data.examine=True"
    code, _, err = command(*photos, f"--workdir={tmp_path}/run2", skip, examine, "--dry_run")
    assert code == 0 and "keeps to it: names decide what is held out" in caplog.text, err


def test_a_run_goes_on_with_few_other_photos(command, photos, tmp_path, caplog):
    broken = tmp_path / "data/cat/3.jpg"
    broken.write_bytes(b"")
    photos += ["--config.data.holdout=0", "--config.data.eval_split=train"]
    photos += ["--config.data.on_bad_image=skip"]
    examine, run = "--config.data.examine=True", f"--workdir={tmp_path}/run"
    code, _, err = command(*photos, run, examine)
    assert code == 0 and "1 of 24 images cannot be read: cat/3.jpg: it is empty" in caplog.text, err
    broken.unlink()
    caplog.clear()
    longer = ["--config.duration=4 steps", "--config.checkpoint.on_config_change=allow"]
    code, _, err = command(*photos, run, examine, *longer)
    assert code == 0 and "resumed at step 3 of 4" in caplog.text, err
    assert "about 1 of 24 are gone or changed, and about 0 are new" in caplog.text
    assert "duration: '3 steps' -> '4 steps'; continuing" in caplog.text  # which is all else
    (tmp_path / "data/dog/5.jpg").unlink()
    write_image(tmp_path / "data/dog/13.jpg")
    write_image(tmp_path / "data/dog/14.jpg")
    code, _, err = command(*photos, run, examine, longer[0], "--dry_run")
    assert code == 2 and "training_examples: 23 -> 24" in err
    code, out, err = command(*photos, "--dry_run", "--config.batch_size=32")
    assert code == 0 and "config.batch_size = 32 is more than the 24 images" in out + err
    assert "configs/finetune.py:photos" in out + err


SMALL = [f"--config.model.{size}" for size in ("depth=2", "width=32", "mlp_dim=64", "heads=2")]


# `test_pods.py` plans too; what a plan says is of `planning/test_plan.py`.
@pytest.mark.slow
def test_plan_tells_what_a_run_needs(command):
    planned = ["plan", "--config=configs/digits.py", *SMALL, "--json"]
    code, out, _ = command(*planned, "--topology=cpu:8")
    plan = json.loads(out.splitlines()[-1])
    assert code == 0 and plan["fits"] and plan["batch_per_chip"] == 8
    assert plan["memory"]["peak"] > plan["memory"]["state"] > 0
    assert plan["collectives"][0]["kind"] == "all-reduce"


def test_plan_tells_which_slices_there_are(command):
    code, _, err = command("plan", "--config=configs/digits.py", *SMALL, "--topology=v5e:3x3")
    assert code == 2 and "v5e has no slice '3x3'; it has: 1x1, 2x2" in err
