"""Every experiment: its runs are recipes that build, differ as its page says, and train, one after the
other, to a report.
"""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from tests.repeats import slow_unless
from tests.test_configs import build
from vit_jax.base import patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.reading import read_weights
from vit_jax.data import batches
from vit_jax.data.splits import select
from vit_jax.recipes.user_files import load_config, load_recipe
from vit_jax.studies.compare import compare, images_of
from vit_jax.studies.runs import Run, find_runs
from vit_jax.studies.sweep import run_all
from vit_jax.training.assembly import assemble, resolve

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs" / "experiments"
EXPERIMENTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
# How many runs, with seeds, and what is varied, of the smoke test; how many at the paper's size, and on CIFAR-10.
SMOKE = {
    "compute": (16, {"model.name"}),
    "data_size": (12, {"model.name", "data.train_split"}),
    "exits": (6, {"model.name"}),
    "few_images": (17, {"init_reset", "optim.freeze", "duration"}),
    "filters": (4, {"model.name"}),
    "gram": (3, {"objective.gram_weight"}),
    "optimizers": (12, {"optim.name", "optim.lr"}),
    "overfitting": (12, {"model.name", "data.train_split"}),
    "permutations": (12, {"model.name", "data.permute"}),
    "pooling": (12, {"model.pool", "optim.lr"}),
    "positions": (22, {"model.position", "model.position_at"}),
    "resolution": (7, {"data.image_size"}),
    "reuse": (12, {"model.feature_reuse", "model.relation_reuse"}),
    "self_supervised": (12, {"objective.target", "objective.corrupted"}),
    "shape": (22, {"model.depth", "model.width", "model.mlp_dim", "model.patch"}),
    "steps_to_accuracy": (30, {"optim.name", "optim.ema"}),
}
PAPER = {
    "compute": 13, "data_size": 16, "exits": 1, "few_images": 36, "filters": 2, "gram": 2, "optimizers": 4,
    "overfitting": 16, "permutations": 6, "pooling": 4, "positions": 11, "resolution": 5, "reuse": 4,
    "self_supervised": 6, "shape": 11, "steps_to_accuracy": 30,
}  # fmt: skip
CIFAR10 = {
    "compute": 24, "data_size": 18, "exits": 8, "few_images": 25, "filters": 6, "optimizers": 18, "overfitting": 18,
    "permutations": 18, "pooling": 21, "positions": 15, "resolution": 10, "self_supervised": 18, "shape": 33,
    "steps_to_accuracy": 30,
}  # fmt: skip
FIRST = "pretrained"  # ends the name of a run that others of an experiment start from

# What makes a run of seconds of any of them, and which run of an experiment shows what is its own.
SMALL = {
    "width": 16,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 16,
    "token_mlp_dim": 8,
    "units": (1,),
    "width_factor": 0.5,
    "grids": (1, 2),
}
CELL = {"overfitting": 1, "permutations": 4, "positions": -1, "self_supervised": 4}


def runs_of(name, argument):
    return load_recipe(f"{EXPERIMENTS[name]}:{argument}")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_varies_what_its_page_says(name):
    found = runs_of(name, "smoke")
    count, varied = SMOKE[name]
    assert len(found) == count and len(runs_of(name, "paper")) == PAPER[name]
    as_saved = {name: json.loads(json.dumps(c.to_dict())) for name, c in found.items()}
    runs = [
        Run(n, schema.flat(config), {}, "done", "", float("nan"), 0, {}, [])
        for n, config in as_saved.items()
    ]
    comparison = compare(runs)
    assert varied <= set(comparison.varied) | {n for o in comparison.together.values() for n in o}
    seeds = {config.seed for config in found.values()}
    groups = [group for group in comparison.groups if not group.runs[0].name.endswith(FIRST)]
    assert all(len(group.runs) == len(seeds) for group in groups)


