"""Segmentation: EoMT against transformers, its losses against the formulas in float64 and matching against SciPy,
and the other heads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.optimize import linear_sum_assignment

from tests import lazily
from tests.new_models import drawn
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.compute.convolution import local
from vit_jax.data.labels.masks import IGNORED
from vit_jax.devices.meshes import BATCH, make_mesh
from vit_jax.models import registry
from vit_jax.objectives.contract import Learner, ObjectiveContext
from vit_jax.objectives.segmentation import losses
from vit_jax.objectives.segmentation.heads import QueryHead
from vit_jax.objectives.segmentation.matching import assign
from vit_jax.objectives.segmentation.segmentation import (
    Segmentation,
    SegmentationOptions,
)

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")
peer = lazily.Package("transformers.models.eomt.modeling_eomt")
WIDTH, HEADS, DEPTH, QUERIES, CLASSES, SIZE = 32, 4, 3, 6, 5, 64
SMALL = dict(
    width=WIDTH, depth=DEPTH, heads=HEADS, mlp_dim=4 * WIDTH, image_size=SIZE, num_classes=0
)


def made(model="ViT-mu/16", classes=CLASSES, changes=(), **options):
    small = SMALL if model.startswith("ViT") else dict(image_size=SIZE, num_classes=0)
    config = registry.model_config(model, **small | dict(changes))
    context = ObjectiveContext(config, (0.5,) * 3, (0.5,) * 3, 60, int, num_classes=classes)
    return Segmentation(
        SegmentationOptions(**{"queries": QUERIES, "blocks": 2, "points": 64} | options), context
    )


def learner(objective, step=0):
    model, own = modules(objective)
    return Learner(drawn(model), drawn(own, 1), None, jnp.int32(step))


def modules(objective):
    """How the model and what the objective owns are built."""
    return (
        lambda: registry.build(objective.context.model, rngs=nnx.Rngs(0)),
        lambda: objective.make_modules(nnx.Rngs(1)),
    )


def batch(size=2, seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, (size, SIZE // 8, SIZE // 8)).repeat(8, 1).repeat(8, 2)
    labels[:, :8] = IGNORED
    images = random.normal(size=(size, SIZE, SIZE, 3)).astype(np.float32)
    return {"image": jnp.asarray(images), "label": jnp.asarray(labels, jnp.uint8)}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    config = transformers.EomtConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, mlp_ratio=4, image_size=SIZE,
        patch_size=16, num_queries=QUERIES, num_blocks=2, num_register_tokens=3, num_labels=CLASSES,
        attn_implementation="eager", train_num_points=64,
    )  # fmt: skip
    model = transformers.EomtForUniversalSegmentation(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def ours(theirs):
    """Our learner with their weights."""
    changes = dict(registers=3, activation="gelu", layer_scale="all", position_of_class=False)
    objective = made(changes=changes)
    model, own = map(nnx.eval_shape, modules(objective))
    found = Learner(model, own, None, jnp.int32(0))
    t = {name: x.detach().numpy() for name, x in theirs.state_dict().items()}

    def every(name):
        return np.stack([t[f"layers.{i}.{name}"] for i in range(DEPTH)])

    def heads(name):
        kernels = np.stack([every(f"attention.{p}_proj.weight") for p in "qkv"], 1)
        biases = np.stack([every(f"attention.{p}_proj.bias") for p in "qkv"], 1)
        size = WIDTH // HEADS
        kernels = kernels.transpose(0, 3, 1, 2).reshape(DEPTH, WIDTH, 3, HEADS, size)
        return {"kernel": kernels, "bias": biases.reshape(DEPTH, 3, HEADS, size)}

    def linear(name):
        return {"kernel": t[f"{name}.weight"].T, "bias": t[f"{name}.bias"]}

    def norm(name):
        return {"scale": t[f"{name}.weight"], "bias": t[f"{name}.bias"]}

    out = every("attention.out_proj.weight").transpose(0, 2, 1)
    layers = {
        "attention_norm": {"scale": every("norm1.weight"), "bias": every("norm1.bias")},
        "mlp_norm": {"scale": every("norm2.weight"), "bias": every("norm2.bias")},
        "attention": {
            "qkv": heads("attention"),
            "out": {
                "kernel": out.reshape(DEPTH, HEADS, WIDTH // HEADS, WIDTH),
                "bias": every("attention.out_proj.bias"),
            },
        },
        "attention_scale": {"scale": every("layer_scale1.lambda1")},
        "mlp_scale": {"scale": every("layer_scale2.lambda1")},
        "mlp": {
            name: {
                "kernel": every(f"mlp.{fc}.weight").transpose(0, 2, 1),
                "bias": every(f"mlp.{fc}.bias"),
            }
            for name, fc in (("up", "fc1"), ("down", "fc2"))
        },
    }
    projection = t["embeddings.patch_embeddings.projection.weight"].transpose(2, 3, 1, 0)
    model = {
        "embedding": {
            "kernel": projection,
            "bias": t["embeddings.patch_embeddings.projection.bias"],
        },
        "class_token": t["embeddings.cls_token"],
        "registers": t["embeddings.register_tokens"],
        "position": t["embeddings.position_embeddings.weight"][None],
        "encoder": {"layers": layers, "norm": norm("layernorm")},
    }
    own = {
        "queries": t["query.weight"],
        "class_head": linear("class_predictor"),
        "mask_head": {i: linear(f"mask_head.fc{i + 1}") for i in range(3)},
        "upscale": {
            i: {
                "expand": {
                    "kernel": t[f"upscale_block.block.{i}.conv1.weight"]
                    .transpose(0, 2, 3, 1)
                    .reshape(WIDTH, 4 * WIDTH)
                },
                "bias": t[f"upscale_block.block.{i}.conv1.bias"],
                "depthwise": {
                    "kernel": t[f"upscale_block.block.{i}.conv2.weight"].transpose(2, 3, 1, 0)
                },
                "norm": norm(f"upscale_block.block.{i}.layernorm2d"),
            }
            for i in range(2)
        },
    }
    for module, tree in ((found.model, model), (found.modules, own)):
        _fill(module, tree)
    return found


def _fill(module, tree):
    """Sets every parameter of a module; none may be missing or of another shape."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    for path, parameter in state:
        value = tree
        for key in path:
            value = value[key]
        assert value.shape == parameter.shape, path
    nnx.update(module, jax.tree.map(jnp.asarray, nnx.State(_states(tree))))


