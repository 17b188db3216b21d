"""Every kind of positions at every place against a whole small ViT in NumPy float64 (ViT §D.4: facts
§7.1), other resolutions, and what there is not.
"""

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import without_torchvision
from tests.models.conftest import apply
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.compute import relative
from vit_jax.interchange import fitting, formats
from vit_jax.interchange.conversions import translation, vit_timm
from vit_jax.models import positions, registry, relative_positions, table_positions
from vit_jax.models.embeddings import interpolate, sincos_2d

LEARNED = ("learned", "learned2d", "sincos2d")
# Table 8's rows that are networks of their own, and the same of fixed positions: twelve.
ROWS = [("none", "auto"), *itertools.product(LEARNED, ("stem", "layers", "shared"))]
ROWS += [("relative", "layers"), ("relative", "shared")]
# Two rows of three patches, and a class token: nothing is square.
SMALL = dict(image_size=(8, 12), depth=2, remat="none")
HEADS, SIZE, GRID = 2, 8, (2, 3)


def small(kit, position, place="auto", **options):
    return kit.config(**SMALL | dict(position=position, position_at=place) | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def named(tree):
    leaves = (np.asarray(x, np.float64) for x in jax.tree.leaves(tree))
    return dict(zip(patterns.names(tree), leaves, strict=True))


def table(p, kind, registers):
    """What is added to all tokens, by the definitions: (T, D)."""
    rows, columns = GRID
    patches = np.zeros((rows * columns, HEADS * SIZE))
    first = np.zeros((1, HEADS * SIZE))
    if kind == "sincos2d":
        patches = sincos_2d(GRID, HEADS * SIZE)[0]
    if kind == "learned":
        first, patches = p["position"][0, :1], p["position"][0, 1:]
    if kind == "learned2d":
        first = p["position/tokens"][0]
        for y, x in itertools.product(range(rows), range(columns)):
            patches[y * columns + x] = np.concatenate([
                p["position/x"][0, x], p["position/y"][0, y]
            ])  # fmt: skip
    return np.concatenate([first, np.zeros((registers, HEADS * SIZE)), patches])


def norm(x, p, name):
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return y * p[f"{name}/scale"] + p[f"{name}/bias"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(y, p, offsets, others):
    """Loops over queries and keys; `offsets` (2N - 1, C) of patches, which `others` precede."""
    kernel, bias = p["attention/qkv/kernel"], p["attention/qkv/bias"]
    q, k, v = (np.einsum("bnd,dhc->bhnc", y, kernel[:, i]) + bias[i][:, None] for i in range(3))
    logits = np.einsum("bhqc,bhnc->bhqn", q, k)
    if offsets is not None:
        patches = (len(offsets) + 1) // 2
        for i, j in itertools.product(range(patches), repeat=2):
            embedding = offsets[i - j + patches - 1]
            logits[:, :, others + i, others + j] += q[:, :, others + i] @ embedding
    weights = np.exp(logits / np.sqrt(SIZE))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhqn,bhnc->bqhc", weights, v)
    return (
        np.einsum("bqhc,hcd->bqd", heads, p["attention/out/kernel"]) + p["attention/out/bias"],
        weights,
    )


def forward(params, x, kind, place, registers=0):
    """Logits and attention weights of the whole network."""
    p = named(params)
    rows, columns = GRID
    x = x.astype(np.float64).reshape(-1, rows, 4, columns, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(len(x), rows * columns, 48) @ p["embedding/kernel"].reshape(48, -1)
    x = x + p["embedding/bias"]
    learned = [p[name][0] for name in ("class_token", "registers") if name in p]
    before = [np.broadcast_to(t, (len(x), *t.shape)) for t in learned]
    x = np.concatenate([*before, x], axis=1)
    if place == "stem":
        x = x + table(p, kind, registers)
    maps = []
    for i in range(2):
        head = "encoder/layers/"
        layer = {n.removeprefix(head): a[i] for n, a in p.items() if n.startswith(head)}
        of = layer if any(n.startswith("position") for n in layer) else p
        if place in ("layers", "shared") and kind != "relative":
            x = x + table(of, kind, registers)
        offsets = of["position"] if kind == "relative" else None
        y, weights = attention(norm(x, layer, "attention_norm"), layer, offsets, 1 + registers)
        maps.append(weights)
        x = x + y
        y = norm(x, layer, "mlp_norm") @ layer["mlp/up/kernel"] + layer["mlp/up/bias"]
        x = x + gelu(y) @ layer["mlp/down/kernel"] + layer["mlp/down/bias"]
    return norm(x, p, "encoder/norm")[:, 0] @ p["head/kernel"] + p["head/bias"], np.stack(maps)


@pytest.mark.parametrize(("kind", "place"), ROWS)
def test_logits_are_those_of_the_definitions(kit, kind, place):
    registers = 2 if place == "layers" else 0
    config = small(kit, kind, place, registers=registers)
    params = kit.parameters(config)
    output = kit.run(config, params, images(config), capture=True)
    logits, weights = forward(params, images(config), kind, place, registers)
    np.testing.assert_allclose(output.logits, logits, atol=1e-5)
    np.testing.assert_allclose(output.intermediates["attention"], weights, atol=1e-6)


def test_what_is_learned_has_these_names_and_shapes(kit):
    def found(kind, place, **options):
        config = small(kit, kind, place, **options)
        leaves = named(jax.tree.map(lambda x: np.zeros(x.shape), registry.abstract(config)[1]))
        return {n: x.shape for n, x in leaves.items() if "position" in n}

    tables = {"position/x": (1, 3, 8), "position/y": (1, 2, 8), "position/tokens": (1, 1, 16)}
    assert found("none", "auto") == {} == found("sincos2d", "layers")
    assert found("learned", "shared") == {"position": (1, 7, 16)}
    assert found("learned", "layers") == {"encoder/layers/position": (2, 1, 7, 16)}
    assert found("learned2d", "stem") == tables
    assert found("learned2d", "layers") == {
        f"encoder/layers/{name}": (2, *shape) for name, shape in tables.items()
    }
    assert found("relative", "auto") == {"encoder/layers/position": (2, 11, 8)}
    assert found("relative", "shared") == {"position": (11, 8)}
    without = found("learned2d", "stem", position_of_class=False)
    assert without == {name: tables[name] for name in ("position/x", "position/y")}


@pytest.mark.parametrize(("kind", "place"), [("learned2d", "layers"), ("relative", "shared")])
def test_gradients_are_those_of_differences(kit, kind, place):
    config = small(kit, kind, place, remat="full")
    x, params = images(config), kit.parameters(config)
    target = np.random.default_rng(2).standard_normal((3, 5))
    loss = lambda p: jnp.sum(apply(config, p, x).logits * target)  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(params)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    checked = [name for name in patterns.names(params) if "position" in name]
    assert checked
    for name in checked:
        direction = np.random.default_rng(3).standard_normal(named(params)[name].shape)
        way = patterns.map_named(lambda n, _, at=name, by=direction: by if n == at else 0.0, exact)
        ends = (jax.tree.map(lambda x, d, h=h: x + h * d, exact, way) for h in (1e-5, -1e-5))
        after, before = (np.sum(forward(p, x, kind, place)[0] * target) for p in ends)
        expected = (after - before) / 2e-5
        assert np.sum(named(gradient)[name] * direction) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("kind", "place"), [("learned", "layers"), ("relative", "auto")])
def test_dropout_and_bfloat16_work_with_positions_in_layers(kit, kind, place):
    config = small(kit, kind, place, dropout=0.1, attention_dropout=0.1)
    params = kit.parameters(config)
    random = kit.run(config, params, images(config), jax.random.key(0))
    half = dataclasses.replace(config, dtype="bfloat16", dtype_on_cpu="same")
    rounded = kit.run(half, params, images(config))
    expected = forward(params, images(config), kind, place)[0]
    assert np.isfinite(random.logits).all() and np.abs(random.logits - expected).max() > 1e-3
    np.testing.assert_allclose(rounded.logits, expected, atol=0.05 * np.abs(expected).max())


def test_relative_positions_express_the_bias_of_timm_along_one_row(kit):
    """timm's table is a number for each head and distance, down and across; in one row of patches both have
    the distances across alone. A query that is 1 in one channel, where no key is, adds the number that
    the embedding has there.
    """
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    theirs = without_torchvision.timm_models().vision_transformer_relpos.VisionTransformerRelPos(
        img_size=(4, 20), patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2,
        num_classes=5, rel_pos_type="bias", class_token=True, global_pool="token", fc_norm=False,
        init_values=None,
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            around = 1 if "norm" in name and name.endswith("weight") else 0
            weight.copy_(around + 0.3 * torch.randn(weight.shape, generator=generator))
        for block in theirs.blocks:
            # To and from the class token theirs has numbers too, the last three.
            block.attn.rel_pos.relative_position_bias_table[-3:] = 0
            for head in range(2):  # Channel h of head h: of queries 1, of keys 0.
                row = head * 8 + head
                block.attn.qkv.weight[[row, 16 + row]] = 0
                block.attn.qkv.bias[row], block.attn.qkv.bias[16 + row] = 1, 0
                # Of the other head's channel keys are no part of the content either.
                other = head * 8 + 1 - head
                block.attn.qkv.weight[other] = 0
                block.attn.qkv.bias[other] = 0
    config = small(kit, "relative", image_size=(4, 20), activation="gelu")
    weights = {name: x.numpy() for name, x in theirs.state_dict().items() if "rel_pos" not in name}
    table = vit_timm.Timm().rules(config, {})
    like = registry.abstract(dataclasses.replace(config, position="none"))[1]
    params = jax.tree.map(np.asarray, translation.to_ours(table, weights, like, source="timm"))
    offsets = np.zeros((2, 9, 8), np.float32)
    for i, q, k in itertools.product(range(2), range(5), range(5)):
        bias = theirs.blocks[i].attn.rel_pos.get_bias()[0, :, 1 + q, 1 + k]
        offsets[i, q - k + 4, :2] = bias.detach().numpy() * np.sqrt(8)
    params["encoder"]["layers"]["position"] = offsets
    x = images(config)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()
    output = kit.run(config, params, x)
    assert expected.std() > 0.3
    np.testing.assert_allclose(output.logits, expected, atol=1e-5)


def fitted(source, params, target, resize="scipy"):
    like = registry.abstract(target)[1]
    return jax.tree.map(
        np.asarray, fitting.adapt(params, source, like, target, reset=(), resize=resize)
    )


@pytest.mark.parametrize("resize", ["scipy", "bilinear", "bicubic"])
@pytest.mark.parametrize("place", ["stem", "layers"])
def test_columns_and_rows_are_interpolated_as_the_table_that_they_make(kit, place, resize):
    source = small(kit, "learned2d", place)
    target = dataclasses.replace(source, image_size=(16, 20))
    params = kit.parameters(source)
    found = fitted(source, params, target, resize)

    def tables(tree):
        tree = tree if place == "stem" else jax.tree.map(lambda x: x[1], tree["encoder"]["layers"])
        return table_positions.joined(**tree["position"])

    expected = interpolate(tables(params), (4, 5), method=resize, prefix=1, old_grid=GRID)
    np.testing.assert_allclose(tables(found), expected, atol=1e-6)


def test_distances_are_interpolated_down_and_across():
    """In one row or column they are interpolated as a line; a peak where a patch meets itself gets the width
    of both axes.
    """
    row = np.linspace(-1, 1, 2 * 4 - 1, dtype=np.float32)[:, None]
    for grids in (((1, 4), (1, 7)), ((4, 1), (7, 1))):
        found = relative_positions.interpolate_distances(row, *grids, method="scipy")
        np.testing.assert_allclose(found[:, 0], np.linspace(-1, 1, 13), atol=1e-6)
    old, new = (3, 4), (5, 7)
    peak = np.zeros((2 * 12 - 1, 1), np.float32)
    peak[11] = 1
    found = relative_positions.interpolate_distances(peak, old, new, method="scipy")[:, 0]
    expected = np.zeros_like(found)
    # 3 rows become 5: distances half as large, in old rows; across, 4 columns become 7 likewise.
    down, across = (np.maximum(0, 1 - np.abs(np.arange(1 - n, n)) / 2) for n in new)
    spread = np.outer(down, across)
    pairs = np.zeros_like(found)
    for dy, dx in np.ndindex(9, 13):
        count = (5 - abs(dy - 4)) * (7 - abs(dx - 6))
        expected[(dy - 4) * 7 + dx - 6 + 34] += count * spread[dy, dx]
        pairs[(dy - 4) * 7 + dx - 6 + 34] += count
    np.testing.assert_allclose(found, expected / pairs, atol=1e-6)


@pytest.mark.parametrize("place", ["layers", "shared"])
def test_relative_positions_go_to_another_resolution(kit, place):
    source = small(kit, "relative", place)
    target = dataclasses.replace(source, image_size=(16, 16))
    params = kit.parameters(source)
    found = named(fitted(source, params, target))
    name = "position" if place == "shared" else "encoder/layers/position"
    one = {"shared": lambda x: x, "layers": lambda x: x[1]}[place]
    assert one(found[name]).shape == (2 * 16 - 1, 8)
    old = one(named(params)[name])
    np.testing.assert_allclose(
        one(found[name]),
        relative_positions.interpolate_distances(old, GRID, (4, 4), method="scipy"),
        atol=1e-6,
    )
    # Of the corner's distance there is one pair of patches, before and after.
    np.testing.assert_allclose(one(found[name])[[0, -1]], old[[0, -1]], atol=1e-6)


@pytest.mark.parametrize("grids", [((3, 3), (5, 5)), ((2, 3), (4, 5)), ((4, 3), (2, 6))])
def test_biases_of_distances_go_to_another_resolution_as_the_table_that_they_are(grids):
    """As `interpolate` of PyTorch does it for a table of rows before columns; other tokens' numbers stay."""
    torch = pytest.importorskip("torch")
    old, new = grids
    sides = [[2 * side - 1 for side in grid] for grid in grids]
    table = np.random.default_rng(0).standard_normal((np.prod(sides[0]) + 3, 2)).astype(np.float32)
    found = relative_positions.interpolate_bias(table, old, new, method="bilinear")
    spread = torch.from_numpy(table[:-3]).reshape(1, *sides[0], 2).permute(0, 3, 1, 2)
    options = dict(mode="bilinear", align_corners=False, antialias=True)
    expected = torch.nn.functional.interpolate(spread, size=sides[1], **options)
    expected = expected.permute(0, 2, 3, 1).reshape(-1, 2).numpy()
    np.testing.assert_allclose(found[:-3], expected, atol=1e-6)
    np.testing.assert_array_equal(found[-3:], table[-3:])


def test_biases_are_of_the_distance_down_and_across_and_have_gradients(kit):
    """Against loops, with a register beside the class token; and the table's gradient against differences."""
    config = small(kit, "bias2d", registers=1)
    params = kit.parameters(config)
    table = np.asarray(params["encoder"]["layers"]["position"][0], np.float64)
    assert table.shape == (18, HEADS)
    found = np.asarray(relative.bias_of_pairs(jnp.asarray(table, jnp.float32), GRID, 8))
    rows, columns = GRID
    for i, j in itertools.product(range(8), repeat=2):
        (y, x), (v, u) = divmod(i - 2, columns), divmod(j - 2, columns)
        row = (y - v + rows - 1) * (2 * columns - 1) + x - u + columns - 1
        row = (-1 if j < 2 else -3) if i < 2 else -2 if j < 2 else row
        np.testing.assert_allclose(found[:, i, j], table[row], rtol=1e-6)

    @jax.jit
    @jax.value_and_grad
    def total(table):
        layers = params["encoder"]["layers"] | {"position": table}
        encoder = params["encoder"] | {"layers": layers}
        return apply(config, params | {"encoder": encoder}, images(config)).logits.std()

    tables = params["encoder"]["layers"]["position"]
    step = np.random.default_rng(2).standard_normal(tables.shape).astype(np.float32)
    slope = (total(tables + 0.01 * step)[0] - total(tables - 0.01 * step)[0]) / 0.02
    np.testing.assert_allclose(np.vdot(total(tables)[1], step), slope, rtol=0.02)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("learned", "stem"), ("learned", "shared")),
        (("relative", "shared"), ("learned", "shared")),
        (("relative", "auto"), ("learned", "layers")),
    ],
)
def test_positions_do_not_become_others_under_the_same_name(kit, before, after):
    source, target = small(kit, *before), small(kit, *after)
    with pytest.raises(
        ConfigError, match=f"of positions {before[0]} at .*{after[0]} at .*set model.position"
    ):
        fitted(source, kit.parameters(source), target)


