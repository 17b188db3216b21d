"""Choosing by held-out examples and repeating with seeds, on digits with a tiny model."""

import json
import math
import pathlib
import re

import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.commands import flags as cli
from vit_jax.data import splits
from vit_jax.evaluation.metric_order import MetricOrder
from vit_jax.recipes.user_files import load_config
from vit_jax.studies import sweep as sweeps
from vit_jax.studies.sweep import _judged, choose_setting, divide, sweep, text
from vit_jax.training.loop import train
from vit_jax.training.upkeep.health import NonFiniteError

TINY = {
    "model.name": "ViT-mu/8",
    "model.width": 32,
    "model.depth": 1,
    "model.heads": 2,
    "model.mlp_dim": 64,
    "batch_size": 64,
    "duration": "30 steps",
    "optim.warmup": "0 steps",
    "log.tensorboard": False,
    "data.threads": 1,
}
GRID = {"optim.lr": [1e-5, 1e-2, 1e30]}


def digits(cache, **overrides):
    config = load_config("configs/digits.py")
    config.update_from_flattened_dict(TINY | {"compilation_cache": str(cache)})
    config.data.train_split = "train[:90%]"
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in overrides.items()})
    return config


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def swept(cache, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sweep")
    return workdir, sweep(digits(cache), workdir, GRID, seeds=2)


def config_of(run):
    return reading.newest_description(run)["config"]


@pytest.mark.slow
def test_the_best_on_the_examples_left_out_is_trained_on_all_with_each_seed(swept):
    workdir, summary = swept
    slow, fast, _ = summary["settings"]
    assert slow["setting"] == {"optim.lr": 1e-5} and slow["loss"] > fast["loss"]
    assert (summary["chosen"], summary["select"]) == ({"optim.lr": 1e-2}, "train[90%:]")
    for name in ("optim.lr=1e-05", "optim.lr=0.01"):
        data = config_of(workdir / "select" / name)["data"]
        assert (data["train_split"], data["eval_split"]) == ("train[:90%]", "train[90%:]")
    for seed in (0, 1):
        config = config_of(workdir / "final" / f"seed_{seed}")
        assert (config["seed"], config["optim"]["lr"]) == (seed, 1e-2)
        assert (config["data"]["train_split"], config["data"]["eval_split"]) == ("train", "test")


@pytest.mark.slow
def test_mean_and_standard_deviation_are_those_of_the_seeds(swept):
    workdir, summary = swept
    ends = [json.loads((workdir / f"final/seed_{s}/result.json").read_text()) for s in (0, 1)]
    for name in ("accuracy", "loss"):
        a, b = (end[name] for end in ends)
        expected = {"mean": (a + b) / 2, "std": abs(a - b) / math.sqrt(2)}
        for key, value in expected.items():
            np.testing.assert_allclose(summary[name][key], value, rtol=1e-9, atol=1e-12)
    assert ends[0]["loss"] != ends[1]["loss"]
    assert json.loads((workdir / "sweep.json").read_text()) == summary
    lines = text(summary).splitlines()
    assert [line.endswith("chosen") for line in lines].count(True) == 1
    assert "±" in lines[-1] and lines[-1].endswith("(n = 2)")


@pytest.mark.slow
def test_started_again_it_repeats_no_run_that_ended(swept, cache, monkeypatch):
    workdir, before = swept
    started = []

    def recorded(config, run):
        started.append(pathlib.Path(run).name)
        return train(config, run)

    monkeypatch.setattr(sweeps, "train", recorded)
    (workdir / "final/seed_1/result.json").unlink()  # As if it had been stopped before its end.
    after = sweep(digits(cache), workdir, {"optim.lr": GRID["optim.lr"][:2]}, seeds=2)
    assert started == ["seed_1"]
    assert after["settings"] == before["settings"][:2] and after["seeds"][0] == before["seeds"][0]
    assert after["seeds"][1]["accuracy"] == before["seeds"][1]["accuracy"]


@pytest.mark.slow
def test_which_run_it_is_and_how_many_are_left_is_logged(swept, cache, caplog):
    caplog.set_level("INFO")
    sweep(digits(cache), swept[0], {"optim.lr": [1e-5, 1e-2]}, seeds=2)
    logged = [r.message for r in caplog.records if r.filename == "sweep.py"]
    assert logged[0] == (
        "setting 1 of 2, optim.lr=1e-05: trained on train[:90%], judged on train[90%:]; then 2 runs of the best one"
    )
    assert logged[1].endswith("optim.lr=1e-05: this run has ended, it is not repeated")
    assert logged[2].startswith("setting 2 of 2, optim.lr=0.01")
    assert logged[6] == "run 2 of 2 of the best setting, optim.lr=0.01: seed 1, trained on train"


@pytest.mark.parametrize(
    ("field", "value"), [("optim__b1", 0.5), ("data__eval_crop", "central"), ("data__resize", 40)]
)
@pytest.mark.slow
def test_runs_of_another_config_are_not_taken_for_its_own(swept, cache, field, value):
    with pytest.raises(ConfigError, match=f"{field.replace('__', '.')}: .* Use another --workdir"):
        sweep(digits(cache, **{field: value}), swept[0], GRID, seeds=1)


@pytest.mark.slow
def test_a_setting_that_diverges_is_told_and_cannot_be_chosen(swept):
    summary = swept[1]
    diverged = {"setting": {"optim.lr": 1e30}, "accuracy": None, "loss": None}
    assert summary["settings"][2] == diverged
    assert re.search(r"optim.lr=1e\+30 +diverged$", text(summary), re.MULTILINE)


@pytest.mark.slow
def test_one_seed_has_no_deviation(swept, cache):
    summary = sweep(digits(cache), swept[0], {"optim.lr": [1e-2]}, seeds=1)
    mean = summary["seeds"][0]["accuracy"]
    assert summary["accuracy"] == {"mean": mean, "std": None}
    assert text(summary).endswith(f"accuracy {mean:.4f} (n = 1)")


@pytest.mark.parametrize(
    ("told", "values"),
    [
        ("optim.lr=0.003,0.01", [0.003, 0.01]),
        ("optim.lr=1e-3", [1e-3]),
        ("duration=500 steps,10%", ["500 steps", "10%"]),
        ("data.crop_area=(0.05,1.0),(0.5,1.0)", [(0.05, 1.0), (0.5, 1.0)]),
    ],
)
def test_the_command_line_takes_values_of_any_type(told, values):
    assert [cli.values(text) for text in cli.options([told], "grid").values()] == [values]


def test_the_command_says_what_is_wrong_before_any_run(command, tmp_path):
    how = ("--config=configs/digits.py", "--grid=optim.lr=0.1", f"--workdir={tmp_path}")
    code, _, err = command("sweep", *how)
    assert code == 2 and "leaves no examples to choose by" in err
    assert "Traceback" not in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("train_split", "select", "expected"),
    [
        ("train[:98%]", "", ("train[:98%]", "train[98%:]", "train")),
        ("train[1000:]", "", ("train[1000:]", "train[:1000]", "train")),
        ("train", "train[98%:]", ("train[:98%]", "train[98%:]", "train")),
        ("train", "train[-100:]", ("train[:-100]", "train[-100:]", "train")),
        (
            "train",
            "train[100:200]",
            ("train[:100]+train[200:]", "train[100:200]", "train"),
        ),
        ("train[:98%]", "train[90%:]", ("train[:90%]", "train[90%:]", "train")),
        (
            "train[:800]+validation[:200]",
            "validation[:200]",
            ("train[:800]", "validation[:200]", "train[:800]+validation[:200]"),
        ),
    ],
)
def test_what_is_chosen_by_is_not_trained_on(train_split, select, expected):
    assert divide(train_split, select) == expected
    sizes = {"train": 5003, "validation": 301}
    part, chosen_by, whole = (
        [(n, i) for n, a, b in splits.select(text, sizes, "here") for i in range(a, b)]
        for text in expected
    )
    assert sorted(part + chosen_by) == sorted(whole)