def _states(tree):
    return {k: _states(v) if isinstance(v, dict) else nnx.Param(v) for k, v in tree.items()}


def pixels(seed=0):
    images = np.random.default_rng(seed).normal(size=(2, SIZE, SIZE, 3)).astype(np.float32)
    return jnp.asarray(images), torch.tensor(images.transpose(0, 3, 1, 2))


def compare(found, masks, classes, bound=1e-5):
    for ours, theirs in ((found[0], masks), (found[1], classes)):
        theirs = theirs.detach().numpy()
        assert np.abs(ours - theirs).max() < bound * max(np.abs(theirs).max(), 1)


predictions_of = nnx.jit(lambda own, *inputs, **options: own(*inputs, **options))


def test_eomt_predicts_what_transformers_does_once_its_masks_are_annealed(theirs, ours):
    images, tensors = pixels()
    theirs.attn_mask_probs[:] = 0
    expected = theirs.eval()(tensors)
    ((masks, classes),) = predictions_of(ours.modules, ours.model, images)
    compare((masks, classes), expected.masks_queries_logits, expected.class_queries_logits)


def test_masked_attention_is_that_of_transformers(theirs, ours):
    images, tensors = pixels()
    theirs.attn_mask_probs[:] = 1
    expected = theirs.eval()(tensors)
    predictions = predictions_of(
        ours.modules, ours.model, images, masked=jnp.ones(2), key=jax.random.key(0)
    )
    assert len(predictions) == 3
    compare(predictions[-1], expected.masks_queries_logits, expected.class_queries_logits)
    unmasked = predictions_of(ours.modules, ours.model, images)[0][0]
    assert np.abs(unmasked - predictions[-1][0]).max() > 1e-2


