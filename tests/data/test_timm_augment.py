"""timm's RandAugment and AutoAugment against Pillow, by the levels that timm documents, and against
timm's own operations where it is installed.
"""

import importlib.util
import random

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.data.augmentation import timm_augment as ta

HEIGHT, WIDTH = 37, 30
FILL = (124, 116, 104)
MAGNITUDES = (0.0, 2.3, 5.0, 8.7, 9.4, 10.0)
# How far from Pillow: AutoContrast rounds exact quotients down, the others blend or interpolate in
# float32, where Pillow may cut to the other side of a whole number.
TOLERANCE = {
    "AutoContrast": 1, "Equalize": 0, "Invert": 0, "Posterize": 0, "Solarize": 0, "SolarizeAdd": 0,
    "Color": 1, "Contrast": 1, "Brightness": 1, "Sharpness": 1,
    "ShearX": 1, "ShearY": 1, "TranslateX": 1, "TranslateY": 1,
}  # fmt: skip


def affine(image, *matrix):
    return image.transform(
        image.size, PIL.Image.AFFINE, matrix, resample=PIL.Image.BICUBIC, fillcolor=FILL
    )


def add_to_dark(image, addition):
    return image.point([min(255, v + addition) if v < 128 else v for v in range(256)] * 3)


def candidates(name, image, m, increasing):
    """What Pillow makes of an image at magnitude `m`, for either sign."""
    level = m / 10
    enhance = {
        "Color": PIL.ImageEnhance.Color,
        "Contrast": PIL.ImageEnhance.Contrast,
        "Brightness": PIL.ImageEnhance.Brightness,
        "Sharpness": PIL.ImageEnhance.Sharpness,
    }
    bits, threshold = int(level * 4), int(level * 256)
    if increasing:
        bits, threshold = 4 - bits, 256 - threshold
    black = PIL.Image.new("RGB", image.size)
    for sign in (1, -1):
        factor = max(0.1, 1 + sign * 0.9 * level) if increasing else 1.8 * level + 0.1
        if name in enhance:
            yield enhance[name](image).enhance(factor)
        else:
            yield {
                "AutoContrast": lambda: PIL.ImageOps.autocontrast(image),
                "Equalize": lambda: PIL.ImageOps.equalize(image),
                "Invert": lambda: PIL.ImageOps.invert(image),
                "Posterize": lambda: PIL.ImageOps.posterize(image, bits) if bits else black,
                "Solarize": lambda: PIL.ImageOps.solarize(image, threshold),
                "SolarizeAdd": lambda: add_to_dark(image, int(110 * level)),
                "ShearX": lambda s=sign: affine(image, 1, s * 0.3 * level, 0, 0, 1, 0),
                "ShearY": lambda s=sign: affine(image, 1, 0, 0, s * 0.3 * level, 1, 0),
                "TranslateX": lambda s=sign: affine(image, 1, 0, s * 0.45 * level * WIDTH, 0, 1, 0),
                "TranslateY": lambda s=sign: affine(
                    image, 1, 0, 0, 0, 1, s * 0.45 * level * HEIGHT
                ),
            }[name]()


def levels(magnitudes):
    return jnp.array(magnitudes, jnp.float32) / 10


def difference(a, b):
    return np.abs(np.asarray(a, int) - np.asarray(b, int)).max()


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("name", TOLERANCE)
def test_every_operation_equals_pillow_at_every_magnitude(images, name, increasing):
    operation = jax.jit(ta.operations(FILL, increasing=increasing)[name])
    for shift in range(len(MAGNITUDES)):
        magnitudes = np.roll(MAGNITUDES, shift)
        actual = operation(images, levels(magnitudes), jax.random.key(shift))
        assert actual.dtype == jnp.uint8
        for image, result, m in zip(images, actual, magnitudes, strict=True):
            expected = candidates(name, PIL.Image.fromarray(image), m, increasing)
            assert min(difference(result, e) for e in expected) <= TOLERANCE[name], (name, m)


def test_all_operations_but_rotate_are_in_the_table_above():
    assert set(ta.operations(FILL, increasing=True)) == {*TOLERANCE, "Rotate"}


