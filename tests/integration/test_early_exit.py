"""Early exit as a user meets it: thresholds of a trained checkpoint, and the commands that use them."""

import json
import logging
import shutil

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.evaluation import toy_exits
from tests.integration.conftest import write_image
from vit_jax.checkpoints import reading
from vit_jax.config import default_config
from vit_jax.evaluation.early_exit import calibration
from vit_jax.interchange import loading
from vit_jax.models import registry
from vit_jax.prediction.overrides import load_to_evaluate

TOY = {
    "data.name": "digits", "data.image_size": 16, "data.train_crop": "pad", "data.pad": 1, "data.eval_crop": "resize",
    "augment.flip": False, "model.name": "Toy-3", "model.head_init": "normal", "batch_size": 64,
    "duration": "40 steps", "optim.lr": 1e-2, "optim.warmup": "0 steps", "log.tensorboard": False,
    "audit.every": 0,
    "compilation_cache": "",
}  # fmt: skip
BUDGETS = (0.5, 1.0, 1.5)


@pytest.fixture(scope="module", autouse=True)
def family():
    before = list(registry.GUESTS)
    registry.register(toy_exits)
    yield
    registry.GUESTS[:] = before


@pytest.fixture(scope="module")
def trained(family, tmp_path_factory):
    """A run whose model has three exits, and its checkpoint's folder."""
    config = default_config()
    config.update_from_flattened_dict(TOY)
    workdir = tmp_path_factory.mktemp("exits")
    vit_jax.train(config, workdir)
    return workdir


@pytest.fixture(scope="module")
def solved(trained):
    """(the thresholds that the checkpoint keeps, its folder)."""
    run, config = load_to_evaluate(trained, [])
    result = calibration.calibrate(run, config, BUDGETS, images=50_000)
    calibration.keep(run.directory, result)
    return result, run.directory


def test_a_budget_is_kept_on_training_images_and_judged_on_others(trained, solved):
    result, _ = solved
    assert result["calibrated_on"] == {"split": "train", "images": 1438}
    assert result["judged_on"] == {"split": "test", "images": 359}
    costs = calibration.costs_of(loading.load_run(trained).model_config)
    assert [one["gflops"] for one in result["exits"]] == list(costs)
    for budget, one in zip(BUDGETS, result["budgets"], strict=True):
        # The digits of the test set are other people's.
        assert one["calibration"]["gflops"] <= budget and one["gflops"] < budget * 1.3
        assert sum(one["shares"]) == pytest.approx(1) and len(one["thresholds"]) == 2
        assert one["gflops"] == pytest.approx(np.dot(one["shares"], costs))
    assert len(result["geometric"]) == 59
    accuracy = [one["calibration"]["accuracy"] for one in result["budgets"]]
    assert accuracy == sorted(accuracy) and accuracy[-1] > accuracy[0]


def test_exits_prints_a_table_and_keeps_it_with_a_picture_beside_the_checkpoint(
    command, trained, solved
):
    result, folder = solved
    (folder / "exits.json").unlink()
    code, out, err = command("exits", f"--checkpoint={trained}", "--budgets=1.5,0.5,1")
    assert code == 0, err
    assert "budget 1.5" in out and "exit 3" in out and f"{folder}/exits.png" in out
    assert json.loads((folder / "exits.json").read_text()) == result
    picture = Image.open(folder / "exits.png")
    assert picture.format == "PNG" and picture.width >= 760 and picture.height >= 480


