"""What `train` and `train --dry_run` refuse before anything is done."""

import dataclasses
import itertools

import jax
import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax import evaluation
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.planning import rough
from vit_jax.planning.dry_run import dry_run
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.upkeep import announce


def mixture(*sets):
    return {"data.name": "mixture", "data.mixture": sets}


REFUSED = {
    "config.eval.best = 'acc' .*accuracy": {"eval.best": "acc"},
    "config.eval.best = 'knn/acc'": {"eval.best": "knn/acc", "eval.evaluators": ("accuracy", "knn")},
    "config.eval.patience = 3 has no effect": {"eval.patience": 3, "eval.every": "0 steps"},
    "config.eval.target = 0.5 has no effect": {"eval.target": 0.5, "eval.every": "0 steps"},
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
    "config.data.threads = 100000 must be at most": {"data.threads": 100_000},
    r"config.optim.lr = 1e\+30 must be at most": {"optim.lr": 1e30},
    "config.optim.weight_decay = 1000 times the learning rate .* is 3": {
        "optim.weight_decay": 1000.0, "optim.lr": 0.003,
    },
    "config.log.every = '0 steps' must be at least one step": {"log.every": "0 steps"},
    "config.data.mixture: .* an epoch, .* has 1.44e": mixture(("digits", 1e99), ("digits", 1)),
    "config.data.mixture: a mixture cannot be one of its own": mixture(("mixture", 1)),
    "config.data.mixture: '/nowhere' does not exist": mixture(("/nowhere", 1)),
    "config.data.image_size = 1000000 pixels take": {"data.image_size": 1_000_000},
    "batches of config.batch_size = 8,000,000,000,000": {"batch_size": 8 * 10**12},
    "config.eval.batch_size = 8,000,000,000,000": {"eval.batch_size": 8 * 10**12},
    "config.data.prefetch = 1000000000 batches": {"data.prefetch": 10**9},
    "config.duration = '1e300 epochs' is more than": {"duration": "1e300 epochs"},
    "config.eval.every = '1e300 epochs' is more than": {"eval.every": "1e300 epochs"},
    "config.duration = '5%': there is no whole": {"duration": "5%"},
    "config.model.depth = 1000.* has more than 64 bits": {"model.depth": 10**99},
    "config.data.repeats = 64 must be at most config.batch_size = 32": {"data.repeats": 64},
    "config.compilation_cache=gs:/bucket": {"compilation_cache": "gs:/bucket"},
    "config.data.read_ahead = 1e": {"data.read_ahead": 1e30},
    "config.augment.mixup = 1e": {"augment.mixup": 1e30},
    "config.augment.randaugment_layers = 1000000": {"augment.randaugment_layers": 10**6},
    "config.optim.weight_decay_rules: the pattern 1 is not text": {
        "optim.weight_decay_rules": ((1, 2),),
    },
    "config.optim.lr_rules: .* must be a number from 0 on": {"optim.lr_rules": ((".*", -1.0),)},
    "config.eval.evaluators: .* is neither NAME nor": {"eval.evaluators": (("accuracy", 3),)},
    "config.data.train_split = 'nosuch'": {"data.train_split": "nosuch"},
    "config.data.eval_split = 'nosuch'": {"data.eval_split": "nosuch"},
    "config.data.cache=/proc/cache": {"data.cache": "/proc/cache"},
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
    check_both_refuse(config, tmp_path / "run", message)
    assert not (tmp_path / "run").exists()


def check_both_refuse(config, workdir, message):
    """A dry run and a run end with the same sentence."""
    with pytest.raises(UserError, match=message) as planned:
        dry_run(config, workdir)
    with pytest.raises(UserError) as ended:
        vit_jax.train(config, workdir)
    assert str(planned.value) == str(ended.value) and type(planned.value) is type(ended.value)


@pytest.mark.parametrize(
    "workdir", ["/proc/run", "{tmp}/file", "{tmp}/file/run", "{tmp}/" + 300 * "x"]
)
def test_a_dry_run_refuses_a_workdir_that_a_run_cannot_write(workdir, tmp_path):
    (tmp_path / "file").write_text("")
    place = workdir.replace("{tmp}", str(tmp_path))
    check_both_refuse(tiny(), place, f"cannot write to --workdir={place}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("workdir", ["None", "s3://bucket/run"])
def test_a_dry_run_refuses_a_workdir_that_is_none(workdir):
    check_both_refuse(tiny(), workdir, f"--workdir={workdir}: ")


@pytest.mark.parametrize("kind", ["heic", "jpg"])
def test_a_dry_run_refuses_images_that_cannot_be_decoded(kind, tmp_path):
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    for label, number in itertools.product("ab", range(6)):
        path = tmp_path / "photos" / label / f"{number}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(heic if kind == "heic" else b"\xff\xd8\xff")
    config = tiny(data__name="folder", data__path=str(tmp_path / "photos"), data__holdout=0.3)
    check_both_refuse(config, tmp_path / "run", f"photos/./..{kind} cannot be read: .*")


def test_a_dry_run_says_what_a_run_warns_of():
    doubtful = tiny(data__eval_split="train[:10%]", batch_size=1600)
    warnings = announce.warnings(resolve(doubtful), 1438)
    assert [text.split(" = ")[0] for text in warnings] == [
        "config.batch_size",
        "config.data.eval_split",
    ]
    assert set(warnings) <= set(dry_run(doubtful, None)[0]["lines"])


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
    adapted = tiny(init_from=str(workdir), lora__lora_rank=100_000)
    check_both_refuse(
        adapted, workdir.parent / "adapted", "config.lora.lora_rank = 100000 must be at most"
    )


@pytest.mark.parametrize(
    ("changes", "field", "array"),
    [
        ({"optim__ema": 0.0}, "", ""),
        ({"optim__lr": 0.5}, "", ""),
        ({"optim__name": "sgd"}, "config.optim.name", "opt_state/"),
        ({"optim__name": "lion"}, "config.optim.name", "opt_state/"),
        ({"optim__moment_dtype": "bfloat16"}, "config.optim.moment_dtype", "opt_state/"),
        ({"optim__freeze": ("position",)}, "config.optim.freeze", "opt_state/"),
        ({"model__mlp_dim": 24}, "config.model.mlp_dim", "params/encoder/"),
        ({"model__qkv_bias": False}, "config.model.qkv_bias", "params/encoder/"),
        ({"objective__name": "masked_patches"}, "config.objective.name", "params/"),
        ({"lora__lora_rank": 2, "init_from": "WORKDIR"}, "config.lora.lora_rank", "params/adapters/"),
    ],
    ids=str,
)  # fmt: skip
def test_a_change_for_which_a_checkpoint_lacks_something_is_refused_by_its_field(
    trained, caplog, changes, field, array
):
    workdir, _ = trained
    changes = {name: str(workdir) if x == "WORKDIR" else x for name, x in changes.items()}
    config = tiny(duration="4 steps", checkpoint__on_config_change="allow", **changes)
    if not field:
        dry_run(config, workdir)
        assert "continuing" in caplog.text
        return
    with pytest.raises(ConfigError, match=f"cannot continue with .*{field}: ") as refused:
        dry_run(config, workdir)
    assert array in str(refused.value)
    assert "damaged" not in str(refused.value)
    assert "continuing" not in caplog.text


def test_an_average_that_a_checkpoint_lacks_and_a_shorter_run_are_refused(tmp_path, caplog):
    short = {"duration": "2 steps", "optim__ema": 0.0}
    vit_jax.train(tiny(**short), tmp_path)
    allowed = short | {"checkpoint__on_config_change": "allow"}
    averaged = tiny(**allowed | {"optim__ema": 0.9})
    check_both_refuse(averaged, tmp_path, "cannot continue with config.optim.ema: 0.0 -> 0.9: ")
    shorter = tiny(**allowed | {"duration": "1 steps"})
    check_both_refuse(shorter, tmp_path, "config.duration = '1 steps' ends at step 1")
    assert "continuing" not in caplog.text


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