def test_both_signs_come(images):
    same = np.repeat(images[:1], 16, axis=0)
    operations = ta.operations(FILL, increasing=True)
    for name in ("Rotate", "ShearX", "TranslateY", "Color", "Brightness"):
        operation = jax.jit(operations[name])
        results = np.asarray(operation(same, levels([9.0] * 16), jax.random.key(1)))
        assert len(np.unique(results.reshape(16, -1), axis=0)) == 2, name


def test_rotate_of_a_photograph_is_within_38_db_of_pillows_bicubic(shared_data):
    """Bilinear interpolation is at 36 to 37 dB."""
    path = next(p for p in sorted(shared_data.rglob("*")) if p.suffix.lower() in (".jpg", ".jpeg"))
    image = PIL.Image.open(path).convert("RGB").resize((224, 224))
    for degrees in (3.0, 13.0, -30.0):
        rotated = jax.jit(ta.rotate)(
            np.asarray(image)[None], jnp.array([degrees]), jnp.array(FILL, jnp.uint8)
        )[0]
        expected = image.rotate(degrees, resample=PIL.Image.BICUBIC, fillcolor=FILL)
        error = np.clip(np.floor(rotated), 0, 255) - np.asarray(expected, np.float64)
        assert 10 * np.log10(255**2 / np.mean(error**2)) > 38