def test_a_masked_query_reads_no_patch_outside_of_its_mask_and_a_free_one_all():
    from vit_jax.objectives.segmentation.heads import hide

    masks = np.full((1, 2, 4, 4), -1.0, np.float32)
    masks[0, :, :2] = 1.0
    free = jnp.array([False, True]).reshape(1, 2, 1)
    hidden = jax.jit(lambda masks, x: hide(masks, (2, 2), free)(x))
    added = np.asarray(hidden(masks, np.zeros((1, 7, 3, 8), np.float32)))
    assert added.shape == (1, 3, 7, 7)
    assert (added[0, :, 0] == [0, 0, 0, 0, 0, -1e9, -1e9]).all()  # queries, class token, patches
    assert not added[0, :, 1:].any()


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (5, 9), (20, 40)])
def test_matching_is_scipys_assignment_of_the_rows_that_count(shape):
    rows, columns = shape
    random = np.random.default_rng(rows)
    costs = random.normal(size=(30, rows, columns)).astype(np.float32)
    counts = random.integers(0, rows + 1, 30)
    found = np.asarray(jax.jit(jax.vmap(assign))(costs, counts))
    for cost, count, columns_of in zip(costs, counts, found, strict=True):
        assert (columns_of[:count] == linear_sum_assignment(cost[:count])[1]).all()
        assert (columns_of[count:] == columns).all()


def test_matching_survives_costs_that_are_no_numbers():
    costs = np.array([[np.nan, 1.0, np.inf], [np.nan, 0.0, 2.0]], np.float32)
    assert np.asarray(jax.jit(assign)(costs, 2)).tolist() == [1, 2]


def test_maps_are_sampled_as_torch_samples_grids():
    random = np.random.default_rng(0)
    maps = random.normal(size=(3, 7, 5)).astype(np.float32)
    within = jnp.asarray(random.uniform(size=(2, 7, 5, 2)).astype(np.float32))
    points, pulled = jax.jit(losses.places)(within), random.normal(size=(3, 70)).astype(np.float32)
    corner = np.stack(np.meshgrid(np.arange(5), np.arange(7)), -1)
    exact = ((corner + np.asarray(within, np.float64)) / (5, 7)).reshape(-1, 2)
    np.testing.assert_allclose(points, exact, atol=1e-6)
    tensors = torch.tensor(maps, dtype=torch.float64, requires_grad=True)
    repeated = torch.tensor(exact)[None].repeat(3, 1, 1)
    expected = peer.sample_point(tensors[:, None], repeated, align_corners=False)[:, 0]
    expected.backward(torch.tensor(pulled, dtype=torch.float64))

    @jax.jit
    def with_gradient(maps, pulled):
        found, pull = jax.vjp(lambda maps: losses.sample(maps, within), maps)
        return found, pull(pulled)[0]

    found, gradient = with_gradient(maps, pulled)
    np.testing.assert_allclose(found, expected.detach(), atol=1e-6)
    np.testing.assert_allclose(gradient, tensors.grad, atol=1e-6)
    labels = random.integers(0, 3, (7, 5)).astype(np.uint8)
    of_class = np.stack([labels == k for k in range(3)]).astype(np.float32)
    inside, counted = jax.jit(losses.sample_labels)(labels, points, np.arange(3))
    # Of a map, a place is rounded at the size of its side, once in each direction.
    rounding = 2 * 7 * np.finfo(np.float32).eps
    np.testing.assert_allclose(inside, with_gradient(of_class, pulled)[0], atol=rounding)
    assert counted.min() == 1


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 4, 5, 7)])
def test_kernels_of_each_place_are_those_of_the_plain_formula_on_cpus(shape):
    random = np.random.default_rng(0)
    x, kernels = (
        jnp.asarray(random.normal(size=size), jnp.float32) for size in (shape, (3, 3, *shape[-3:]))
    )
    found, plain = (jax.jit(f)(x, kernels) for f in (local, local.plain))
    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_points_are_anywhere_in_their_pixels():
    within = jax.jit(lambda key: losses.Points(100).draw(key, (6, 9)))(jax.random.key(0))
    assert within.shape == (6, 6, 9, 2)  # 3 x 100 points among 54 pixels
    points = np.asarray(jax.jit(losses.places)(within)).reshape(6, 6, 9, 2)
    assert (np.floor(points[..., 0] * 9) == np.arange(9)).all()
    assert (np.floor(points[..., 1] * 6) == np.arange(6)[:, None]).all()
    assert np.ptp(np.asarray(within), axis=(0, 1, 2)).min() > 0.95


