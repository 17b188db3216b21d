"""What an objective owns continues when a run starts from a checkpoint of the same objective."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.models.conftest import parameters
from tests.repeats import slow_unless
from vit_jax import objectives
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import descriptions, saving
from vit_jax.interchange import formats, saved_objectives
from vit_jax.interchange.conversions import translation
from vit_jax.interchange.conversions.contract import Beside, ObjectiveConversion
from vit_jax.interchange.conversions.rules import Rule, transposed
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import Objective, SavedObjective
from vit_jax.objectives.networks import OWN
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.initial_weights import check_fits, start_from

SMALL = {
    "model.name": "ViT-mu/8", "model.width": 24, "model.depth": 1, "model.heads": 2, "model.mlp_dim": 48,
}  # fmt: skip
# Recipe, what is smaller, classes of the data.
CASES = {
    "dino": ("configs/dino.py:smoke", {
        "objective.prototypes": 16, "objective.head_hidden": 8, "objective.bottleneck": 4, "batch_size": 8,
    }, 0),
    "segmentation": ("configs/segmentation.py:smoke", {
        "model.depth": 2, "objective.queries": 4, "objective.blocks": 1, "objective.segments": 4,
        "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3, "data.interpolation": "bilinear",
    }, 3),
    "guest": ("configs/digits.py", {
        "objective.name": "guest", "augment.mixup": 0.0, "model.pool": "token",
    }, 0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GuestOptions:
    """None."""


class Guest(Objective):
    """A layer of its own, and a centre that no gradient reaches."""

    Options = GuestOptions
    needs_labels = False

    def make_modules(self, rngs):
        head = nnx.Linear(self.context.model.width, 8, rngs=rngs)
        head.centre = nnx.BatchStat(jnp.zeros(8))
        head.scales = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(11)])  # "10" sorts before "2"
        return head


@pytest.fixture(autouse=True)
def guest():
    objectives.register("guest", Guest)
    yield
    del objectives.OBJECTIVES["guest"]


def config_of(case, **changes):
    recipe, fields, _ = CASES[case]
    config = load_config(recipe)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(SMALL | {"init_from": ""} | fields | changes)
    return config


def assembled(case, **changes):
    config = resolve(config_of(case, **changes))
    return assemble(config, num_classes=CASES[case][2], examples_per_epoch=64)


def saved(case, workdir, classes=None):
    """A run's checkpoint, as if it had been trained: its workdir, and the arrays in it."""
    assembly, random = assembled(case), np.random.default_rng(0)

    def drawn(x):
        return jnp.asarray(3 * random.random(x.shape), x.dtype)

    parts = jax.tree.map(drawn, jax.eval_shape(assembly.init, jax.random.key(0)).parts())
    classes = classes or tuple(map(str, range(CASES[case][2])))
    description = descriptions.describe(assembly.config, assembly.model_config, classes, 64)
    if assembly.evaluated == "teacher":
        description["evaluated"] = "teacher"
    checkpoints = saving.Checkpoints(workdir, assembly.config.checkpoint)
    checkpoints.save_now(1, parts, description | {"seconds": 0.0})
    checkpoints.close()
    return workdir, jax.device_get(parts)


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return saved("dino", tmp_path_factory.mktemp("dino") / "run")


def started(case, workdir, **changes):
    assembly = assembled(case, init_from=str(workdir), **changes)
    check_fits(assembly)
    new = jax.jit(assembly.init)(jax.random.key(1))
    return assembly, new, start_from(assembly, new)


@pytest.mark.parametrize("case", slow_unless(["dino", "guest"], CASES))
def test_what_an_objective_owns_continues_bit_by_bit(case, tmp_path):
    workdir, parts = saved(case, tmp_path / "run")
    assembly, _, state = started(case, workdir)
    own, variables = parts[f"{assembly.evaluated}_{OWN}"], parts.get(f"{OWN}_variables", {})
    assert own
    for tree in (state.params, state.ema, state.teacher):
        if tree is not None:
            jax.tree.map(np.testing.assert_array_equal, tree[OWN], own)
    if variables:
        jax.tree.map(np.testing.assert_array_equal, state.variables[OWN], variables)
        if state.teacher is not None:
            theirs = state.variables["teacher"][OWN]
            jax.tree.map(np.testing.assert_array_equal, theirs, variables)
    assert bool(variables) == (case != "segmentation")


def test_what_has_another_size_is_re_initialised_with_its_layer_and_the_log_says_why(dino, caplog):
    workdir, parts = dino
    with caplog.at_level(logging.INFO):
        _, new, state = started("dino", workdir, objective__prototypes=32)
    own, before = parts[f"teacher_{OWN}"], patterns.named(new.params[OWN])
    after, old = patterns.named(state.params[OWN]), patterns.named(own)
    other = {name for name in after if after[name].shape != old[name].shape}
    assert other and other != {*after}
    for name, array in after.items():
        np.testing.assert_array_equal(array, (before if name in other else old)[name])
    (line,) = [m for m in caplog.messages if "objective dino owns" in m]
    assert "continue as they are in the checkpoint" in line
    assert "centre re-initialised ((16,) in the checkpoint, (32,) here)" in line