def test_evaluate_with_a_budget_finds_what_the_curve_predicts(command, trained, solved):
    result, _ = solved
    (one,) = (row for row in result["budgets"] if row["budget"] == 1)
    code, out, err = command("evaluate", f"--checkpoint={trained}", "--budget=1", "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["early_exit/accuracy"] == pytest.approx(one["accuracy"], abs=1e-6)
    assert found["early_exit/gflops"] == pytest.approx(one["gflops"])
    shares = [found[f"early_exit/exit{n}"] for n in (1, 2, 3)]
    assert shares == pytest.approx(one["shares"]) and found["early_exit/examples"] == 359


def test_thresholds_that_nobody_reaches_give_the_accuracy_of_the_last_exit(command, trained):
    plain = command("evaluate", f"--checkpoint={trained}", "--json")[1]
    early = command("evaluate", f"--checkpoint={trained}", "--threshold=2,2", "--json")[1]
    plain, early = (json.loads(text.splitlines()[-1]) for text in (plain, early))
    for name in ("accuracy", "top5_accuracy", "loss", "examples"):
        assert early[f"early_exit/{name}"] == pytest.approx(plain[name], rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_predict_leaves_early_and_answers_in_the_order_of_the_files(
    command, trained, tmp_path, caplog, batch_size
):
    files = [tmp_path / f"{'x' * i}.png" for i in range(1, 8)]
    for path in files:
        write_image(path)
    (tmp_path / "text.png").write_text("no image")
    given = [*files[:4], tmp_path / "text.png", *files[4:]]

    def predicted(*flags):
        with caplog.at_level(logging.INFO):
            _, out, _ = command("predict", f"--checkpoint={trained}", *given, "--json", *flags)
        rows = json.loads(out.splitlines()[-1])
        assert [row["file"] for row in rows] == list(map(str, files))
        return [[p["probability"] for p in row["predictions"]] for row in rows]

    full = predicted(f"--batch_size={batch_size}")
    late = predicted(f"--batch_size={batch_size}", "--threshold=2,2")
    np.testing.assert_allclose(late, full, atol=1e-6)
    at_once = predicted(f"--batch_size={batch_size}", "--threshold=0,0")
    assert np.abs(np.array(at_once) - full).max() > 1e-3
    assert "100%, 0%, 0% of the images left at the exits" in caplog.text


WRONG = {
    "too small": (("--budget=0.1",), 2, "a budget of 0.1 GFLOPs (multiply-adds) an image is less than the first exit"),
    "too large": (("--budget=9",), 2, "is more than all exits together cost"),
    "not solved": (("--budget=0.7",), 2, "no thresholds for a budget of 0.7, only for 0.5, 1, 1.5: find all with"),
    "one threshold": (("--threshold=0.5",), 2, "1 thresholds for a model with 3 exits: it takes 2"),
    "no number": (("--threshold=high,low",), 2, "--threshold=high,low must be numbers: "),
    "both": (("--threshold=1,1", "--budget=1"), 2, "pass --budget or --threshold, not both"),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "exit_code", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_a_sentence(command, trained, solved, flags, exit_code, message):
    code, out, err = command("evaluate", f"--checkpoint={trained}", *flags)
    assert code == exit_code and message in err and "Traceback" not in err and not out


def test_thresholds_of_another_checkpoint_are_refused(command, trained, solved, tmp_path):
    config = default_config()
    config.update_from_flattened_dict(TOY | {"duration": "1 steps"})
    vit_jax.train(config, tmp_path)
    code, _, err = command("evaluate", f"--checkpoint={tmp_path}", "--budget=1.0")
    assert code == 2 and "has no thresholds for its exits yet: find them with 'vit_jax exits" in err
    shutil.copy(solved[1] / "exits.json", reading.find_checkpoint(tmp_path))
    code, _, err = command("evaluate", f"--checkpoint={tmp_path}", "--budget=1.0")
    assert code == 1 and "has the thresholds of another checkpoint (step 40 of a Toy-3)" in err
    (reading.find_checkpoint(tmp_path) / "exits.json").write_text('{"budgets": []')
    code, _, err = command("evaluate", f"--checkpoint={tmp_path}", "--budget=1.0")
    assert code == 1 and "exits.json is damaged" in err


def test_exits_says_what_it_cannot_work_with(command, trained, tmp_path):
    call = ("exits", f"--checkpoint={trained}")
    code, _, err = command(*call)
    assert code == 2 and "--budgets=GFLOPS,… is missing" in err
    code, _, err = command(*call, "--budgets=0.5,90")
    assert (
        code == 2 and "a budget of 90 GFLOPs (multiply-adds) an image is more than all exits" in err
    )
    code, _, err = command(*call, "--budgets=1", "--images=9")
    assert code == 2 and "9 training images are too few" in err and "there are 10 classes" in err
    config = default_config()
    config.update_from_flattened_dict(TOY | {"duration": "1 steps", "model.exits": 1})
    vit_jax.train(config, tmp_path)
    for words in (
        ("exits", "--budgets=1"),
        ("evaluate", "--budget=1"),
        ("predict", "a.png", "--threshold=1"),
    ):
        code, _, err = command(*words, f"--checkpoint={tmp_path}")
        assert code == 2 and "images cannot leave this model early: it has no exits" in err


def test_benchmark_tells_images_a_second_and_what_gathering_costs(command, trained, tmp_path):
    code, out, err = command("benchmark", "inference", f"--checkpoint={trained}", "--threshold=0.4,0.5",
                             "--steps=3", "--json")  # fmt: skip
    assert code == 0, err
    of_run = json.loads(out.splitlines()[-1])
    assert of_run["images"] == 3 * 64 and of_run["exit_runs"][0] == 3
    assert len(of_run["exit_seconds"]) == 3 and sum(of_run["shares"]) == pytest.approx(1)
    toy = TOY | {"model.num_classes": 10}
    (tmp_path / "toy.py").write_text(
        "from vit_jax.config import default_config\n\n\ndef get_config():\n"
        f"    config = default_config()\n    config.update_from_flattened_dict({toy!r})\n    return config\n"
    )
    recipe = f"--config={tmp_path}/toy.py"
    code, out, err = command(
        "benchmark", "inference", recipe, "--shares=0.5,0.25,0.25", "--steps=4", "--json"
    )
    assert code == 0, err
    of_shares = json.loads(out.splitlines()[-1])
    assert of_shares["shares"] == [0.5, 0.25, 0.25] and of_shares["exit_runs"][0] == 4
    assert of_shares["speedup_by_flops"] == pytest.approx(2.232 / of_shares["gflops"])
    for flags, message in (
        (("inference", f"--checkpoint={trained}"), "a --checkpoint is for 'benchmark inference"),
        (("step", recipe, "--shares=1"), "--shares is for 'benchmark inference'"),
        (("inference", recipe, "--shares=0.5,0.5"), "1 thresholds for a model with 3 exits"),
    ):
        code, _, err = command("benchmark", *flags)
        assert code == 2 and message in err