def test_costs_of_matching_are_those_of_transformers():
    random = np.random.default_rng(0)
    masks, logits = random.normal(size=(6, 40)), random.normal(size=(6, 6))
    targets, classes = random.integers(0, 2, (4, 40)), np.array([0, 2, 3, 4])
    tensors = torch.tensor(masks), torch.tensor(targets, dtype=torch.float64)
    expected = (
        5 * peer.pair_wise_sigmoid_cross_entropy_loss(*tensors)
        + 5 * peer.pair_wise_dice_loss(*tensors)
        - 2 * torch.tensor(logits).softmax(-1)[:, classes]
    ).T
    costs = jax.jit(lambda *arrays: losses.costs(*arrays, losses.Weights()))
    found = costs(masks, logits, targets, np.ones(40), classes)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_loss_of_queries_is_the_formulas_in_float64():
    random = np.random.default_rng(1)
    masks = random.normal(size=(QUERIES, 8, 8)).astype(np.float32)
    logits = random.normal(size=(QUERIES, CLASSES + 1)).astype(np.float32)
    labels = random.integers(0, CLASSES - 1, (32, 32)).astype(np.uint8)
    labels[:4] = IGNORED
    queries = np.array([4, 0, 2, 5, QUERIES])

    @jax.jit
    def loss(masks, logits, labels, queries):
        classes, count = (x[0] for x in losses.segments(labels[None], CLASSES, CLASSES))
        points = losses.Points(64)
        within = points.draw(jax.random.key(3), (8, 8))
        t, inside = losses.sample_labels(labels, losses.places(within), classes)
        wanted = losses.Segments(within, t, inside, classes, count)
        found = losses.matched_loss(masks, logits, wanted, queries, points, losses.Weights())
        chosen = masks[jnp.minimum(queries, QUERIES - 1)]
        return found, wanted, losses.sample(chosen, within)

    found, wanted, z = loss(masks, logits, labels, queries)
    t, inside, classes, count = wanted.targets, wanted.counted, wanted.classes, wanted.count
    assert int(count) == CLASSES - 1
    z = np.asarray(z, np.float64)
    t, inside = np.asarray(t, np.float64), np.asarray(inside, np.float64)
    # 64 points: a quarter of them evenly among all 192, and the 48 where z is nearest to 0.
    nearest = np.abs(z).argsort(axis=1).argsort(axis=1) < 48
    counted = (nearest + 16 / 192) * inside
    p = 1 / (1 + np.exp(-z))
    entropy = -(t * np.log(p) + (1 - t) * np.log(1 - p))
    mask = ((entropy * counted).sum(1) / counted.sum(1))[:4].mean()
    overlap, sums = (p * t * counted).sum(1), ((p + t) * counted).sum(1)
    dice = (1 - (2 * overlap + 1) / (sums + 1))[:4].mean()
    wanted = np.full(QUERIES, CLASSES)
    wanted[queries[:4]] = np.asarray(classes)[:4]
    exact = logits.astype(np.float64)
    log_p = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    weight = np.where(wanted == CLASSES, 0.1, 1.0)
    label = (-log_p[np.arange(QUERIES), wanted] * weight).sum() / weight.sum()
    expected = {"mask": 5 * mask, "dice": 5 * dice, "label": 2 * label}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    assert 0 < (1 - inside).sum() < inside.sum()


def test_the_loss_of_an_example_does_not_depend_on_the_others():
    random = np.random.default_rng(0)
    masks = random.normal(size=(2, 2, QUERIES, 8, 8)).astype(np.float32)
    logits = random.normal(size=(2, 2, QUERIES, CLASSES + 1)).astype(np.float32)
    labels, how = (
        batch()["label"],
        dict(most=CLASSES, points=losses.Points(64), weights=losses.Weights()),
    )
    loss = jax.jit(functools.partial(losses.query_loss, **how))
    found = loss(masks, logits, labels, jax.random.key(0))
    others = masks.copy(), logits.copy(), labels.at[1].set(2)
    others[0][:, 1], others[1][:, 1] = 0, 1
    again = loss(*others, jax.random.key(0))
    for name, x in found.items():
        assert x.shape == (2, 2)
        np.testing.assert_array_equal(x[:, 0], again[name][:, 0])
        assert (x[:, 1] != again[name][:, 1]).all()
    # So devices ask each other nothing, in the search for the best assignment above all.
    mesh = make_mesh({"data": 2, "fsdp": 1, "tensor": 1}, jax.devices()[:2])
    by_layer, by_image = (NamedSharding(mesh, spec) for spec in (P(None, BATCH), P(BATCH)))
    with jax.set_mesh(mesh):
        loss = jax.jit(
            lambda *arrays: losses.query_loss(*arrays, jax.random.key(0), **how),
            in_shardings=(by_layer, by_layer, by_image), out_shardings=by_layer,
        ).lower(masks, logits, labels).compile()  # fmt: skip
        assert "all-reduce" not in loss.as_text()
        for name, x in loss(masks, logits, labels).items():
            np.testing.assert_allclose(x, found[name], rtol=1e-5)


