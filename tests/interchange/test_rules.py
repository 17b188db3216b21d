"""Rules: every tensor goes to its parameter and back unchanged, and nothing is left over."""

import tracemalloc

import jax
import numpy as np
import pytest

from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import translation
from vit_jax.interchange.conversions.rules import (
    Rule,
    chain,
    expanded,
    joined,
    reshaped,
    stacked,
    transposed,
)
from vit_jax.interchange.conversions.translation import specs, to_ours, to_theirs

RULES = [
    Rule("encoder/layers/up/kernel", "blocks.{layer}.fc.weight", transposed(1, 0)),
    Rule(
        "encoder/layers/qkv/kernel",
        ("blocks.{layer}.q", "blocks.{layer}.k", "blocks.{layer}.v"),
        chain(transposed(1, 0), reshaped((4, 2, 2), (4, 4)), stacked(1)),
    ),
    Rule("encoder/layers/norm", "all.norms"),
    Rule("stage/layers/conv", "unit{layer:02d}.conv", first_layer=2),
    Rule("norm", "norm", expanded(0, 1)),
    Rule("both", ("one", "other"), joined(0, (2, 3))),
    Rule("absent", "absent"),
]


def tree():
    """What `RULES` give for `tensors`."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)  # noqa: E731
    layers = {
        "up": {"kernel": f32(2, 3, 5)},
        "qkv": {"kernel": f32(2, 4, 3, 2, 2)},
        "norm": f32(2, 6),
    }
    return {
        "encoder": {"layers": layers},
        "stage": {"layers": {"conv": f32(2, 7)}},
        "norm": f32(8),
        "both": f32(5),
    }


def tensors():
    rng = np.random.default_rng(0)
    shapes = {
        "all.norms": (2, 6),
        "unit02.conv": (7,),
        "unit03.conv": (7,),
        "norm": (1, 1, 8),
        "one": (2,),
        "other": (3,),
    }
    for layer in range(2):
        shapes |= {f"blocks.{layer}.fc.weight": (5, 3)} | {
            f"blocks.{layer}.{name}": (4, 4) for name in "qkv"
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_every_tensor_goes_where_its_rule_says():
    theirs = tensors()
    ours = jax.tree.map(np.asarray, to_ours(RULES, theirs, tree(), source="file"))
    layers = ours["encoder"]["layers"]
    np.testing.assert_array_equal(layers["up"]["kernel"][1], theirs["blocks.1.fc.weight"].T)
    # Ours is (D, 3, H, C); theirs a matrix of (H·C, D) each.
    np.testing.assert_array_equal(layers["qkv"]["kernel"][0, :, 1, 1, 0], theirs["blocks.0.k"][2])
    np.testing.assert_array_equal(layers["norm"], theirs["all.norms"])
    np.testing.assert_array_equal(ours["stage"]["layers"]["conv"][1], theirs["unit03.conv"])
    np.testing.assert_array_equal(ours["both"], np.concatenate([theirs["one"], theirs["other"]]))
    np.testing.assert_array_equal(ours["norm"], theirs["norm"][0, 0])


def test_there_and_back_gives_the_same_bits_in_the_same_order_of_axes():
    theirs = tensors()
    theirs["norm"].view(np.uint32)[0, 0, 0] = 0x7FC0_1234  # A NaN with a payload.
    back = dict(to_theirs(RULES, to_ours(RULES, theirs, tree(), source="file")))
    assert back.keys() == theirs.keys()
    for name, array in back.items():
        assert array.flags.c_contiguous and array.shape == theirs[name].shape
        assert array.tobytes() == theirs[name].tobytes(), name


def test_half_precision_becomes_float32_and_again_what_it_was():
    theirs = tensors() | {"norm": np.float16(np.linspace(-3, 3, 8)).reshape(1, 1, 8)}
    ours = to_ours(RULES, theirs, tree(), source="file")
    assert np.asarray(ours["norm"]).dtype == np.float32
    back = dict(to_theirs(RULES, ours, dtypes={"norm": "float16"}))
    assert back["norm"].tobytes() == theirs["norm"].tobytes() and back["norm"].dtype == np.float16


def test_whatever_does_not_fit_is_named_at_once_with_both_shapes():
    wrong = tensors() | {
        "extra": np.zeros((9, 9), np.float32),
        "norm": np.zeros((1, 1, 4), np.float32),
    }
    wrong["one"] = np.zeros(2, np.int32)
    del wrong["blocks.1.k"]
    like = tree() | {"unmapped": jax.ShapeDtypeStruct((3,), np.float32)}
    with pytest.raises(CheckpointError) as raised:
        to_ours(RULES, wrong, like, source="x.npz")
    assert str(raised.value).splitlines() == [
        "x.npz does not fit the model:",
        "  unmapped (3,): the format has no such tensor",
        "  blocks.1.k (4, 4): missing in the file",
        "  norm: (1, 1, 4) in the file, (1, 1, 8) in the model",
        "  one: of type int32, which float32 cannot hold exactly",
        "  extra (9, 9): in the file, but not in the model",
        "To read it without some of its tensors, say x.npz#ignore=PATTERN, of their names",
    ]


def test_a_parameter_without_a_place_in_the_format_is_an_error_before_anything_is_written():
    with pytest.raises(
        CheckpointError, match=r"no place for these parameters:\n  registers \(1, 4\)"
    ):
        to_theirs(RULES, {"registers": np.zeros((1, 4)), "norm": np.zeros(8)})


def test_shapes_of_a_large_model_take_no_memory():
    like = {
        "encoder": {
            "layers": {"up": {"kernel": jax.ShapeDtypeStruct((48, 4096, 16384), np.float32)}}
        }
    }
    tracemalloc.start()
    wanted = specs(RULES, like)
    assert wanted["blocks.47.fc.weight"] == ((16384, 4096), np.dtype("float32"))
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_nothing_is_read_before_it_is_used_and_then_one_parameter_at_a_time():
    read = []

    def lazy(name, array):
        return LazyArray(array.shape, array.dtype, lambda: read.append(name) or array)

    ours = to_ours(
        RULES, {name: lazy(name, array) for name, array in tensors().items()}, tree(), source="file"
    )
    assert read == []
    np.asarray(ours["both"])
    assert read == ["one", "other"]


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (0, 2, 1)])
def test_large_arrays_have_their_axes_exchanged_in_parts_that_make_a_whole(axes):
    array = np.random.default_rng(0).standard_normal((130, 3, 257)).astype(np.float32)
    out = np.full([array.shape[axis] for axis in axes], np.nan, np.float32)
    translation._copy(array.transpose(axes), out)
    np.testing.assert_array_equal(out, array.transpose(axes))


def test_a_large_parameter_becomes_a_cpus_array_without_a_copy():
    table = [Rule("layers/kernel", "{layer}.weight", transposed(1, 0))]
    like = {"layers": {"kernel": jax.ShapeDtypeStruct((3, 256, 512), np.float32)}}
    tensors = {f"{i}.weight": np.full((512, 256), i, np.float32) for i in range(3)}
    read = np.asarray(to_ours(table, tensors, like, source="it")["layers"]["kernel"])
    array = jax.device_put(read, jax.devices("cpu")[0])
    assert array.unsafe_buffer_pointer() == read.ctypes.data
    # A step to which it is donated leaves the file's numbers alone.
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert added.mean() == 2 and read.mean() == 1
