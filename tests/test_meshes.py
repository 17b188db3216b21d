"""Where arrays lie, on eight simulated devices."""

import jax
import numpy as np
import pytest
from absl import logging
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import optim
from vit_jax.base import patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import Optim
from vit_jax.devices import meshes
from vit_jax.models import registry
from vit_jax.objectives.contract import Objective
from vit_jax.objectives.networks import Networks
from vit_jax.planning import target
from vit_jax.training import state as training_state

MINIMUM = 2048
# Of `vit()` on 2 x 2 x 2 devices: the whole shape, and that of the part on a device. By hand: heads
# (4) and MLP width (128) are cut over `tensor`; of arrays of at least 2048 elements, the longest
# axis left over `fsdp`, never the layers.
PARTS = {
    "class_token": ((1, 1, 64), (1, 1, 64)),
    "embedding/bias": ((64,), (64,)),
    "embedding/kernel": ((8, 8, 3, 64), (8, 8, 3, 32)),
    "encoder/layers/attention/out/bias": ((2, 64), (2, 64)),
    "encoder/layers/attention/out/kernel": ((2, 4, 16, 64), (2, 2, 16, 32)),
    "encoder/layers/attention/qkv/bias": ((2, 3, 4, 16), (2, 3, 2, 16)),
    "encoder/layers/attention/qkv/kernel": ((2, 64, 3, 4, 16), (2, 32, 3, 2, 16)),
    "encoder/layers/attention_norm/bias": ((2, 64), (2, 64)),
    "encoder/layers/attention_norm/scale": ((2, 64), (2, 64)),
    "encoder/layers/mlp/down/bias": ((2, 64), (2, 64)),
    "encoder/layers/mlp/down/kernel": ((2, 128, 64), (2, 64, 32)),
    "encoder/layers/mlp/up/bias": ((2, 128), (2, 64)),
    "encoder/layers/mlp/up/kernel": ((2, 64, 128), (2, 32, 64)),
    "encoder/layers/mlp_norm/bias": ((2, 64), (2, 64)),
    "encoder/layers/mlp_norm/scale": ((2, 64), (2, 64)),
    "encoder/norm/bias": ((64,), (64,)),
    "encoder/norm/scale": ((64,), (64,)),
    "head/bias": ((10,), (10,)),
    "head/kernel": ((64, 10), (64, 10)),
    "position": ((1, 17, 64), (1, 17, 64)),
}
# The parts of its optimizer state and averages where they differ, over `data` too: the axis whose
# shard is the smallest when its last two axes are padded to 8 x 128.
OVER_DATA = PARTS | {
    "embedding/kernel": ((8, 8, 3, 64), (4, 8, 3, 32)),
    "encoder/layers/attention/out/kernel": ((2, 4, 16, 64), (2, 1, 16, 32)),
    "encoder/layers/attention/qkv/kernel": ((2, 64, 3, 4, 16), (2, 16, 3, 2, 16)),
    "encoder/layers/mlp/down/kernel": ((2, 128, 64), (2, 32, 32)),
    "encoder/layers/mlp/up/kernel": ((2, 64, 128), (2, 16, 64)),
}


def vit(**options):
    return registry.model_config(
        "ViT-mu/8",
        image_size=32,
        **dict(width=64, depth=2, mlp_dim=128, heads=4, num_classes=10) | options,
    )


def mesh(**sizes):
    return meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1} | sizes)


@pytest.fixture(scope="module")
def states():
    """By optimizer, training states of `vit()` born on 2 x 2 x 2 devices."""
    return {name: born(mesh(data=2, fsdp=2, tensor=2), name) for name in ("adamw", "adafactor")}


def born(mesh, name):
    """A training state of `vit()` with the optimizer `name`, as a run creates it."""
    init = make_init(name)
    like = training_state.abstract(init, mesh, fsdp_min_size=MINIMUM)
    return training_state.create(init, 0, like)