@pytest.mark.parametrize("name", CIFAR10)
def test_an_experiment_on_cifar10_has_three_seeds_and_a_fifth_of_the_test_images(name):
    found = runs_of(name, "cifar10")
    assert len(found) == CIFAR10[name]
    assert len({config.seed for config in found.values()}) == (
        5 if name == "steps_to_accuracy" else 3
    )
    for config in found.values():
        assert config.data.name == "cifar10" and images_of(config.data.eval_split) == 2000


@pytest.mark.parametrize("name", ["data_size", "overfitting"])
def test_subsets_of_cifar10_are_nested_and_have_as_many_images_of_each_class(name):
    splits = {config.data.train_split for config in runs_of(name, "cifar10").values()}
    chosen = []
    for split in sorted(splits, key=images_of):
        parts = select(split, {"train": 50_000}, "CIFAR-10")
        rows = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
        assert set(np.bincount(rows // 5_000).tolist()) == {len(rows) // 10}
        chosen.append(set(rows.tolist()))
    assert [len(rows) for rows in chosen] == [500, 5_000, 50_000]
    assert chosen[0] < chosen[1] < chosen[2]


def test_few_images_are_of_classes_that_were_not_seen_before():
    first, *others = runs_of("few_images", "cifar10").values()
    sizes = {"train": 50_000, "test": 10_000}
    classes = [
        {start // (sizes[name] // 10) for name, start, _ in select(split, sizes, "CIFAR-10")}
        for config in (first, others[0])
        for split in (config.data.train_split, config.data.eval_split)
    ]
    assert classes == [set(range(5))] * 2 + [set(range(5, 10))] * 2


def test_smoke_tests_have_few_tokens_at_fixed_positions_but_for_three():
    models = [c.model for name in EXPERIMENTS for c in runs_of(name, "smoke").values()]
    vits = [model for model in models if model.name.startswith("ViT-")]
    assert {model.name for model in vits} == {"ViT-S/8"}
    names = EXPERIMENTS.keys() - {"positions", "resolution", "self_supervised"}
    others = [c.model for name in names for c in runs_of(name, "smoke").values()]
    assert {m.position for m in others if m.name.startswith("ViT-")} == {"sincos2d"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_headed_by_its_commands(name):
    head = EXPERIMENTS[name].read_text().split('"""')[1]
    commands = re.findall(
        rf"vit_jax train --config=configs/experiments/{name}\.py(?::(\S+))?", head
    )
    assert "smoke" in commands and "" in commands
    for argument in filter(None, commands):
        assert runs_of(name, argument)


def one_small_run(name):
    """A run of an experiment's smoke test, by its name, in a size that takes seconds."""
    run, config = list(runs_of(name, "smoke").items())[CELL.get(name, 0)]
    return run, small(config)


def small(config):
    """The config in a size that takes seconds; changed, and returned."""
    sizes = {option: value for option, value in SMALL.items() if config.model[option] is not None}
    config.model.update(sizes)
    config.duration, config.optim.warmup = "2 steps", "0 steps"
    config.batch_size, config.data.eval_split, config.data.threads = 8, "test[:8]", 1
    config.compilation_cache, config.log.tensorboard = "", False
    config.audit.every = 0
    return config


def lowered(config):
    """A run's training step, traced and lowered."""
    config = resolve(config)
    assembly = assemble(config, num_classes=10, examples_per_epoch=1438)
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    batch = batches.spec(config, num_classes=10, multi_label=False)
    return jax.jit(assembly.train_step).lower(state, batch)


def test_runs_of_a_smoke_test_that_differ_in_their_seeds_alone_share_a_compiled_program():
    texts = []
    for seed in (0, 1):
        config = one_small_run("pooling")[1]
        config.seed = seed
        texts.append(lowered(config).as_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_step_of_an_experiment_can_be_traced(name):
    """All that a training step needs but compiling it, which is the same for all of them."""
    lowered(one_small_run(name)[1])


# The step of each experiment is traced above.
@pytest.mark.parametrize("name", slow_unless(["overfitting"], ["overfitting", "self_supervised"]))
def test_a_run_of_an_experiment_trains_a_few_steps_and_is_found_by_reports(name, tmp_path):
    run, config = one_small_run(name)
    (result,) = run_all({run: config}, tmp_path).values()
    assert result["step"] == 2
    (group,) = compare(find_runs([tmp_path])).groups
    assert group.summary()["states"] == {"done": 1} and len(group.values()) == 1


# What is reset by layers of a stack is asserted by `interchange/test_load.py`.
@pytest.mark.slow
def test_last_layers_are_re_initialised_and_all_else_is_that_of_the_first_run(tmp_path):
    found = runs_of("few_images", "smoke")
    runs = {name: small(found[name]) for name in (FIRST, "reset=1,steps=60/seed=0")}
    for config in runs.values():
        config.model.depth, config.checkpoint.every = 3, "0 steps"
    runs["reset=1,steps=60/seed=0"].optim.lr = 0.0
    run_all(runs, tmp_path)
    first, after = (patterns.named(read_weights(tmp_path / name).params) for name in runs)
    kernels = [tree["encoder/layers/mlp/up/kernel"] for tree in (first, after)]
    assert [np.array_equal(*layers) for layers in zip(*kernels, strict=True)] == [True, True, False]
    for name in ("embedding/kernel", "encoder/norm/scale"):
        np.testing.assert_array_equal(first[name], after[name])
    assert first["head/kernel"].any() and not after["head/kernel"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [(n, size) for n in EXPERIMENTS for size in ("smoke", "paper")]
    + [(n, "cifar10") for n in CIFAR10],
)
def test_every_run_of_an_experiment_builds(name, size):
    for config in runs_of(name, size).values():
        config.init_from = ""  # which is not here
        config.model.name = config.model.name or "ViT-B/16"
        config.data.mean, config.data.std = config.data.mean or (0.5,), config.data.std or (0.5,)
        config.data.interpolation = config.data.interpolation or "bilinear"
        build(config)


def test_an_unknown_size_is_refused_and_an_experiment_is_no_recipe_of_one_run():
    with pytest.raises(ConfigError, match="there is no size 'small'"):
        runs_of("pooling", "small")
    with pytest.raises(ConfigError, match="is an experiment of several runs"):
        load_config(f"{EXPERIMENTS['pooling']}:smoke")
    assert list(load_recipe(str(FOLDER.parent / "digits.py"))) == [""]


@pytest.mark.slow
def test_the_command_trains_all_runs_ends_with_a_report_and_repeats_none(tmp_path, command, caplog):
    caplog.set_level("INFO")
    recipe = tmp_path / "two.py"
    recipe.write_text(
        "from vit_jax import recipes\n\n"
        "def get_runs():\n"
        f"    config = recipes.beside({str(FOLDER)!r} + '/x', '../digits.py')\n"
        "    config.model.update(width=16, depth=1, mlp_dim=16, heads=2)\n"
        "    config.duration, config.optim.warmup = '2 steps', '0 steps'\n"
        "    config.compilation_cache, config.log.tensorboard = '', False\n"
        "    return recipes.vary(config, [{'optim.lr': 1e-3}, {'optim.lr': 1e30}], seeds=1)\n"
    )
    said = [
        "train",
        f"--config={recipe}",
        f"--workdir={tmp_path / 'E'}",
        "--config.data.threads=1",
        "--config.duration=3 steps",
    ]
    code, out, err = command(*said)
    assert code == 0 and "lr=0.001" in out and (tmp_path / "E" / "report" / "report.html").exists()
    result = json.loads((tmp_path / "E" / "report" / "report.json").read_text())
    assert result["varied"] == ["optim.lr"]
    assert [one["states"] for one in result["settings"]] == [{"done": 1}, {"diverged": 1}]
    code, _, _ = command(*said)
    repeated = [r.message for r in caplog.records if "has ended, it is not repeated" in r.message]
    assert code == 0 and len(repeated) == 1
