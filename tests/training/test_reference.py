"""A run beside a curve of earlier ones: the figures of the package, what can be compared, and when a run is ended."""

import dataclasses
import json

import numpy as np
import pytest

from tests.integration.conftest import TINY
from vit_jax import evaluation
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.recipes.user_files import load_config, load_recipe
from vit_jax.training import preflight, with_data
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.upkeep import curves, reference

PUBLISHED = list(curves._published())
SIZES = {"S": "small", "B": "base", "L": "large", "H": "huge"}


@pytest.mark.parametrize(
    ("name", "epoch", "percent"),
    [
        ("deit3-S16-224", 40, 48.034), ("deit3-B16-192", 130, 69.286), ("deit3-L16-192", 520, 82.112),
        ("deit3-H14-160", 800, 83.484), ("deit3-B16-224-finetuned", 20, 83.802), ("deit3-S16-384-finetuned", 0, 82.134),
        ("deit3-L16-224-21k", 50, 86.98),
    ],
)  # fmt: skip
def test_the_packages_curves_have_the_authors_figures(name, epoch, percent):
    band = curves.read_curve(name).at(epoch)
    assert band.seeds == 1 and band.low == band.high == band.mean
    np.testing.assert_allclose(100 * band.mean, percent, atol=1e-9)


def test_every_published_figure_is_among_them(shared_data):
    """But those of ImageNet-21k alone, whose images the source does not name."""
    given = json.loads((shared_data / "curves.json").read_text())
    theirs = [
        sorted(points.values())
        for recipe, points in given["deit_iii"].items()
        if recipe.split()[2] not in ("240ep", "90ep")
    ]
    theirs += [
        sorted(v for _, v in run) for s in given["algoperf_imagenet_vit"].values() for run in s
    ]
    ours = [
        sorted(round(100 * value, 4) for _, value in run)
        for name in PUBLISHED
        for run in curves.read_curve(name).runs
    ]
    assert sorted(theirs) == sorted(ours)


def test_seeds_make_a_band_which_ends_where_their_runs_end():
    curve = curves.read_curve("algoperf-nadamw")
    band = curve.at(60_000 * 1024 / 1_281_167)
    assert band.seeds == 5 and band.low < band.mean < band.high
    assert 0.66 < band.mean < 0.68 and band.high - band.low < 0.02
    assert curve.at(0) is None and curve.at(curve.end + 1e-6) is None
    assert curve.at(curve.end).seeds == 1


def test_the_curves_recipes_are_those_of_the_configs():
    for name in PUBLISHED:
        kind, size, *_ = name.split("-")
        curve, stage = curves.read_curve(name), name.rpartition("-")[2]
        if kind == "algoperf":
            config = load_config("configs/algoperf.py")
        else:
            argument = f"{size[0]}/{size[1:]}"
            if stage == "21k":
                config = load_recipe(f"configs/deit3_i21k.py:{argument}")["imagenet1k"]
            else:
                last = ",384" if "-384-" in name else ""
                runs = load_recipe(f"configs/deit3.py:{argument}{last}")
                config = next(c for c in runs.values() if c.reference.curve == name)
            assert config.reference.curve == name
        config.init_from = ""
        config = resolve(config)
        model = assemble(config, num_classes=1000, examples_per_epoch=1_281_167).model_config
        recipe = curves.recipe_of(curves.with_model(config, model))
        usual = curves.default_recipe(config.model.name)
        assert not curves.differences(usual | curve.recipe, recipe), name
        assert curve.model == curves.sizes_of(model)
        assert curve.data["image_size"] == [config.data.image_size] * 2


@dataclasses.dataclass
class Run:
    config: object
    assembly: object
    source: object
    suite: object

    def check(self):
        return reference.check_reference(self.assembly, self.source, self.suite)

    def make(self):
        return reference.make_reference(self.assembly, self.source, self.suite)


def run_of(config) -> Run:
    config = resolve(config)
    source = sources.open_train(config.data)
    assembly = with_data.assembly_for(config, source)
    suite = evaluation.make(config.eval.evaluators, with_data.subject_of(assembly, source))
    return Run(config, assembly, source, suite)


