"""Recipes of several stages: a later run starts from the last weights of an earlier one. That they may be killed
anywhere is in `test_reliability.py`.
"""

import numpy as np
import pytest

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.base.patterns import named
from vit_jax.checkpoints import reading
from vit_jax.planning.dry_run import dry_run
from vit_jax.studies.sweep import run_all
from vit_jax.training.upkeep.health import NonFiniteError


def stages(tiny_config, **fields):
    runs = {"first": tiny_config(duration="4 steps", eval__evaluators=(), **fields)}
    runs["larger"] = recipes.next_stage(runs)
    runs["larger"].data.image_size = 40
    return runs


def params_of(workdir):
    return named(reading.read_weights(workdir).params)


def test_a_stage_starts_from_the_weights_of_the_one_before_at_its_own_resolution(
    tiny_config, tmp_path
):
    runs = stages(tiny_config, optim__ema=0.5, model__depth=1)
    runs["larger"].optim.lr = 0.0
    found = run_all(runs, tmp_path)
    assert list(found) == ["first", "larger"] and found["larger"]["step"] == 4
    first, larger = (params_of(tmp_path / name) for name in runs)
    assert larger["position"].shape != first["position"].shape
    for name in first.keys() - {"position"}:  # the averaged weights, head included
        np.testing.assert_allclose(larger[name], first[name], atol=1e-7, err_msg=name)
    assert run_all(runs, tmp_path) == found  # nothing is repeated
    assert runs["larger"].init_from == "first"


def test_no_stage_starts_from_one_whose_loss_ceased_to_be_finite(tiny_config, tmp_path):
    runs = stages(tiny_config, data__std=(1e-40,))  # pixels are divided by it
    with pytest.raises(NonFiniteError):
        run_all(runs, tmp_path)
    assert not (tmp_path / "larger").exists()


def test_a_dry_run_of_a_stage_needs_no_weights(tiny_config):
    runs = stages(tiny_config)
    result, recipe = dry_run(runs["larger"], None, tuple(runs))
    assert result["image_size"] == 40 and "data.image_size = 40" in recipe


def test_a_stage_that_cannot_be_trained_is_refused_before_the_first_is(tiny_config, tmp_path):
    runs = stages(tiny_config)
    runs["larger"].data.image_size = 36
    with pytest.raises(
        ConfigError, match="run 'larger': image size 36 cannot be split into patches of 8"
    ):
        run_all(runs, tmp_path)
    assert not list(tmp_path.iterdir())