@pytest.mark.parametrize(
    ("train_split", "select", "message"),
    [
        ("train", "", "leaves no examples to choose by: set them with --select"),
        ("train+validation", "", "leaves no examples to choose by"),
        ("train", "test", "--select=test is neither a slice of"),
        ("train", "test[:10]", "neither a slice"),
        ("train", "train", "neither a slice"),
        ("train[:800]+validation", "train[800:]", "neither a slice"),
    ],
)
def test_examples_to_choose_by_must_be_some_of_those_to_train_on(train_split, select, message):
    with pytest.raises(ConfigError, match=message):
        divide(train_split, select)


@pytest.mark.slow
def test_with_patience_the_last_runs_are_not_ended_early(cache, tmp_path):
    options = {"eval__every": "2 steps", "eval__patience": 1, "eval__best": "examples:max"}
    config = digits(cache, duration="6 steps", batch_size=32, **options)
    summary = sweep(config, tmp_path, {"optim.lr": [1e-2]}, seeds=1)
    chosen = json.loads((tmp_path / "select" / "optim.lr=0.01" / "result.json").read_text())
    assert chosen["step"] == 4 and chosen["best"]["step"] == 2
    assert summary["seeds"][0]["step"] == 6
    assert config_of(tmp_path / "final" / "seed_0")["eval"]["patience"] == 0


@pytest.mark.parametrize(("patience", "value"), [(1, 0.9), (0, 0.3)])
def test_with_patience_a_setting_is_judged_by_its_best_evaluation(cache, patience, value):
    best = {"metric": "accuracy", "value": 0.9}
    order = MetricOrder("accuracy", "max")
    config = digits(cache, eval__patience=patience)
    assert _judged({"accuracy": 0.3, "best": best}, order, config)["accuracy"] == value


def test_a_setting_whose_metric_is_not_a_number_does_not_win():
    tried = [
        ({"optim.lr": n}, {"accuracy": a, "loss": 1.0})
        for n, a in enumerate((math.nan, 0.4, 0.6, 0.5))
    ]
    high, low = MetricOrder("accuracy", "max"), MetricOrder("accuracy", "min")
    assert choose_setting([*tried, ({"optim.lr": 4}, {})], high) == {"optim.lr": 2}
    assert choose_setting(tried, low) == {"optim.lr": 1}
    with pytest.raises(NonFiniteError, match="accuracy of every setting"):
        choose_setting(tried[:1], high)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            {"data.train_split": ["train[:10%]", "train[:50%]"]},
            "--grid=data.train_split: .*--select",
        ),
        ({"seed": [5, 6]}, "--grid=seed: .*--seeds"),
        (
            {"optim.lr": [0.1], "eval.patience": [1, 2]},
            "--grid=eval.patience: .*--config.eval.patience",
        ),
        ({"optim.lrr": [1]}, "config has no field optim.lrr; did you mean 'optim.lr'"),
        ({}, "no or the same settings twice"),
        ({"optim.lr": []}, "no or the same settings twice"),
        ({"optim.lr": [0.1, 0.1]}, "the same settings twice"),
        ({"duration": [500]}, "config.duration = 500 must be of the type"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_before_any_run(cache, tmp_path, grid, message):
    with pytest.raises(ConfigError, match=message):
        sweep(digits(cache), tmp_path, grid)
    assert not list(tmp_path.iterdir())