def write_curve(path, run: Run, values=(0.2, 0.5, 0.8), epochs=(1, 2, 4), seeds=1, **changes):
    """A file of a curve of this very run."""
    recipe = curves.recipe_of(curves.with_model(run.config, run.assembly.model_config))
    data = dict(name="digits", classes=10, training_examples=1438, evaluated_examples=359)
    curve = curves.Curve(
        name="made up", source="this test", metric="accuracy", epochs=4.0, recipe=recipe,
        model=curves.sizes_of(run.assembly.model_config), data=data | {"image_size": [32, 32]},
        runs=[[[e, v + seed / 100] for e, v in zip(epochs, values, strict=True)] for seed in range(seeds)],
    )  # fmt: skip
    path.write_text(dataclasses.replace(curve, **changes).to_json())
    return str(path)


def tiny_config(**fields):
    """The config of a tiny run on digits; fields by dotted name, dots as double underscores."""
    config = load_config("configs/digits.py")
    given = {name.replace("__", "."): value for name, value in fields.items()}
    config.update_from_flattened_dict(TINY | given)
    return config


@pytest.fixture
def tiny(tmp_path):
    """`tiny(seeds, …)`: a run of 4 epochs beside a curve of its own; the rest are fields of either."""

    def make(stop_below=0.0, *, fields=None, **curve) -> Run:
        config = tiny_config(duration="4 epochs", eval__every="1 epochs")
        path = write_curve(tmp_path / "curve.json", run_of(config), **curve)
        config.reference.update(dict(curve=path, stop_below=stop_below))
        config.update_from_flattened_dict(fields or {})
        return run_of(config)

    return make


def test_a_sentence_says_where_the_run_and_the_curve_are(tiny):
    compared = tiny(seeds=3).make().compare(90, {"accuracy": 0.523})
    assert compared.sentence == ("epoch 2.003: 52.3 %; made up had 51.04 (−1 … +1 over 3 seeds)")
    assert compared.scalars["reference/accuracy_low"] == pytest.approx(0.50042, abs=1e-4)
    assert compared.scalars["reference/difference"] == pytest.approx(0.523 - 0.51042, abs=1e-4)
    assert compared.error is None
    alone = tiny().make().compare(90, {"accuracy": 0.523}).sentence
    assert alone.endswith("made up had 50.04")
    before = tiny().make().compare(2, {"accuracy": 0.1})
    assert "covers epochs 1 to 4 alone" in before.sentence and not before.scalars


def test_a_run_is_ended_below_the_band_and_not_before_a_tenth(tiny):
    run = tiny(2.0, seeds=3, fields={"optim.lr": 0.03, "optim.b1": 0.5}).make()
    assert run.compare(90, {"accuracy": 0.1}).error is None  # one alone may be bad luck
    error = run.compare(90, {"accuracy": 0.47}).error
    message = str(error)
    assert error.exit_code == 1 and "stop_below = 2" in message
    assert "last 2 evaluations were 21.5 points worse" in message
    for cause in ("labels", "normalisation", "augmented", "learning rate", "batch_size"):
        assert cause in message
    assert "optim.b1 is 0.5 (0.9); optim.lr is 0.03 (0.003)." in message
    run.behind = []
    for accuracy in (0.485, 0.485, 0.485, 0.52, 0.47, 0.47):  # the lowest seed had 50.04
        assert run.compare(90, {"accuracy": accuracy}).error is None
    assert "last 3 evaluations" in str(run.compare(90, {"accuracy": 0.47}).error)
    late = dataclasses.replace(run, not_before=91, behind=[])
    late.compare(90, {"accuracy": 0.1})
    assert late.compare(90, {"accuracy": 0.1}).error is None
    plain = tiny(2.0).make()
    plain.compare(90, {"accuracy": 0.1})
    same = plain.compare(90, {"accuracy": 0.1}).error
    assert "Nothing that is known of the curve's recipe is different" in str(same)


