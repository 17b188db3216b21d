"""The train step on eight simulated devices: every mesh computes the same, holds only its share,
and compiles once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base import patterns
from vit_jax.config import default_config
from vit_jax.devices import meshes
from vit_jax.training import state as states
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.inputs import seed_key
from vit_jax.training.step_programs import compile_train_step
from vit_jax.training.zero import placement

MESHES = {
    "data": dict(data=8, fsdp=1, tensor=1),
    "fsdp": dict(data=1, fsdp=8, tensor=1),
    "tensor": dict(data=4, fsdp=1, tensor=2),
    "mixed": dict(data=2, fsdp=2, tensor=2),
}
ONE = dict(data=1, fsdp=1, tensor=1)
# And with state that is sharded within two groups of devices alone, as within slices.
COPIES = {name: 1 for name in MESHES} | {"two copies": 2, "eight copies": 8}


def make_config(**overrides):
    config = default_config()
    config.model.update(
        {
            "name": "ViT-mu/8",
            "width": 64,
            "depth": 2,
            "heads": 4,
            "mlp_dim": 128,
            "head_init": "normal",
        }
    )
    config.update_from_flattened_dict({
        "data.image_size": 16, "batch_size": 16, "duration": "100 steps", "augment.mixup": 0.2,
        "optim.weight_decay": 0.1,
        "mesh.fsdp_min_size": 256, "optim.ema": 0.9,
        # The bias of the keys has no gradient but rounding (softmax does not see it): a small
        # epsilon would let Adam blow it up.
        "optim.eps": 1e-4,
    })  # fmt: skip
    config.update_from_flattened_dict(overrides)
    return config


def make_batches(count, size=16):
    random = np.random.default_rng(0)
    for _ in range(count):
        image = random.integers(0, 256, (16, size, size, 3), np.uint8)
        yield {"image": image, "label": random.integers(0, 10, 16).astype(np.int32)}


def run(config, sizes, steps=10, copies=1):
    """(first state, state after `steps`, all metrics, compiled step) on a mesh of these sizes."""
    count = int(np.prod(list(sizes.values())))
    mesh = meshes.make_mesh(sizes, jax.devices()[:count], copies=copies)
    assembly = assemble(resolve(config), num_classes=10, examples_per_epoch=160)
    with jax.set_mesh(mesh):
        like = assembly.abstract_state(mesh)
        step = compile_train_step(assembly.train_step, states.shardings_of(like), mesh)
        state = states.create(assembly.init, config.seed, like)
        first = jax.device_get(state.params)
        metrics = []
        for batch in make_batches(steps):
            batch = jax.device_put(batch, meshes.batch_sharding(mesh))
            with jax.transfer_guard("disallow"):
                state, measured = step(state, batch)
            metrics.append(measured)
    return first, state, jax.device_get(metrics), step


@pytest.fixture(scope="module")
def on_one_device():
    return run(make_config(), ONE)


@pytest.fixture(scope="module")
def on_eight_devices():
    """A mesh of all axes, gradients of four parts of the batch; it would skip bad steps, of which it has none."""
    return run(make_config(accumulate=4, nonfinite="skip"), MESHES["mixed"])


def assert_close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def test_all_seeds_have_one_program(on_one_device):
    _, state, _, _ = on_one_device
    mesh = meshes.make_mesh(ONE, jax.devices()[:1])
    (batch,) = make_batches(1)
    programs = set()
    for seed in (0, 1):
        assembly = assemble(resolve(make_config(seed=seed)), num_classes=10, examples_per_epoch=160)
        shardings = states.shardings_of(assembly.abstract_state(mesh))
        step = compile_train_step(assembly.train_step, shardings, mesh, seeded=True)
        with jax.set_mesh(mesh):
            lowered = step.lower(state, batch, seed_key(assembly.config))
        programs.add(lowered.as_text())
    assert len(programs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_every_mesh_trains_the_same_parameters_as_one_device(on_one_device, name):
    """That of all axes, with accumulated gradients, is quick: below."""
    sizes = MESHES.get(name, MESHES["data"])
    first, state, metrics, step = run(make_config(), sizes, copies=COPIES[name])
    expected_first, expected, expected_metrics, _ = on_one_device
    assert_close(first, expected_first, 0)
    assert_close(jax.device_get(state.params), jax.device_get(expected.params), 1e-5)
    assert_close(jax.device_get(state.ema), jax.device_get(expected.ema), 1e-5)
    np.testing.assert_allclose(
        [m["loss"] for m in metrics], [m["loss"] for m in expected_metrics], rtol=1e-5
    )
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    "name, share, of_state", [("data", 1, 8), ("fsdp", 8, 8), ("tensor", 2, 8), ("mixed", 4, 8)]
)
def test_parameters_and_optimizer_state_are_sharded(name, share, of_state):
    config = make_config()
    mesh = meshes.make_mesh(MESHES[name], jax.devices()[:8])
    state = assemble(resolve(config), num_classes=10, examples_per_epoch=160).abstract_state(mesh)

    def bytes_on_a_device(tree):
        return sum(
            np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )

    def bytes_in_all(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    def large(tree):
        layers = tree["encoder"]["layers"]
        return [x for x in jax.tree.leaves(layers) if x.ndim > 2 and x.size > 1024]

    assert bytes_on_a_device(large(state.params)) * share == bytes_in_all(large(state.params))
    assert bytes_on_a_device(large(state.ema)) * of_state == bytes_in_all(large(state.ema))
    # Adam's two moments lie as the average does; what is not sharded is small.
    per_copy = bytes_on_a_device(state.ema)
    assert bytes_on_a_device(state.opt_state) == pytest.approx(2 * per_copy, rel=0.01)
    assert per_copy < 2 * bytes_in_all(state.params) / of_state
    assert bytes_on_a_device(state.params) < 1.6 * bytes_in_all(state.params) / share


OPTIMIZERS = {
    # The bias of the keys has no gradient but rounding, which Adafactor divides by its own size.
    "adafactor": {
        "optim.name": "adafactor",
        "optim.moment_dtype": "bfloat16",
        "optim.freeze": (".*qkv/bias",),
    },
    "bfloat16 moments": {"optim.moment_dtype": "bfloat16"},
    "sgd, clipped": {"optim.name": "sgd", "optim.clip": 0.1, "optim.lr": 0.1},
    "rmsprop": {"optim.name": "rmsprop"},
    "schedule_free": {
        "optim.name": "schedule_free",
        "optim.schedule": "constant",
        "optim.ema": 0.0,
        "optim.freeze": (".*qkv/bias",),
    },
    "frozen": {"optim.freeze": ("embedding/.*", ".*attention/qkv/.*")},
    "frozen layer": {"optim.freeze": ("encoder/layers[:1]/.*",)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_of_every_optimizer_is_sharded_and_the_same(name):
    config = make_config(**OPTIMIZERS[name])
    _, expected, expected_metrics, _ = run(config, ONE, steps=4)
    first, state, metrics, _ = run(config, MESHES["data"], steps=4)
    assert_close(jax.device_get(state.params), jax.device_get(expected.params), 1e-5)
    assert_close(jax.device_get(state.ema), jax.device_get(expected.ema), 1e-5)
    for norm in ("gradient_norm", "update_norm", "parameter_norm"):
        np.testing.assert_allclose(
            [m[norm] for m in metrics], [m[norm] for m in expected_metrics], rtol=1e-4
        )
    if name == "frozen":
        assert_close(first["embedding"], jax.device_get(state.params["embedding"]), 0)


# Optimizers of matrices, with what else they have to do with: some matrices of a stack are frozen, the
# gradient is that of four parts of the batch.
OF_MATRICES = {
    "muon": {"optim.layer_decay": 0.8, "optim.freeze": (".*attention/qkv/.*",), "optim.clip": 0.5},
    "adamuon": {"optim.polynomial": "jordan", "optim.matrix_scale": "original"},
    "normuon": {"optim.per_head": True},
    # Most eigenvalues of the statistics of so few images are rounding.
    "shampoo": {"optim.matrix_every": 4, "optim.matrix_block": 64, "optim.matrix_eps": 1e-3},
    "soap": {"optim.basis_every": 4, "optim.matrix_block": 64, "optim.matrix_eps": 1e-3},
}


@pytest.mark.parametrize("sizes", [MESHES["mixed"]], ids=["mixed"])
@pytest.mark.parametrize("name", ["muon"])
def test_ten_steps_with_matrices_are_the_same_on_every_mesh(name, sizes, copies=1):
    fields = OF_MATRICES[name] | {"optim.name": name, "optim.matrix_dtype": "float32"}
    _, expected, expected_metrics, _ = run(make_config(**fields), ONE)
    first, state, metrics, step = run(make_config(**fields, accumulate=4), sizes, copies=copies)
    assert_close(jax.device_get(state.params), jax.device_get(expected.params), 1e-5)
    assert_close(jax.device_get(state.ema), jax.device_get(expected.ema), 1e-5)
    np.testing.assert_allclose(
        [m["loss"] for m in metrics], [m["loss"] for m in expected_metrics], rtol=1e-5
    )
    moved = abs(first["encoder"]["layers"]["mlp"]["up"]["kernel"] - jax.device_get(
        state.params["encoder"]["layers"]["mlp"]["up"]["kernel"]
    )).mean()  # fmt: skip
    assert moved > 1e-4 and step._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", COPIES)
@pytest.mark.parametrize("name", OF_MATRICES)
def test_ten_steps_of_every_optimizer_of_matrices_are_the_same_on_every_mesh(name, mesh):
    """Among them one of several replicas, of which some have no matrix of a stack."""
    test_ten_steps_with_matrices_are_the_same_on_every_mesh(
        name, MESHES.get(mesh, MESHES["data"]), COPIES[mesh]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("shampoo", "matrix_every"), ("soap", "basis_every")])
def test_a_step_whose_roots_are_not_finite_is_bad_and_names_the_matrices(name, every):
    config = make_config(**{"optim.name": name, f"optim.{every}": 1, "nonfinite": "skip"})
    _, state, _, step = run(config, ONE, steps=1)
    (batch,), params = make_batches(1), jax.device_get(state.params)
    opt_state = jax.tree_util.tree_map_with_path(
        lambda path, x: x * jnp.nan if "stack_64x64" in jax.tree_util.keystr(path) else x,
        state.opt_state,
    )
    with jax.set_mesh(state.step.sharding.mesh):
        bad, metrics = step(state.replace(opt_state=opt_state), batch)
    names = np.array(patterns.names(params))[np.asarray(bad.health.bad_tensors)]
    assert set(names) == {f"encoder/layers/attention/{part}/kernel" for part in ("qkv", "out")}
    assert np.isfinite(metrics["loss"]) and int(bad.health.skipped) == 1
    assert_close(jax.device_get(bad.params), params, 0)


def test_on_one_device_the_step_has_no_constraints_of_its_own():
    config = make_config()
    assembly = assemble(resolve(config), num_classes=10, examples_per_epoch=160)
    place = placement(assembly.networks, assembly.config)
    tree = {"kernel": jnp.ones((64, 64))}
    for sizes, expected in ((ONE, False), (MESHES["fsdp"], False), (MESHES["data"], True)):
        devices = jax.devices()[: int(np.prod([*sizes.values()]))]
        with jax.set_mesh(meshes.make_mesh(sizes, devices)):
            text = str(jax.make_jaxpr(place.updated)(tree))
            assert ("sharding_constraint" in text) == expected


def test_frozen_layers_of_a_stack_stay_and_have_no_gradient(on_one_device):
    config = make_config(**{"optim.freeze": ("encoder/layers[:1]/.*",)})
    first, state, (measured,), _ = run(config, ONE, steps=1)
    after = jax.device_get(state.params)
    for x, y in zip(
        *(jax.tree.leaves(t["encoder"]["layers"]) for t in (first, after)), strict=True
    ):
        np.testing.assert_array_equal(x[0], y[0])
    kernels = (tree["encoder"]["layers"]["mlp"]["up"]["kernel"] for tree in (first, after))
    assert np.any(np.subtract(*kernels)[1])
    of_all = on_one_device[2][0]
    assert measured["loss"] == of_all["loss"]
    assert measured["gradient_norm"] < 0.999 * of_all["gradient_norm"]


def test_accumulated_gradients_are_those_of_the_whole_batch(on_one_device, on_eight_devices):
    """And a mesh of all axes trains what one device does."""
    first, state, metrics, step = on_eight_devices
    expected_first, expected, expected_metrics, _ = on_one_device
    assert_close(first, expected_first, 0)
    assert_close(jax.device_get(state.params), jax.device_get(expected.params), 1e-5)
    assert_close(jax.device_get(state.ema), jax.device_get(expected.ema), 1e-5)
    np.testing.assert_allclose(
        [m["loss"] for m in metrics], [m["loss"] for m in expected_metrics], rtol=1e-5
    )
    assert step._cache_size() == 1


SHARP = {"optim.sam_rho": (0.05, 0.05), "optim.sam_alpha": 0.5}


@pytest.fixture(scope="module")
def sharp_while_warming_up():
    return run(make_config(**SHARP, **{"optim.warmup": "10 steps"}), ONE, steps=1)


def test_a_sharpness_aware_step_tells_the_loss_where_the_parameters_are(
    on_one_device, sharp_while_warming_up
):
    _, _, (sharp,), _ = sharp_while_warming_up
    plain = on_one_device[2][0]
    np.testing.assert_allclose(sharp["loss"], plain["loss"], rtol=1e-6)
    assert abs(sharp["gradient_norm"] / plain["gradient_norm"] - 1) > 1e-3


@pytest.mark.slow
def test_a_sharpness_aware_step_is_the_same_on_every_mesh_and_in_parts():
    _, whole, metrics, _ = run(make_config(**SHARP), ONE, steps=2)
    _, parts, of_parts, _ = run(
        make_config(**SHARP, accumulate=2), dict(data=2, fsdp=2, tensor=1), steps=2
    )
    assert_close(jax.device_get(parts.params), jax.device_get(whole.params), 1e-5)
    np.testing.assert_allclose(
        [m["gradient_norm"] for m in of_parts], [m["gradient_norm"] for m in metrics], rtol=1e-4
    )


def test_the_first_update_is_zero_while_the_rate_warms_up(sharp_while_warming_up):
    first, state, metrics, _ = sharp_while_warming_up
    assert_close(first, jax.device_get(state.params), 0)
    assert (
        metrics[0]["learning_rate"] == 0
        and metrics[0]["update_norm"] == 0
        and metrics[0]["gradient_norm"] > 0
    )


def with_nan(params):
    return params | {"position": jnp.asarray(params["position"]).at[0, 0, 0].set(jnp.nan)}


@pytest.mark.parametrize(
    ("policy", "trained"),
    [("stop", "on_one_device"), ("skip", "on_eight_devices")],
    ids=["stop", "skip, mixed"],
)
def test_a_step_that_is_not_finite_changes_nothing_but_its_record(policy, trained, request):
    _, state, _, step = request.getfixturevalue(trained)
    (batch,), good = make_batches(1), jax.device_get(state)
    # A step takes the memory of its argument.
    state = states.copied(state, state)
    params = states.copied(state.params, state.params)
    with jax.set_mesh(state.step.sharding.mesh):
        bad, _ = step(state.replace(params=with_nan(state.params)), batch)
    assert int(bad.step) == 11
    assert int(bad.health.first_bad_step) == 10 and int(bad.health.skipped) == 1
    assert bad.health.bad_tensors.all()
    same_bits(bad.params, with_nan(good.params))
    same_bits((bad.opt_state, bad.ema), (good.opt_state, good.ema))
    # The next step is good again: `skip` goes on, `stop` waits for the host to see what happened.
    with jax.set_mesh(state.step.sharding.mesh):
        after, _ = step(bad.replace(params=params), batch)
    moved = any(
        (a != b).any()
        for a, b in zip(
            *map(jax.tree.leaves, (jax.device_get(after.params), good.params)), strict=True
        )
    )
    assert (
        moved == (policy == "skip")
        and int(after.health.in_a_row) == 0
        and int(after.health.skipped) == 1
    )


def same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_sum_of_accumulated_gradients_is_kept_in_parts(on_eight_devices):
    _, state, _, step = on_eight_devices
    mesh = state.step.sharding.mesh
    with jax.set_mesh(mesh):
        batch = jax.device_put(next(make_batches(1)), meshes.batch_sharding(mesh))
        text = step.lower(state, batch).compile().as_text()  # The program that ran.
    loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    (over_parts,) = (carried for carried in loops if "f32[4,1,16,16,3]" in carried)
    # The MLPs' first kernels: (layers, 64, 128), of which a device has an eighth, though a quarter of the parameters.
    assert "f32[2,16,64]" in over_parts and "f32[2,64,128]" not in "".join(loops)
