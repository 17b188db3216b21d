"""What is frozen stays as it is, to the bit: parameters, running statistics, averages, in every family."""

import jax
import numpy as np
import pytest

from tests.models.conftest import parameters, statistics
from tests.models.test_contract import TINY
from tests.training.test_step import make_batches
from vit_jax.base import patterns
from vit_jax.config import default_config
from vit_jax.interchange import formats
from vit_jax.models import classifier, registry
from vit_jax.training.assembly import assemble, resolve

BODY = (f"(?!{classifier.EXIT}head(_distilled)?/).*",)  # as configs/linear_probe.py


def arrays(state):
    """All arrays of a state that are saved, but those of its optimizer, by name."""
    parts = {
        name: part
        for name, part in state.parts().items()
        if name not in ("opt_state", "step", "health")
    }
    return patterns.named(jax.device_get(parts))


def moved_by_two_steps(family, **overrides):
    """Names of the arrays that two steps move, and of those that they leave."""
    return steps(family, **overrides)[:2]


def steps(family, **overrides):
    """Names of the arrays that two steps move, and of those that they leave; all before and after."""
    name, options, _ = TINY[family]
    height, width = options["image_size"]
    config = default_config()
    sizes = {"data.image_size": f"{height}x{width}", "batch_size": 16, "duration": "100 steps"}
    config.update_from_flattened_dict(sizes | {"optim.ema": 0.9, "optim.warmup": "0 steps"})
    config.model.update({"name": name} | {n: v for n, v in options.items() if n != "image_size"})
    config.update_from_flattened_dict(overrides)
    assembly = assemble(resolve(config), num_classes=10, examples_per_epoch=160)
    state = jax.jit(assembly.init)(jax.random.key(0))
    before, step = arrays(state), jax.jit(assembly.train_step)
    for batch in make_batches(2, size=max(height, width)):
        batch["image"] = batch["image"][:, :height, :width]
        state, _ = step(state, batch)
    after = arrays(state)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    return moved, set(before) - moved, before, after


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_with_a_frozen_body_the_head_alone_changes(family):
    moved, left = moved_by_two_steps(family, **{"optim.freeze": BODY})
    assert moved and all("head" in name for name in moved)
    assert any("head" not in name for name in left)


def test_statistics_of_frozen_norms_and_of_frozen_layers_of_a_stack_stay_and_others_move():
    freeze = ("layers/mlp/up_norm/.*", "layers[:1]/.*")
    moved, left, before, after = steps("localvit", **{"optim.freeze": freeze})
    statistics = [name for name in moved if name.endswith(("/mean", "/var"))]
    assert len(statistics) == 8  # of two norms, of the model and of its average
    for name in statistics:
        np.testing.assert_array_equal(before[name][0], after[name][0])
        assert not np.array_equal(before[name][1], after[name][1])
    assert {name for name in left if name.endswith("/var")} == {
        f"{owner}_variables/layers/mlp/up_norm/var" for owner in ("model", "ema")
    }


@pytest.mark.slow
def test_below_adapters_statistics_stay(tmp_path):
    name, options, _ = TINY["deepvit"]
    base = formats.LoadedCheckpoint(
        model := registry.model_config(name, **options), parameters(model)
    )
    base.variables = statistics(model)
    formats.write_checkpoint(base, tmp_path / "base", "orbax")
    adapters = {"lora.lora_rank": 1, "init_from": str(tmp_path / "base")}
    moved, left = moved_by_two_steps("deepvit", **adapters)
    assert moved and not any(name.endswith(("/mean", "/var")) for name in moved)
    assert any(name.endswith("norm/var") for name in left)


@pytest.mark.slow
def test_statistics_of_a_norm_move_where_one_of_its_parameters_is_trained():
    moved, _ = moved_by_two_steps(
        "localvit", **{"optim.freeze": (".*/(kernel|bias|scale)(?<!up_norm/bias)",)}
    )
    assert {name.split("/", 1)[1] for name in moved if name.endswith("/mean")} == {
        "layers/mlp/up_norm/mean"
    }