def test_points_where_the_logits_are_nearest_to_0_count_most():
    random = np.random.default_rng(0)
    values = random.permuted(
        np.geomspace(1e-3, 1e3, 400, dtype=np.float32)[None].repeat(5, 0), axis=1
    )
    values *= random.choice([-1, 1], values.shape)
    found = np.asarray(jax.jit(losses.Points(400).importance)(values))
    nearest = np.abs(values).argsort(axis=1).argsort(axis=1) < 100
    np.testing.assert_allclose(found, nearest + 0.25 / 3, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 100])
def test_the_smallest_values_are_those_that_sorting_finds(count):
    values = np.random.default_rng(0).exponential(size=(3, 100)).astype(np.float32)
    values[0], values[1, :9] = 0.5, 0
    found = np.asarray(jax.jit(losses.smallest, static_argnums=1)(values, count))
    assert found[0].all() and (found[1:].sum(1) >= [max(count, 9), count]).all()
    for row, chosen in zip(values[1:], found[1:], strict=True):
        # Equal to eight bits of the fraction: less than 2^-8 apart.
        assert row[chosen].max() <= np.sort(row)[count - 1] * (1 + 2**-7)


def test_segments_are_the_largest_first_with_things_of_their_own():
    labels = np.zeros((1, 6, 10), np.uint16)
    labels[0, :3], labels[0, 3, :4], labels[0, 3, 4:] = 1 + 256, 1 + 512, 2
    labels[0, 5] = IGNORED
    segments = jax.jit(lambda labels: losses.segments(labels, 3, 4, things=2))
    numbers, count = segments(labels)
    assert numbers[0].tolist() == [257, 0, 2, 513] and count.tolist() == [4]


def test_pixels_that_are_ignored_have_no_part_in_the_loss():
    logits = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 3, (2, 8, 8)).astype(np.uint8)
    labels[0, :4], labels[1] = IGNORED, IGNORED
    loss, accuracy = jax.jit(losses.pixel_loss)(logits, labels)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits[:1].astype(np.float64)).movedim(-1, 1),
        torch.tensor(labels[:1].astype(np.int64)),
        ignore_index=IGNORED,
    )
    np.testing.assert_allclose(loss, [expected, 0], rtol=1e-5)
    assert 0 < accuracy[0] < 1 and accuracy[1] == 0


def test_masks_are_annealed_block_by_block():
    objective = made()  # of 60 steps: from 10 to 30, and from 30 to 50
    masked = jax.jit(objective.masked)
    at = {step: np.asarray(masked(np.int32(step))).tolist() for step in (0, 20, 30, 60)}
    assert at[0] == [1, 1] and at[30] == [0, 1] and at[60] == [0, 0]
    np.testing.assert_allclose(at[20], [0.5**0.9, 1], rtol=1e-6)


@pytest.mark.parametrize("head", ["eomt", "linear", "multilevel"])
def test_every_example_has_a_loss_and_every_parameter_a_gradient(head):
    objective = made(head=head, width=16)
    given = learner(objective, step=5)
    split = [registry.split(module) for module in (given.model, given.modules)]
    params, others = zip(*(weights for _, weights in split), strict=True)

    def loss_of(params, others, batch):
        parts = zip(split, params, others, strict=True)
        model, own = (nnx.merge(definition, p, o) for (definition, _), p, o in parts)
        found = dataclasses.replace(given, model=model, modules=own)
        loss, metrics = objective(found, batch, nnx.Rngs(dropout=0))
        return loss.mean(), (loss, metrics)

    gradient_of = jax.jit(jax.grad(loss_of, has_aux=True))
    grads, (loss, metrics) = gradient_of(params, others, batch())
    assert loss.shape == (2,) and all(x.shape == (2,) for x in metrics.values())
    names = zip(patterns.names(grads), jax.tree.leaves(grads), strict=True)
    unused = [name for name, grad in names if not np.abs(grad).max() > 0]
    # What comes after the last layer that is fused has none.
    last = ["0/encoder/norm/bias", "0/encoder/norm/scale"] if head == "multilevel" else []
    assert unused == last