def test_another_objective_takes_nothing_and_says_so(dino, caplog):
    with caplog.at_level(logging.INFO):
        _, new, state = started("guest", dino[0], init_reset=())
    jax.tree.map(np.testing.assert_array_equal, state.params[OWN], new.params[OWN])
    assert "re-initialised (the checkpoint's objective is Dino)" in caplog.text


def test_init_reset_names_what_an_objective_owns(dino, caplog):
    workdir, parts = dino
    with caplog.at_level(logging.INFO):
        _, new, state = started("dino", workdir, init_reset=("objective/.*centre",))
    jax.tree.map(
        np.testing.assert_array_equal, state.variables[OWN]["centre"], new.variables[OWN]["centre"]
    )
    jax.tree.map(np.testing.assert_array_equal, state.params[OWN], parts[f"teacher_{OWN}"])
    assert "centre re-initialised (config.init_reset)" in caplog.text
    with pytest.raises(ConfigError, match="init_reset.*objective/nothing"):
        started("dino", workdir, init_reset=("objective/nothing",))


def test_a_pattern_that_selects_nothing_is_refused_before_there_is_a_workdir(dino, tmp_path):
    config = config_of("dino", init_from=str(dino[0]), init_reset=("nothing/.*",))
    with pytest.raises(ConfigError, match="config.init_reset: the pattern 'nothing/.*' matches no"):
        vit_jax.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_arrays_of_one_layer_are_taken_or_re_initialised_together():
    objective = assembled("guest").networks.objective
    like = Weights({"head": {"kernel": np.zeros((4, 3)), "bias": np.zeros(3)}}, {})
    old = Weights({"head": {"kernel": np.ones((5, 3)), "bias": np.ones(3)}}, {})
    held = SavedObjective(Guest, {}, lambda: old)
    taken, reset = objective.continue_from(held, like)
    assert not taken
    assert reset["head/bias"] == "with head/kernel"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("own", "make_modules"),
        ("own_modules", "make_modules"),
        ("own_judged", "evaluates_with_modules"),
        ("anchor", "gram_teacher"),
    ],
)
def test_an_objective_with_a_member_s_old_name_is_refused_with_the_new_one(old, new):
    with pytest.raises(TypeError, match=f"Old defines {old}, .* it is {new} now"):
        type("Old", (Objective,), {old: lambda self, rngs: None})


class Projected(ObjectiveConversion):
    """The guest's layer as other code has it, in a file with timm's names of the model."""

    rules = (
        Rule("kernel", "projector.weight", transposed(1, 0)),
        Rule("bias", "projector.bias"),
    )

    def find(self, config, tensors, layout, hints):
        if "projector.weight" not in tensors:
            return None
        like = {"kernel": np.zeros((config.width, 8), np.float32), "bias": np.zeros(8, np.float32)}
        params = translation.to_ours(list(self.rules), dict(tensors), like, source="a file")
        return SavedObjective(Converted, {}, lambda: Weights(params, {}))

    def beside(self, config, saved):
        return Beside(self.rules, saved.read().params, model_format="timm")


class Converted(Guest):
    """Other code has this objective too."""

    @classmethod
    def conversions(cls):
        return {"authors": Projected()}


def test_a_guest_brings_its_weights_home_from_files_of_others(tmp_path):
    config = registry.model_config("ViT-mu/8", image_size=16, num_classes=0, pool="token")
    params, file = parameters(config), tmp_path / "a.safetensors"
    own = {
        "kernel": np.random.rand(config.width, 8).astype(np.float32),
        "bias": np.arange(8.0, dtype=np.float32),
    }
    held = SavedObjective(Converted, {}, lambda: Weights(own, {}))
    checkpoint = formats.LoadedCheckpoint(config, params, objective=held)
    formats.write_checkpoint(checkpoint, file, "authors")
    again = formats.read_checkpoint(file, hints=vars(config))
    found = saved_objectives.find_saved(again, Converted)
    jax.tree.map(np.testing.assert_array_equal, found.read().params, own)
    assert saved_objectives.find_saved(again, Guest) is None


def test_what_reads_classes_is_re_initialised_for_data_with_other_classes_of_the_same_number(
    tmp_path, caplog
):
    workdir, parts = saved("segmentation", tmp_path / "run", classes=("sky", "sea", "road"))
    assembly = assembled("segmentation", init_from=str(workdir))
    new = jax.jit(assembly.init)(jax.random.key(1))
    own = parts[f"{assembly.evaluated}_{OWN}"]
    for classes, kept in ((("sky", "sea", "road"), True), (("road", "sky", "sea"), False)):
        with caplog.at_level(logging.INFO):
            state = start_from(assembly, new, classes)
        heads = (tree["class_head"]["kernel"] for tree in (state.params[OWN], own))
        assert np.array_equal(*heads) == kept
        queries = (tree["queries"] for tree in (state.params[OWN], own))
        np.testing.assert_array_equal(*queries)
    assert "class_head re-initialised (the data has other classes)" in caplog.text