def test_hybrids_have_all_of_them(kit):
    options = dict(
        image_size=(16, 24), patch=1, units=(1,), width_factor=0.5, depth=2, width=16, mlp_dim=32,
        heads=2, num_classes=5, remat="none",
    )  # fmt: skip
    config = registry.model_config("R+ViT-Ti/16", position="relative", **options)
    params = kit.parameters(config)
    assert named(params)["encoder/layers/position"].shape == (2, 2 * 24 - 1, 8)
    target = dataclasses.replace(config, image_size=(24, 32))
    found = fitted(config, params, target)
    output = jax.eval_shape(lambda p: apply(target, p, images(target)), found)
    assert output.logits.shape == (3, 5)


@pytest.mark.parametrize("kind", ["sinusoid", *positions.KINDS])
def test_tokens_of_windows_have_all_of_them(kind):
    def of(**options):
        config = registry.model_config(
            "T2T-ViT-7", image_size=(32, 48), token_width=8, random_features=4, width=16, mlp_dim=32,
            heads=2, depth=2, num_classes=5, position=kind, **options,
        )  # fmt: skip
        definition, weights = registry.abstract_weights(config)
        x = jnp.zeros((1, *config.height_width, 3))
        output = jax.eval_shape(lambda w: nnx.merge(definition, w.params, w.variables)(x), weights)
        assert output.logits.shape == (1, 5)
        trees = (named(jax.tree.map(lambda x: np.zeros(x.shape), tree)) for tree in weights)
        return {n: x.shape for tree in trees for n, x in tree.items() if "position" in n}

    at = "encoder/layers/position"
    expected = {
        "sinusoid": {"position": (1, 7, 16)},  # fixed, so not each layer's own
        "fixed2d": {"position": (1, 7, 16)},
        "learned": {at: (2, 1, 7, 16)},
        "learned2d": {
            f"{at}/x": (2, 1, 3, 8),
            f"{at}/y": (2, 1, 2, 8),
            f"{at}/tokens": (2, 1, 1, 16),
        },
        "factorized": {
            f"{at}/x": (2, 1, 3, 16),
            f"{at}/y": (2, 1, 2, 16),
            f"{at}/tokens": (2, 1, 1, 16),
        },
        "relative": {at: (2, 11, 8)},
        "bias2d": {at: (2, 3 * 5 + 3, 2)},
        "deberta": {at: (2, 11, 16)},
        "transformer_xl": {at: (2, 2, 2, 8)},
        "coordinates": {
            f"{at}/frequencies": (2, 2, 8),
            f"{at}/mlp/up/kernel": (2, 16, 16),
            f"{at}/mlp/up/bias": (2, 16),
            f"{at}/mlp/down/kernel": (2, 16, 16),
            f"{at}/mlp/down/bias": (2, 16),
            f"{at}/tokens": (2, 1, 1, 16),
        },
        "sincos2d": {},
        "none": {},
    }
    assert (of() if kind == "none" else of(position_at="layers")) == expected[kind]