def make_init(name):
    """Makes that state from a key."""
    config = schema.to_config(Optim)
    config.name = name
    shapes = registry.abstract(vit())[1]
    optimizer, _ = optim.make(config, shapes, total_steps=10, to_steps=lambda duration: 0)
    networks = Networks(vit(), lambda model, teachers: Objective(None, None))
    return training_state.initializer(networks, optimizer, ema=True)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(data=-1), (8, 1, 1)),
        (dict(fsdp=4, data=-1), (2, 4, 1)),
        (dict(data=2, fsdp=2, tensor=2), (2, 2, 2)),
        (dict(tensor=-1), (1, 1, 8)),
    ],
)
def test_minus_one_takes_the_devices_that_the_others_leave(sizes, expected):
    made = mesh(**sizes)
    assert tuple(meshes.sizes_of(made).items()) == tuple(zip(meshes.SIZES, expected, strict=True))
    assert made.axis_names == ("replica", "data", "fsdp", "tensor")
    assert made.devices.shape == (1, *expected)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(data=3), "data 3 x fsdp 1 x tensor 1 does not fit the 8 devices"),
        (dict(data=-1, fsdp=3), "data -1 x fsdp 3 x tensor 1 does not fit the 8 devices"),
        (dict(data=1, fsdp=16), "does not fit the 8 devices"),
        (dict(data=-1, fsdp=2, tensor=16), "does not fit the 8 devices"),
        (dict(data=-1, fsdp=-1), "at most one is -1"),
        (dict(data=0), "sizes are positive"),
        (dict(tensor=-2), "sizes are positive"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_an_error(sizes, words):
    with pytest.raises(ConfigError, match=words):
        mesh(**sizes)


def test_a_mesh_can_be_made_of_some_devices():
    made = meshes.make_mesh({"data": -1, "fsdp": 2, "tensor": 1}, jax.devices()[:4])
    assert dict(made.shape) == {"replica": 1, "data": 2, "fsdp": 2, "tensor": 1}


@pytest.mark.parametrize(
    ("data", "fsdp", "replicas"), [(64, 1, 4), (8, 8, 4), (4, 16, 4), (1, 64, 1), (2, 32, 2)]
)
def test_optimizer_state_has_sixteen_shards_at_most(data, fsdp, replicas):
    made = meshes.make_mesh({"data": data, "fsdp": fsdp, "tensor": 1}, tpu("v5e:8x8"))
    assert made.shape["replica"] == replicas
    assert meshes.sizes_of(made) == {"data": data, "fsdp": fsdp, "tensor": 1}


@pytest.mark.parametrize(("data", "copies", "replicas"), [(8, 2, 2), (8, 1, 1), (1, 2, 1)])
def test_the_state_is_held_several_times_where_that_is_asked_for(data, copies, replicas):
    made = meshes.make_mesh({"data": data, "fsdp": -1, "tensor": 1}, copies=copies)
    assert made.shape["replica"] == replicas and meshes.batch_shards(made) == 8
    assert meshes.sizes_of(made) == {"data": data, "fsdp": 8 // data, "tensor": 1}


@pytest.mark.parametrize(
    ("count", "sizes", "expected"),
    [
        (1, (-1, 8, 1), (1, 1, 1)),
        (4, (-1, 8, 1), (1, 4, 1)),
        (8, (-1, 8, 1), (1, 8, 1)),
        (4, (-1, 8, 2), (1, 2, 2)),
    ],
)
def test_a_recipe_for_many_devices_shards_parameters_over_the_few_there_are(count, sizes, expected):
    sizes = dict(zip(meshes.SIZES, sizes, strict=True))
    made = meshes.make_mesh(sizes, jax.devices()[:count])
    assert tuple(meshes.sizes_of(made).values()) == expected


def test_parameters_and_adamw_state_are_born_in_parts_of_the_right_size(states):
    state = states["adamw"]
    for tree, parts in ((state.params, PARTS), (state.ema, OVER_DATA)):
        assert {
            name: (leaf.shape, leaf.addressable_shards[0].data.shape)
            for name, leaf in zip(patterns.names(tree), jax.tree.leaves(tree), strict=True)
        } == parts
    whole, part = (4 * sum(np.prod(sizes[i]) for sizes in PARTS.values()) for i in (0, 1))
    over_data = 4 * sum(np.prod(sizes[1]) for sizes in OVER_DATA.values())
    assert (whole, part, over_data) == (324_904, 102_440, 57_384)
    for device in jax.devices():
        on_device = [
            s.data.nbytes
            for x in jax.tree.leaves(state)
            for s in x.addressable_shards
            if s.device == device
        ]
        # Parameters, their average, two moments; the rest is counters and one flag a parameter.
        expected = part + 3 * over_data
        assert expected <= sum(on_device) < expected + 100


def test_with_data_parallelism_alone_every_device_holds_all_parameters_and_a_share_of_the_rest():
    like = training_state.abstract(make_init("adamw"), mesh(data=-1), fsdp_min_size=MINIMUM)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(like.params))
    for x in jax.tree.leaves((like.opt_state, like.ema)):
        shard = np.prod(x.sharding.shard_shape(x.shape))
        assert shard == (x.size / 8 if x.size >= MINIMUM else x.size), x


def test_what_data_does_not_divide_stays_whole():
    leaf = jax.ShapeDtypeStruct((5, 7, 64, 6), np.float32)
    tree = {"layers": {"kernel": leaf}, "other": jax.ShapeDtypeStruct((5, 7), np.float32)}
    shardings = meshes.shardings(tree, mesh(data=-1), fsdp_min_size=0, over_data=True)
    assert shardings["layers"]["kernel"].spec == P(None, None, "data", None)
    assert shardings["other"].is_fully_replicated
    stack = {"layers": {"bias": jax.ShapeDtypeStruct((8, 7), np.float32)}}
    (of_layers,) = jax.tree.leaves(
        meshes.shardings(stack, mesh(data=-1), fsdp_min_size=0, over_data=True)
    )
    assert of_layers.is_fully_replicated


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_state_lies_as_its_parameter_and_over_data(states, name):
    state, found = states[name], set()
    for path, leaf in zip(
        patterns.names(state.opt_state), jax.tree.leaves(state.opt_state), strict=True
    ):
        for parameter, (whole, part) in OVER_DATA.items():
            if path.endswith("/" + parameter) and leaf.shape == whole:
                assert leaf.addressable_shards[0].data.shape == part, path
                found.add(parameter)
    assert found == PARTS.keys()


def test_of_large_models_every_large_array_is_cut_and_never_along_the_layers():
    """All of G/14 and its factored second moment, by shape alone, at the default smallest size."""
    config = schema.to_config(Optim)
    config.name = "adafactor"
    shapes = registry.abstract(registry.model_config("ViT-G/14", pool="map"))[1]
    optimizer, _ = optim.make(config, shapes, total_steps=10, to_steps=lambda duration: 0)
    tree = {"params": shapes, "opt_state": jax.eval_shape(optimizer.init, shapes)}
    made = mesh(data=1, fsdp=4, tensor=2)
    shardings = meshes.shardings(tree, made, fsdp_min_size=2**16)
    cut = 0
    for path, leaf, sharding in zip(
        patterns.names(tree), *map(jax.tree.leaves, (tree, shardings)), strict=True
    ):
        axes = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
        if "layers" in path.split("/"):
            assert axes[0] is None, path
        if leaf.size < 2**16:
            assert "fsdp" not in axes, path
        elif path.endswith("mlp/up/bias"):
            assert axes == [None, "tensor"]  # Its only axis beside the layers is taken.
        else:
            assert "fsdp" in axes, path
            cut += 1
        if path.endswith(
            ("qkv/kernel", "mlp/up/kernel", "mlp/down/kernel", "attention/out/kernel")
        ):
            assert "tensor" in axes, path
    assert cut > 20
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings["params"]), strict=True)
    part = sum(np.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in pairs)
    assert 1 / 8 < part / total < 1.01 / 8