def test_of_a_loss_less_is_better(tiny):
    run = tiny(2.0, metric="loss", values=(9.0, 7.0, 5.0), seeds=2).make()
    assert not any(run.compare(90, {"loss": 3.0}).error for _ in range(3))
    run.behind = []
    run.compare(90, {"loss": 10.0})
    compared = run.compare(90, {"loss": 10.0})
    assert compared.sentence.startswith("epoch 2.003: 10; made up had 7.00")
    assert "2.99 points worse" in str(compared.error)


DATA = dict(name="digits", classes=10, training_examples=1438, evaluated_examples=359)


@pytest.mark.parametrize(
    ("curve", "fields", "why"),
    [
        ({"model": {"width": 768}}, {}, "its model has width 768, the run's 32"),
        ({"data": DATA | {"image_size": [24, 32]}}, {}, "its images have 24x32 pixels, the run's 32x32"),
        ({"data": DATA | {"image_size": [32, 32], "name": "cifar10"}}, {}, "it is of cifar10, the run of digits"),
        ({"data": DATA | {"image_size": [32, 32], "classes": 11}}, {}, "it has 11 classes, the run 10"),
        (
            {"data": DATA | {"image_size": [32, 32], "training_examples": 1500}}, {},
            "it has 1,500 training examples, the run 1,438",
        ),
        ({"metric": "knn/accuracy"}, {}, "it is of the metric 'knn/accuracy', and evaluations have accuracy"),
        ({}, {"eval.every": "0 steps"}, "evaluated at its end only: set config.eval.every"),
    ],
)  # fmt: skip
def test_what_is_of_something_else_is_not_compared_and_the_run_says_why(
    tiny, caplog, curve, fields, why
):
    run = tiny(fields=fields, **curve)
    assert run.make() is None and why in caplog.text
    with pytest.raises(ConfigError, match="stop_below = 1 cannot end the run"):
        tiny(1.0, fields=fields, **curve).check()


def test_nineteen_in_twenty_images_are_the_same_data_set(tiny):
    same = DATA | {"image_size": [32, 32], "training_examples": 1424, "name": "folder"}
    assert tiny(data=same).make() is not None


def test_a_curve_that_is_shorter_than_the_run_is_noted(tiny, caplog):
    run = tiny(values=(0.2, 0.5), epochs=(1, 2)).make()
    assert "ends at epoch 2, and the run at 4" in caplog.text
    assert "alone" in run.compare(180, {"accuracy": 0.1}).sentence


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no curve"), ('{"runs": []}', "is no curve"), ("[]", "is no curve"),
        (None, "no such curve in the package; did you mean 'deit3-S16-224'"),
    ],
)  # fmt: skip
def test_what_is_no_curve_is_refused(tmp_path, text, why):
    path = tmp_path / "curve.json"
    if text is not None:
        path.write_text(text)
    name = str(path) if text is not None else "deit3-S16-22"
    with pytest.raises(ConfigError, match=why):
        run_of(tiny_config(reference__curve=name)).check()
    with pytest.raises(ConfigError, match="stop_below = 2 has no effect without a curve"):
        run = run_of(tiny_config(reference__stop_below=2.0))
        preflight.check_run(run.assembly, run.source, run.suite)


def test_the_path_of_a_curve_is_kept_whole_and_a_name_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_curve(tmp_path / "curve.json", run_of(tiny_config()))
    for name, kept in (
        ("curve.json", f"{tmp_path}/curve.json"), ("./runs/first", f"{tmp_path}/runs/first"),
        ("deit3-S16-224", "deit3-S16-224"), ("deit3-S16-22", "deit3-S16-22"), ("", ""),
    ):  # fmt: skip
        assert resolve(tiny_config(reference__curve=name)).reference.curve == kept


def test_epochs_that_do_not_rise_are_refused(tiny):
    with pytest.raises(ConfigError, match="the epochs of a run must rise"):
        tiny(epochs=(1, 2, 2)).check()