def test_positions_of_columns_and_rows_are_written_as_one_table(kit, tmp_path):
    config = kit.config(position="learned2d", image_size=12, epsilon=1e-6)
    params = kit.parameters(config)
    expected = kit.run(config, params, kit.images).logits
    for format, name in (("official", "a.npz"), ("big_vision", "b.npz"), ("timm", "c.safetensors")):
        model = config if format != "timm" else dataclasses.replace(config, activation="gelu")
        formats.write_checkpoint(formats.LoadedCheckpoint(model, params), tmp_path / name, format)
        found = formats.read_checkpoint(tmp_path / name, heads=2, patch=4, image_size=12)
        assert found.model_config.position == "learned"
        if format != "timm":
            again = jax.tree.map(np.asarray, found.params)
            logits = kit.run(found.model_config, again, kit.images).logits
            np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("format", ["official", "big_vision", "timm", "huggingface"])
@pytest.mark.parametrize(
    ("kind", "place"), [("learned", "shared"), ("sincos2d", "layers"), ("relative", "auto")]
)
def test_no_other_code_has_positions_in_layers(kit, tmp_path, format, kind, place):
    config = small(kit, kind, place, epsilon=1e-6, image_size=12)
    with pytest.raises(
        CheckpointError, match=rf"no {kind} positions in layers \(position_at={place}"
    ):
        formats.write_checkpoint(
            formats.LoadedCheckpoint(config, kit.parameters(config)), tmp_path / "x.npz", format
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("none", "shared"), "position=none has nothing to add at model.position_at=shared"),
        (
            ("relative", "stem"),
            "relative acts in attention, so in every layer: .* layers or shared",
        ),
        (("learned2d", "auto", dict(width=15, heads=3)), "needs an even model width, not 15"),
        (("sincos2d", "shared", dict(width=18)), "needs a model width of 8 or more that 4 divides"),
        (("relative", "auto", dict(attention="splash")), "kernel of model.attention=splash cannot"),
        (("relative", "auto", dict(attention="cudnn")), "take auto or xla"),
        (("learned", "layer"), "'layer' is not one of auto, stem, layers, shared; did you mean"),
        (("learned1d",), "did you mean 'learned2d'"),
    ],
)
def test_positions_that_there_are_not_are_errors_that_say_so(kit, options, words):
    kind, *place, more = options if isinstance(options[-1], dict) else (*options, {})
    with pytest.raises(ConfigError, match=words):
        small(kit, kind, *place, **more)


def test_parts_of_the_patches_cannot_be_placed_in_layers(kit):
    config = small(kit, "relative")
    model = nnx.merge(registry.abstract(config)[0], kit.parameters(config))
    with pytest.raises(ConfigError, match="positions in every layer need all patches"):
        model.add_positions(jnp.zeros((1, 6, 16)), visible=jnp.zeros((1, 2), int))