def test_heads_that_tensor_parallelism_does_not_divide_stay_whole():
    shapes = registry.abstract(vit(width=48, heads=3))[1]
    shardings = meshes.shardings(shapes, mesh(data=4, tensor=2), fsdp_min_size=0)
    layers = shardings["encoder"]["layers"]
    assert layers["attention"]["qkv"]["kernel"].is_fully_replicated
    assert layers["mlp"]["up"]["kernel"].spec == P(None, None, "tensor")


def test_a_familys_own_rules_come_before_those_that_all_share():
    leaf = jax.ShapeDtypeStruct((4, 8, 6), np.float32)
    tree = {"gate": {"kernel": leaf}, "mlp": {"up": {"kernel": leaf}}}
    rules = ((r".*gate/kernel", -2), (r"mlp/up/kernel", -3))
    shardings = meshes.shardings(
        tree, mesh(data=4, tensor=2), fsdp_min_size=2**16, tensor_rules=rules
    )
    assert shardings["gate"]["kernel"].spec == P(None, "tensor", None)
    assert shardings["mlp"]["up"]["kernel"].spec == P("tensor", None, None)


def test_a_model_cut_over_the_mesh_gives_what_one_device_gives():
    made = mesh(data=2, fsdp=2, tensor=2)
    config = vit(head_init="normal")
    definition, shapes = registry.abstract(config)
    init = jax.jit(lambda key: registry.initialize(config, key))
    parameters = init(jax.random.key(0))
    images = np.random.default_rng(0).uniform(-1, 1, (8, 32, 32, 3)).astype(np.float32)

    @jax.jit
    def run(parameters, images):
        return nnx.merge(definition, parameters)(images, capture=True)

    expected = run(parameters, images)
    cut = jax.device_put(parameters, meshes.shardings(shapes, made, fsdp_min_size=MINIMUM))
    with jax.set_mesh(made):
        output = run(cut, jax.device_put(images, meshes.batch_sharding(made)))
    np.testing.assert_allclose(output.logits, expected.logits, atol=1e-5)
    blocks = output.intermediates["blocks"]
    assert blocks.sharding.is_equivalent_to(NamedSharding(made, P(None, meshes.BATCH)), blocks.ndim)


