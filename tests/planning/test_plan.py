"""Plans: held against the step that really runs, and what they say where they cannot be made."""

import json

import jax
import numpy as np
import pytest

from tests.repeats import slow_unless
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.devices import chips, meshes
from vit_jax.models import registry
from vit_jax.planning import compiling, fit, plan, report, target
from vit_jax.planning.collectives import Collective
from vit_jax.planning.estimate import step_seconds
from vit_jax.training import state as states
from vit_jax.training.step_programs import compile_train_step

GIB = 2**30


def small_config(**changes):
    config = default_config()
    config.data.name, config.data.image_size = "digits", 32
    config.model.name, config.model.depth = "ViT-mu/8", 2
    config.model.width, config.model.mlp_dim, config.model.heads = 64, 128, 4
    config.batch_size, config.duration = 64, "10 steps"
    config.mesh.fsdp, config.mesh.fsdp_min_size = 2, 1024
    for name, value in changes.items():
        config[name] = value
    return config


@pytest.fixture(scope="module")
def made():
    assembly = plan.make_assembly(small_config())
    return assembly, plan.make_plan(assembly, target.find("cpu:8"))


def test_a_schedule_of_sizes_has_a_row_for_each_and_the_run_is_their_sum(made):
    _, planned = made
    config, alone = small_config(), small_config()
    config.data.size_schedule, alone.data.image_size = ((0, 16), (0.4, 32)), 16
    devices = target.find("cpu:8")
    small, large = plan._by_size(planned, plan.make_assembly(config), devices)
    assert [(row["image_size"], row["first_step"], row["steps"]) for row in (small, large)] == [
        (16, 1, 4),
        (32, 5, 6),
    ]
    assert large["flops_per_device"] == planned["flops_per_device"]
    expected = compiling.prepare(plan.make_assembly(alone), devices).flops / 8
    np.testing.assert_allclose(small["flops_per_device"], expected, rtol=0.01)  # and positions
    for row, seconds in ((small, 1.0), (large, 3.0)):
        row["seconds"] = dict.fromkeys(("floor", "expected", "ceiling"), seconds)
    chip = target.find("v5e:2x2")
    of_run = plan._of_run(planned | {"sizes": [small, large]}, chip, None)
    assert of_run["hours"] == [22 / 3600] * 3 and of_run["images_per_second"] == [640 / 22] * 3
    saved = report.text(planned | {"sizes": [small, large]})
    assert "  16 px" in saved and "less than all at the largest size" in saved


def test_patch_sizes_have_a_row_each_with_the_steps_of_its_share(made):
    _, planned = made
    config = small_config()
    config.data.patch_sizes = (16, (8, 4))
    assembly = plan.make_assembly(config)
    fine, coarse = plan._by_size(planned, assembly, target.find("cpu:8"))
    assert [(row["patch"], row["steps"]) for row in (fine, coarse)] == [(8, 8), (16, 2)]
    assert fine["model_flops_per_step"] == assembly.step_flops > coarse["model_flops_per_step"]
    assert "  patches of 16" in report.text(planned | {"sizes": [fine, coarse]})


def test_lengths_of_native_sizes_have_a_row_each_and_the_plan_is_of_the_longest():
    config = small_config()
    config.data.native_tokens, config.augment.mixup = 16, 0.0
    config.data.native_lengths = (32, (16, 3))  # of a cycle of four steps
    config.data.native_budget, config.data.native_multiple = 1024, 8
    devices = target.find("cpu:8")
    assembly = plan.make_assembly(config)
    planned = plan.make_plan(assembly, devices)
    long, short = planned["sizes"]
    assert [(r["patches"], r["batch_size"]) for r in (long, short)] == [(32, 32), (16, 64)]
    assert long["steps"] + short["steps"] == 10 and short["steps"] in (7, 8)
    assert long["flops_per_device"] == planned["flops_per_device"]
    config.data.native_lengths, config.data.native_budget = (16,), 0
    alone = plan.make_assembly(config)
    assert short["model_flops_per_step"] == alone.step_flops < assembly.step_flops
    expected = compiling.prepare(alone, devices).flops / 8
    np.testing.assert_allclose(short["flops_per_device"], expected, rtol=1e-3)
    assert "  32 patches  " in report.text(planned)


