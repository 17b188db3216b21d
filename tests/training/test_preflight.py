"""What `train` and `train --dry_run` refuse before anything is done."""

import dataclasses

import jax
import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax import evaluation
from vit_jax.base.errors import ConfigError
from vit_jax.planning import rough
from vit_jax.planning.dry_run import dry_run
from vit_jax.training.assembly import assemble, resolve

REFUSED = {
    "config.eval.best = 'acc' .*accuracy": {"eval.best": "acc"},
    "config.eval.best = 'knn/acc'": {"eval.best": "knn/acc", "eval.evaluators": ("accuracy", "knn")},
    "config.eval.patience = 3 has no effect": {"eval.patience": 3},
    "config.eval.target = 0.5 has no effect": {"eval.target": 0.5},
    "config.eval.target = 60: accuracy is a share": {"eval.target": 60.0, "eval.every": "1 epochs"},
    "config.eval.patience = 3 .*config.checkpoint.best=True": {
        "eval.patience": 3, "eval.every": "1 epochs",
    },
    "config.pseudo.teacher = 'nosuch'": {"pseudo.teacher": "nosuch"},
    "config.mesh: .*fsdp 3": {"mesh.fsdp": 3},
    "config.duration = '0 steps'": {"duration": "0 steps"},
    "config.hosts.step_minutes = 0": {"hosts.step_minutes": 0.0},
    r"config.log.profile = \(5, 3\)": {"log.profile": (5, 3)},
    r"config.log.profile = \(5, 300\) .* 12 steps": {"log.profile": (5, 300)},
    "config.model.*this machine's CPU": {"model.depth": 10**9},
    "config.batch_size .* = 36 cannot be spread over 8 devices": {"batch_size": 36},
    "config.data.path = '/photos' has no effect": {"data.path": "/photos"},
}  # fmt: skip


def tiny(**fields):
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(TINY | {"compilation_cache": "", "log.tensorboard": False})
    config.update_from_flattened_dict({n.replace("__", "."): v for n, v in fields.items()})
    return config


@pytest.mark.parametrize("message, fields", REFUSED.items(), ids=REFUSED)
def test_a_dry_run_refuses_what_training_refuses_before_it_writes(message, fields, tmp_path):
    config = tiny()
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError, match=message):
        dry_run(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        vit_jax.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of a run of four steps, and what training returned."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    return workdir, vit_jax.train(tiny(duration="4 steps"), workdir)


def test_a_dry_run_in_the_workdir_of_another_run_is_refused_and_weights_that_do_not_fit(trained):
    workdir, _ = trained
    dry_run(tiny(duration="4 steps"), workdir)
    with pytest.raises(ConfigError, match="config.optim.lr"):
        dry_run(tiny(duration="4 steps", optim__lr=0.5), workdir)
    with pytest.raises(ConfigError, match="config.init_from: the checkpoint does not fit"):
        dry_run(tiny(init_from=str(workdir), model__width=64), None)


def test_a_run_that_was_begun_goes_on_with_settings_that_a_new_one_may_not_have(trained):
    workdir, first = trained
    again = vit_jax.train(tiny(duration="4 steps", hosts__step_minutes=0.0), workdir)
    assert again["step"] == first["step"]


def test_a_pod_is_not_expected_where_the_data_is_not_either():
    config = tiny(
        data__name="imagenet2012", data__path="/nowhere", mesh__fsdp=3, model__num_classes=1000
    )
    _, recipe = dry_run(config, None)
    assert "fsdp 3" in recipe and "vit_jax plan" in recipe


def test_the_estimate_counts_state_and_operations():
    assembly = assemble(resolve(tiny()), num_classes=10, examples_per_epoch=1438)
    found = rough.estimate(assembly, on_cpu=True)
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    assert found["state_bytes"] == sum(x.dtype.itemsize * x.size for x in jax.tree.leaves(state))
    assert found["batch_bytes"] == 32 * (32 * 32 * 3 + 4)
    assert found["flops"] == 12 * assembly.step_flops
    assert found["seconds"]["cpu"] > found["seconds"]["TPU v5e"] > 0
    assert "estimate" in rough.text(found) and "this CPU" in rough.text(found)


@dataclasses.dataclass(frozen=True)
class _Judge:
    """An evaluator whose metrics are not known before."""

    def metrics(self):
        return None


def test_metrics_of_a_guest_that_does_not_name_them_are_not_checked():
    assert evaluation.Suite((("", _Judge()),)).metrics() is None
