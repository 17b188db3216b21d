"""Averages of models: uniform and greedy soups, the last checkpoints of a run."""

import json
import math

import jax
import numpy as np
import pytest

import vit_jax
from tests.integration.conftest import TINY
from tests.models.conftest import parameters, statistics
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.evaluation.soups import greedy
from vit_jax.interchange import averaging, formats, loading
from vit_jax.models import registry


def train(workdir, cache: str, steps: int):
    """A run on digits with three checkpoints."""
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(
        TINY
        | {
            "compilation_cache": cache,
            "duration": f"{steps} steps",
            "checkpoint.every": f"{steps // 3} steps",
            "optim.warmup": "5 steps",
            "optim.ema": 0.0,
            "optim.lr": 1e-2,
        }
    )
    vit_jax.train(config, workdir)
    return workdir


@pytest.fixture(scope="module")
def run(tmp_path_factory, compilation_cache):
    return train(tmp_path_factory.mktemp("averaged"), compilation_cache, 6)


def params_of(path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(formats.read_checkpoint(path).params)]


def numpy_mean(paths) -> list[np.ndarray]:
    """The mean in float64, rounded once."""
    models = zip(*map(params_of, paths), strict=True)
    return [np.mean(np.float64(leaves), axis=0).astype(np.float32) for leaves in models]


def perturbed(path, to, scale: float) -> str:
    """A copy of a checkpoint with noise on all parameters; the opposite scale gives the opposite noise."""
    random, model = np.random.default_rng(0), formats.read_checkpoint(path)
    noisy = lambda x: np.float32(np.asarray(x) + scale * random.standard_normal(x.shape))  # noqa: E731
    model.params = jax.tree.map(noisy, model.params)
    formats.write_checkpoint(model, to, "orbax")
    return str(to)


def test_the_last_checkpoints_of_a_run_are_averaged_as_numpy_does(run, command, tmp_path):
    code, out, err = command("merge", run, "--last=3", f"--out={tmp_path}/mean", "--json")
    assert code == 0, err
    steps = [run / "checkpoints" / step for step in "246"]
    assert json.loads(out.splitlines()[-1])["averaged"] == [str(step) for step in steps]
    for ours, expected in zip(params_of(tmp_path / "mean"), numpy_mean(steps), strict=True):
        np.testing.assert_array_equal(ours, expected)
    merged, first = vit_jax.load_run(tmp_path / "mean"), loading.load_run(run)
    assert merged.classes == first.classes
    assert merged.config.data.mean == first.config.data.mean


@pytest.mark.slow
def test_a_greedy_soup_takes_models_as_the_paper_does(compilation_cache, command, tmp_path):
    run = train(tmp_path / "run", compilation_cache, 150)
    models = [
        perturbed(run, tmp_path / str(number), scale)
        for number, scale in enumerate((0.5, -0.05, 0.05, 0.3))
    ]
    data = ("--config.data.name=digits", "--config.eval.batch_size=64")
    code, out, err = command(
        "merge", *models, "--greedy", f"--out={tmp_path}/soup", "--json", *data
    )
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])

    def accuracy(paths) -> float:
        averaged = tmp_path / f"average{len(list(tmp_path.iterdir()))}"
        formats.write_checkpoint(
            averaging.average([formats.read_checkpoint(path) for path in paths]), averaged, "orbax"
        )
        return vit_jax.load_run(averaged).evaluate("digits")["accuracy"]

    scores = {model: accuracy([model]) for model in models}
    assert result["accuracy"] == pytest.approx(scores)
    soup, best = [], 0.0
    for model in sorted(models, key=lambda model: -scores[model]):
        if (new := accuracy([*soup, model])) >= best:
            soup, best = [*soup, model], new
    assert result["averaged"] == soup and 1 < len(soup) < len(models)
    for ours, expected in zip(params_of(tmp_path / "soup"), numpy_mean(soup), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_greedy_order_is_by_score_and_equal_averages_are_taken():
    tried = []

    def score(numbers) -> float:
        tried.append(tuple(numbers))
        return {(2, 0): 0.7, (2, 3): 0.9, (2, 3, 1): 0.95}[tuple(numbers)]

    assert greedy([0.8, 0.1, 0.9, 0.5], score) == [2, 3, 1]
    assert tried == [(2, 0), (2, 3), (2, 3, 1)]


def test_a_greedy_soup_begins_with_no_model_whose_score_is_not_a_number_and_takes_none():
    scores = {(1,): 0.5, (1, 2): 0.6, (1, 2, 0): math.nan}
    assert greedy([math.nan, 0.5, 0.4], lambda numbers: scores[tuple(numbers)]) == [1, 2]


def model_of(path, name: str, seed: int, **options) -> str:
    config = registry.model_config(name, image_size=32, num_classes=3, **options)
    checkpoint = formats.LoadedCheckpoint(
        config, parameters(config, seed), variables=statistics(config)
    )
    formats.write_checkpoint(checkpoint, path, "orbax")
    return str(path)


def test_models_with_other_options_are_refused_by_name(run, command, tmp_path):
    sizes = {"width": 8, "heads": 2, "mlp_dim": 8, "activation": "gelu"}
    first = model_of(tmp_path / "a", "ViT-mu/16", 0, depth=1, **sizes)
    deeper = model_of(tmp_path / "b", "ViT-mu/16", 0, depth=2, **sizes)
    other = model_of(tmp_path / "c", "ViT-mu/16", 0, depth=1, **sizes | {"activation": "gelu_tanh"})
    out = f"--out={tmp_path}/soup"
    for name, path in {"model.depth is 2": deeper, "model.activation is gelu_tanh": other}.items():
        code, _, err = command("merge", first, path, out)
        assert code == 2 and name in err and path in err
    code, _, err = command("merge", first, run, out)
    assert code == 2 and "cannot be averaged" in err
    assert not (tmp_path / "soup").exists()


def test_too_few_checkpoints_and_a_used_folder_are_refused(run, command, tmp_path):
    code, _, err = command("merge", run, f"--out={tmp_path}/mean")
    assert code == 2 and "--last=N" in err
    code, _, err = command("merge", run, "--last=4", f"--out={tmp_path}/mean")
    assert code == 1 and "has 3 checkpoints" in err and "config.checkpoint.keep=4" in err
    code, _, err = command("merge", run, "--last=2", f"--out={run}")
    assert code == 1 and "something is there already" in err
    code, _, err = command(
        "merge", run, "--last=2", f"--out={tmp_path}/mean", "--config.data.name=digits"
    )
    assert code == 2 and "--greedy" in err


def test_running_statistics_are_not_averaged(tmp_path):
    paths = [
        model_of(
            tmp_path / str(seed),
            "LocalViT-T",
            seed,
            depth=1,
            width=8,
            heads=2,
            mlp_dim=8,
            reduction=4,
        )
        for seed in range(2)
    ]
    assert averaging.read_alike(paths)
    with pytest.raises(ConfigError, match="needs two"):
        averaging.read_alike(paths[:1])
    model = formats.read_checkpoint(paths[1])
    model.variables = jax.tree.map(lambda x: np.asarray(x) + 1, model.variables)
    formats.write_checkpoint(model, tmp_path / "trained", "orbax")
    with pytest.raises(CheckpointError, match="running statistics"):
        averaging.read_alike([paths[0], tmp_path / "trained"])