@pytest.mark.parametrize(
    "head, size, model",
    [
        ("eomt", 16, "ViT-mu/16"),
        ("linear", 4, "ViT-mu/16"),
        ("multilevel", 16, "ViT-mu/16"),
        pytest.param("multilevel", 8, "BiT-R26x1", marks=pytest.mark.slow),
    ],
)
def test_scores_are_maps_of_all_classes(head, size, model):
    objective = made(model, head=head, width=16)
    (found,) = nnx.jit(objective.answers)(learner(objective), batch()["image"])
    assert found.shape == (2, size, size, CLASSES) and found.dtype == jnp.float32


def test_masks_are_enlarged_before_they_are_summed_as_transformers_does():
    random = np.random.default_rng(0)
    masks = random.normal(0, 4, (2, 11, 6, 8)).astype(np.float32)
    classes = random.normal(0, 2, (2, 11, CLASSES + 1)).astype(np.float32)
    size = (30, 32)
    found = jax.jit(functools.partial(QueryHead.joined, size=size))(masks, classes)
    large = torch.nn.functional.interpolate(torch.from_numpy(masks).double(), size, mode="bilinear")
    probable = torch.from_numpy(classes).double().softmax(-1)[..., :-1]
    expected = torch.einsum("bqk,bqhw->bhwk", probable, large.sigmoid())
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_scores_are_of_the_images_size_where_masks_are_enlarged():
    objective = made(enlarge="masks", width=16)
    (found,) = jax.eval_shape(
        lambda images: objective.answers(learner(objective), images), batch()["image"]
    )
    assert found.shape == (2, *batch()["image"].shape[1:3], CLASSES)


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({"model": "Mixer-S/16"}, {"head": "eomt"}, "head=linear"),
        ({"model": "Mixer-S/16"}, {"head": "eomt"}, "needs a ViT"),
        ({}, {"blocks": 9}, "config.objective.blocks = 9 must be at most"),
        (
            {},
            {"head": "multilevel", "layers": (0, 7)},
            "config.objective.layers: there is no layer 7",
        ),
        ({}, {"blocks": 2, "annealing": (0.8, 0.2)}, "annealing"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, options, message):
    model = changes.get("model", "ViT-mu/16")
    config = registry.model_config(
        model, image_size=SIZE, num_classes=0, **({} if "model" in changes else dict(depth=3))
    )
    context = ObjectiveContext(config, (0.5,) * 3, (0.5,) * 3, 60, int, num_classes=CLASSES)
    with pytest.raises(ConfigError, match=message):
        Segmentation(SegmentationOptions(**options), context)


def test_queries_learn_nothing_from_an_image_without_a_pixel_that_counts():
    random = np.random.default_rng(0)
    masks = jnp.asarray(random.normal(size=(1, 2, QUERIES, 8, 8)), jnp.float32)
    logits = jnp.asarray(random.normal(size=(1, 2, QUERIES, CLASSES + 1)), jnp.float32)
    labels = np.full((2, 16, 16), IGNORED, np.uint8)
    labels[0, :8] = 1
    how = dict(most=CLASSES, points=losses.Points(64), weights=losses.Weights(no_object=0.0))

    def loss(masks, logits):
        parts = losses.query_loss(masks, logits, labels, jax.random.key(0), **how)
        of_images = losses.of_counted(sum(x.sum(0) for x in parts.values()), labels)
        return of_images.mean(), of_images

    (mean, of_images), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        masks, logits
    )
    assert of_images[1] == 0 and of_images[0] > 0 and mean == of_images[0] / 2
    for gradient in gradients:
        assert not gradient[:, 1].any() and gradient[:, 0].any()


@pytest.mark.parametrize("void", [(), (1,), (0, 2), (0, 1, 2, 3)])
def test_the_mean_is_over_images_of_which_some_pixel_counts(void):
    """One that counts nowhere takes no weight from the others; without such images nothing changes."""
    values = np.random.default_rng(0).exponential(size=4).astype(np.float32)
    labels = np.zeros((4, 8, 8), np.uint8)
    labels[:, 2:] = IGNORED
    labels[list(void)] = IGNORED
    found = jax.jit(losses.of_counted)(values, labels)
    rest = np.delete(values, void)
    assert found.mean() == pytest.approx(rest.mean() if len(rest) else 0)
    if not void:
        np.testing.assert_array_equal(found, values)