def test_memory_of_a_plan_is_what_xla_reports_of_the_step_that_runs(made):
    assembly, planned = made
    mesh = meshes.make_mesh(vars(assembly.config.mesh))
    random = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        state = states.create(assembly.init, 0, assembly.abstract_state(mesh))
        batch = {
            "image": random.integers(0, 256, (64, 32, 32, 3), np.uint8),
            "label": random.integers(0, 10, 64, np.int32),
        }
        batch = jax.device_put(batch, meshes.batch_sharding(mesh))
        step = compile_train_step(assembly.train_step, states.shardings_of(state), mesh)
        compiled = step.lower(state, batch).compile()
        _, metrics = compiled(state, batch)
    stats = compiled.memory_analysis()
    assert planned["memory"]["peak"] == stats.peak_memory_in_bytes
    assert planned["memory"]["arguments"] == stats.argument_size_in_bytes
    assert planned["memory"]["temporaries"] == stats.temp_size_in_bytes
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    "name", slow_unless(["ViT-B/16", "Mixer-B/16"], ["ViT-B/16", "Mixer-B/16", "R50+ViT-B/16"])
)
def test_operations_of_a_step_are_three_times_those_that_models_lists(name):
    config = small_config()
    config.data.image_size = 224
    config.model = default_config().model
    config.model.name, config.batch_size = name, 16
    config.model.remat = "none"
    step = compiling.prepare(plan.make_assembly(config), target.find("cpu:8"))
    analytic = 3 * registry.model_config(name, num_classes=10).flops() * 16
    assert step.flops == pytest.approx(analytic, rel=0.03)


def test_a_plan_is_plain_data_and_readable(made):
    _, planned = made
    assert planned["fits"] and planned["chips"] == 8 and planned["steps"] == 10
    assert planned["mesh"] == {"data": 4, "fsdp": 2, "tensor": 1}
    assert planned["batch_per_chip"] == 8
    assert {row["kind"] for row in planned["collectives"]} == {"all-gather", "all-reduce"}
    assert json.loads(json.dumps(planned)) == planned
    text = report.text(planned)
    assert "cpu:8: 8 chips" in text and "data 4 x fsdp 2 x tensor 1" in text
    assert "time of a step" not in text  # Nobody knows how fast this machine is.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e:3x3", "v5e has no slice '3x3'; it has: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("v5p:8x4x4", "v5p has no slice '8x4x4'.*4x4x8"),
        ("v5x:4x4", r"unknown kind 'v5x'; did you mean 'v5p'\? Kinds are .*tpu7x, a100.*, cpu;"),
        ("cpu:many", "cpu:N for N simulated"),
        ("cpu:9", "allow 8 simulated devices"),
    ],
)
def test_topologies_that_nobody_sells_are_errors_that_list_those_there_are(name, words):
    with pytest.raises(ConfigError, match=words):
        target.find(name)


def test_shapes_of_slices_are_those_of_the_catalog():
    shapes = {kind: tpu.shapes() for kind, tpu in chips.TPUS.items()}
    assert shapes["v6e"][-1] == "16x16"
    assert {"2x2x1", "4x4x4", "4x4x8", "8x8x16", "16x16x24"} <= set(shapes["v5p"])
    assert "16x16x16" in shapes["v4"] and "16x16x24" not in shapes["v4"]


def test_what_the_data_cannot_tell_is_asked_for():
    config = small_config(duration="2 epochs")
    config.data.name = "my_dataset"
    with pytest.raises(ConfigError, match="--num_classes=N"):
        plan.make_assembly(config)
    with pytest.raises(ConfigError, match="--examples=N"):
        plan.make_assembly(config, num_classes=3)
    assert plan.make_assembly(config, num_classes=3, examples=640).total_steps == 20