def tpu(name, slices=1):
    return target.find(name, slices=slices).devices


def test_neighbours_in_the_mesh_are_neighbours_on_the_torus():
    made = meshes.make_mesh({"data": -1, "fsdp": 16, "tensor": 1}, tpu("v5e:16x16"))
    assert made.devices.shape == (16, 1, 16, 1)
    for ring in made.devices[:, 0, :, 0]:  # Each fsdp group is a line of chips.
        places = np.array([device.coords for device in ring])
        assert (np.ptp(places, axis=0) > 0).sum() == 1


def test_only_data_goes_over_slices():
    made = meshes.make_mesh({"data": 4, "fsdp": 4, "tensor": 2}, tpu("v5e:4x4", slices=2))
    slices = np.vectorize(meshes.slice_of)(made.devices)
    assert slices.shape == (2, 2, 4, 2), "each slice is a replica"
    assert (slices[0] == 0).all() and (slices[1] == 1).all()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((1, 32, 1), "data 1 is no multiple of the 2 slices"), ((2, 16, 1), None)],
)
def test_a_mesh_that_the_machine_does_not_take_falls_back_with_a_warning(sizes, words, caplog):
    devices = tpu("v5e:4x4", slices=2)
    logging.get_absl_logger().propagate = True
    made = meshes.make_mesh(dict(zip(meshes.SIZES, sizes, strict=True)), devices)
    assert tuple(meshes.sizes_of(made).values()) == sizes and set(made.devices.flat) == set(devices)
    assert (words in caplog.text) if words else not caplog.records


def test_axes_of_the_torus_are_split_where_the_mesh_asks_for_it():
    made = meshes.make_mesh({"data": 128, "fsdp": 8, "tensor": 1}, tpu("v5p:8x8x16"))
    assert made.devices.shape == (64, 2, 8, 1) and len(set(made.devices.flat)) == 1024