def test_levels_and_policies_are_those_of_timm(images):
    """timm/data/auto_augment.py needs Pillow and NumPy only, and is loaded without the rest."""
    timm = importlib.util.find_spec("timm")
    if timm is None:
        pytest.skip("timm is not installed")
    path = f"{timm.submodule_search_locations[0]}/data/auto_augment.py"
    spec = importlib.util.spec_from_file_location("timm_auto_augment", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    hparams = {"img_mean": FILL, "interpolation": PIL.Image.BICUBIC}
    random.seed(0)
    for increasing, kind in (
        (True, theirs._RAND_INCREASING_TRANSFORMS),
        (False, theirs._RAND_TRANSFORMS),
    ):
        operations = ta.operations(FILL, increasing=increasing)
        names = [name.replace("Increasing", "").replace("Rel", "") for name in kind]
        assert sorted(names) == sorted(operations)
        for name, their_name in zip(names, kind, strict=True):
            if name == "Rotate":
                continue
            operation = jax.jit(operations[name])
            actual = operation(images[1:3], levels([3.0, 9.3]), jax.random.key(0))
            for image, result, m in zip(images[1:3], actual, (3.0, 9.3), strict=True):
                theirs_op = theirs.AugmentOp(their_name, 1.0, m, hparams)
                expected = [theirs_op(PIL.Image.fromarray(image)) for _ in range(8)]
                assert min(difference(result, e) for e in expected) <= TOLERANCE[name], their_name
    policy = theirs.auto_augment_policy_original(hparams)
    pairs = [
        tuple((op.name.replace("Original", ""), op.prob, op.magnitude) for op in pair)
        for pair in policy
    ]
    assert tuple(pairs) == ta.AUTOAUGMENT


def notes(monkeypatch):
    """Operations that write down in the three channels their index, the magnitude, and that they
    were made.
    """
    fakes = {
        name: lambda images, level, key, i=i: jnp.stack(
            [
                jnp.full(images.shape[:3], i, jnp.uint8),
                jnp.broadcast_to((level * 200)[:, None, None], images.shape[:3]).astype(jnp.uint8),
                images[..., 2] + jnp.uint8(1),
            ],
            -1,
        )
        for i, name in enumerate(ta.operations(FILL, increasing=True))
    }
    monkeypatch.setattr(ta, "operations", lambda fill, layout=None, *, increasing: dict(fakes))


def test_operations_magnitudes_and_whether_are_drawn_as_timm_draws_them(monkeypatch):
    notes(monkeypatch)
    blank = jnp.zeros((32, 1, 1, 3), jnp.uint8)
    keys = jax.random.split(jax.random.key(0), 1000)
    one = jax.jit(
        jax.vmap(
            lambda k: ta.timm_randaugment(blank, k, 1, 9.0, std=0.5, increasing=True, fill=FILL)
        )
    )
    index, level, made = np.asarray(one(keys))[:, :, 0, 0].reshape(-1, 3).T
    assert scipy.stats.binomtest(int(made.sum()), made.size, 0.5).pvalue > 0.001
    made = made == 1
    # The operation of one image of each batch; images of a batch depend on each other.
    one_image = np.arange(made.size) % 32 == 5
    assert scipy.stats.chisquare(np.bincount(index[made & one_image], minlength=15)).pvalue > 0.001
    clipped = scipy.stats.norm.sf(10, 9, 0.5)
    at_ten = (level[made] == 200).sum()
    assert scipy.stats.binomtest(int(at_ten), int(made.sum()), clipped).pvalue > 0.001
    inner = level[made & (level < 200)] / 20
    truncated = scipy.stats.truncnorm(-18, 2, 9, 0.5)
    assert abs(inner.mean() + 0.025 - truncated.mean()) < 0.02  # notes are cut to 1/20
    assert abs(inner.std() - truncated.std()) < 0.02


def test_autoaugment_makes_both_of_a_pair_in_order_each_with_its_probability(monkeypatch):
    """With operations that write down 16 · what was there + their index, and the last level."""
    order = {
        name: lambda images, level, key, i=i: jnp.stack(
            [
                images[..., 0] * 16 + jnp.uint8(i),
                jnp.broadcast_to((level * 100)[:, None, None], images.shape[:3]).astype(jnp.uint8),
                images[..., 2],
            ],
            -1,
        )
        for i, name in enumerate(ta.operations(FILL, increasing=False))
    }
    monkeypatch.setattr(ta, "operations", lambda fill, layout=None, *, increasing: dict(order))
    always = (("Color", 1.0, 4), ("Rotate", 1.0, 9))
    never = (("Color", 0.0, 4), ("Rotate", 0.0, 9))
    often = (("Invert", 0.8, 1), ("Color", 0.25, 5))
    monkeypatch.setattr(ta, "AUTOAUGMENT", (always, never, often))
    blank = jnp.zeros((16, 1, 1, 3), jnp.uint8)
    keys = jax.random.split(jax.random.key(0), 3000)
    out = jax.jit(jax.vmap(lambda k: ta.autoaugment(blank, k, fill=FILL)))(keys)
    found, counts = np.unique(np.asarray(out)[:, 7, 0, 0, :2], axis=0, return_counts=True)
    color, turn, invert = (list(order).index(n) for n in ("Color", "Rotate", "Invert"))
    expected = {
        (16 * color + turn, 90): 1 / 3,
        (0, 0): 1 / 3 + 0.2 * 0.75 / 3,
        (invert, 10): 0.8 * 0.75 / 3,
        (color, 50): 0.2 * 0.25 / 3,
        (16 * invert + color, 50): 0.8 * 0.25 / 3,
    }
    assert {tuple(f) for f in found.tolist()} == set(expected)
    shares = [expected[tuple(f)] * 3000 for f in found.tolist()]
    assert scipy.stats.chisquare(counts, shares).pvalue > 0.001


def test_autoaugments_posterize_keeps_four_to_eight_bits(images, monkeypatch):
    monkeypatch.setattr(ta, "AUTOAUGMENT", ((("Posterize", 1.0, 5), ("Invert", 0.0, 0)),))
    out = jax.jit(lambda i, k: ta.autoaugment(i, k, fill=FILL))(images, jax.random.key(0))
    np.testing.assert_array_equal(out, images & 0b11111100)


def test_no_image_of_a_sharded_batch_moves_between_devices():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batch = np.random.default_rng(0).integers(0, 256, (128, 12, 12, 3), np.uint8)
    function = jax.jit(
        lambda i, k: ta.timm_randaugment(i, k, 1, 9.0, std=0.5, increasing=True, fill=FILL)
    )
    compiled = function.lower(jax.device_put(batch, sharding), jax.random.key(0)).compile()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in compiled.as_text()