def test_time_of_a_step_by_hand():
    v5e = chips.TPUS["v5e"]
    where = target.Target("v5e:4x4", 2, v5e, [None] * 32)
    said = dict(shapes=(), source="")
    seconds = step_seconds(
        where,
        operations=0.15,
        flops=197e12 / 10,
        arguments=819_000_000,
        temporaries=0,
        cycles=300_000_000,
        collectives=[
            Collective("all-gather", 4 * 10**9, 4, 2, False, **said),
            Collective("all-reduce", 3_125_000, 2, 1, True, **said),
        ],
    )
    assert seconds["products"] == pytest.approx(0.1)
    assert seconds["memory"] == pytest.approx(0.002)
    assert seconds["network"] == pytest.approx(2 * 3e9 / 200e9)
    assert seconds["slices"] == pytest.approx(0.001)
    assert seconds["cycles"] == pytest.approx(0.2)
    assert seconds["floor"] == pytest.approx(0.15)
    assert seconds["expected"] == pytest.approx(0.2)
    assert seconds["ceiling"] == pytest.approx(0.2 + 2 * 0.03 + 0.001)


def refused(passes, peak, accumulate=1):
    memory = {"state": 2 * GIB, "peak": peak * GIB, "capacity": 16 * GIB}
    return {"batch_per_pass": passes, "accumulate": accumulate, "memory": memory}


def test_parts_of_a_batch_are_as_many_as_the_excess_asks_for():
    assert fit._next_accumulate([refused(64, 44)]) == 4  # 42 GiB of activations into 14.
    # They shrink by less than the batch does: 10 GiB are there whatever the batch.
    assert fit._next_accumulate([refused(64, 90), refused(32, 50, 2)]) == 16
    assert fit._next_accumulate([refused(64, 90), refused(32, 80, 2)]) is None
    assert fit._next_accumulate([refused(8, 200)]) is None  # Passes would become too small.


def plan_taking(ms, fits=True, parts=1):
    peak = 44 if parts == 1 else 24
    made = refused(64 / parts, peak, accumulate=parts)
    return made | {"fits": fits, "missing_bytes": (peak - 16) * GIB, "seconds": {"expected": ms}}


def test_fit_finds_the_fastest_mesh_and_policy_beyond_a_slower_mesh():
    policy = {"none": 30, "save_products": 20, "save_attention": 22, "full": 25}
    mesh = {1: 0, 2: 1, 4: -4, 8: -6, 16: -1, 32: 0, 64: -15}

    def attempt(choice):
        # With parameters sharded over 8, the policy that was second is first.
        bonus = 5 if (choice.fsdp, choice.remat) == (8, "save_attention") else 0
        return plan_taking(policy[choice.remat] + mesh[choice.fsdp] - bonus)

    tried = fit.search(attempt, list(mesh), accumulate=1)
    assert fit.best_of(tried) == fit.Choice(8, "save_attention", 1)
    # Two slower in a row end the search.
    assert {choice.fsdp for choice in tried} == {1, 2, 4, 8, 16, 32}


def test_fit_accumulates_what_does_not_fit_and_skips_what_the_batch_does_not_allow():
    def attempt(choice):
        if choice.accumulate > 4:
            return None
        if choice.remat == "full":
            return plan_taking(50)
        fits = choice.remat == "save_attention" and choice.accumulate == 4
        return plan_taking(40, fits, choice.accumulate)

    tried = fit.search(attempt, [2], accumulate=1)
    assert fit.best_of(tried) == fit.Choice(2, "save_attention", 4)
    assert fit.search(lambda choice: None, [1, 2], accumulate=3) == {}


def test_fit_says_the_flags_that_differ_and_keeps_the_batch():
    choice = fit.Choice(fsdp=4, remat="full", accumulate=2)
    config = small_config()
    assert choice.options(config) == [
        "--config.mesh.fsdp=4",
        "--config.model.remat=full",
        "--config.accumulate=2",
    ]
    assert fit._changed(config, choice).batch_size == config.batch_size


def test_running_out_of_memory_is_told_in_numbers(made):
    assembly, _ = made
    step = compiling.prepare(assembly, target.find("cpu:8"))
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries"
        " (137.27G) exceeds available HBM (15.75G)."
    )
    memory = compiling._refused(message, step)
    assert memory.temporaries == round(137.27 * GIB)
    # What the layers keep for the backward pass.
    assert memory.largest[0]["bytes"] > 0 and "float32[2,64," in memory.largest[0]["what"]
    message = (
        "Ran out of memory in memory space hbm. Used 33.45G of 15.75G hbm. Exceeded hbm capacity"
    )
    assert compiling._refused(message, step).peak == round(33.45 * GIB)
