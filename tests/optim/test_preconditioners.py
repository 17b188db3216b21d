"""Optimizers of matrices, against their formulas in float64 NumPy, timm and optax; and what they share
with all others.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import without_torchvision
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.optim import matrices, preconditioners
from vit_jax.optim.preconditioners import newton_schulz

NAMES = list(preconditioners.PRECONDITIONERS)
COMMON = {"matrix_dtype": "float32", "lr": 0.05}
STEPS = 10
orthogonalize = jax.jit(newton_schulz.orthogonalize, static_argnums=1)


@pytest.fixture(scope="module")
def vit():
    """(config, shapes of the parameters) of a small ViT."""
    config = registry.model_config(
        "ViT-mu/8", image_size=16, num_classes=10, width=24, depth=2, heads=3, mlp_dim=72
    )
    return config, registry.abstract_weights(config)[1].params


@pytest.fixture(scope="module")
def trained(kit, vit):
    """`trained(**fields)`: the parameters of `vit` after each of ten steps; each optimizer is compiled once."""
    params, gradients = drawn(vit[1], 0), [drawn(vit[1], seed + 1) for seed in range(STEPS)]
    return functools.cache(lambda **fields: kit.train(kit.config(**fields), params, gradients)[0])


def drawn(shapes, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), shapes)


def separate(name, kernel):
    """The matrices (inputs, outputs) of a stacked kernel, written down case by case."""
    for layer in np.asarray(kernel, np.float64):
        if "qkv" in name:
            yield from (layer[:, i].reshape(len(layer), -1) for i in range(3))
        elif "out" in name:
            yield layer.reshape(-1, layer.shape[-1])
        else:
            yield layer


def kernels(tree):
    return {n: x for n, x in patterns.named(tree).items() if re.fullmatch(".*layers/.*kernel", n)}


def assert_moved_alike(found, expected, start):
    """By the whole matrix: AdaMuon divides each entry by its own size, and with it what was rounded."""
    found, expected, start = (np.asarray(x, np.float64) for x in (found, expected, start))
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected - start)


def polar(x, config):
    """U Vᵀ of x by the published iteration."""
    triples, safety = newton_schulz.POLYNOMIALS[config.polynomial]
    y = x.T if len(x) > len(x.T) else x
    y = y / (safety * np.linalg.norm(y))
    for a, b, c in triples:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if len(x) > len(x.T) else y


def muon(update, state, config):
    rows, columns = update.shape
    rms = 0.2 * max(rows, columns) ** 0.5
    return update * (rms if config.matrix_scale == "rms" else max(1, columns / rows) ** 0.5), state


def adamuon(update, second, config):
    second = config.matrix_b2 * second + (1 - config.matrix_b2) * update**2
    update = update / (np.sqrt(second) + config.eps)
    return 0.2 * np.sqrt(update.size) * update / np.linalg.norm(update), second


def normuon(update, second, config):
    squares = (update**2).mean(0, keepdims=True)
    second = config.matrix_b2 * second + (1 - config.matrix_b2) * squares
    update = update / (np.sqrt(second) + config.eps)
    return 0.2 * np.sqrt(update.size) * update / np.linalg.norm(update), second


def in_float64(config, formula, start, gradients):
    """The matrix after each update."""
    p, m, state = start, 0.0, 0.0
    for g in gradients:
        m = config.matrix_b1 * m + (1 - config.matrix_b1) * g
        ahead = config.matrix_b1 * m + (1 - config.matrix_b1) * g if config.nesterov else m
        direction, state = formula(polar(ahead, config), state, config)
        p = p - config.lr * (direction + config.weight_decay * p)
    return p


FORMULAS = {"muon": muon, "adamuon": adamuon, "normuon": normuon}
CASES = [
    *((name, {}) for name in FORMULAS),
    ("muon", {"polynomial": "jordan", "matrix_scale": "original", "nesterov": False}),
]


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_ten_steps_are_those_of_the_formula_in_float64(kit, vit, trained, name, fields):
    fields = {"name": name, "weight_decay": 0.1} | COMMON | fields
    config, trajectory = kit.config(**fields), trained(**fields)
    params, gradients = drawn(vit[1], 0), [drawn(vit[1], seed + 1) for seed in range(STEPS)]
    ours, starts = kernels(trajectory[-1]), kernels(params)
    grads = [kernels(gradient) for gradient in gradients]
    assert len(ours) == 4
    for kernel, start in starts.items():
        series = zip(*(separate(kernel, g[kernel]) for g in grads), strict=True)
        for p, end, gs in zip(
            separate(kernel, start), separate(kernel, ours[kernel]), series, strict=True
        ):
            expected = in_float64(config, FORMULAS[name], p, gs)
            assert_moved_alike(end, expected, p)


def root(x, epsilon):
    values, vectors = np.linalg.eigh(x)
    return vectors * (np.maximum(values, 0) + epsilon * values[-1]) ** -0.25 @ vectors.T


def shampoo_in_float64(config, p, gradients):
    """Blocks are halves of the side of 72."""
    b1, b2, m, v = config.matrix_b1, config.matrix_b2, 0.0, 0.0
    halves = {72: 2}
    rows, columns = (halves.get(side, 1) for side in p.shape)
    left, right, roots = {}, {}, {}
    for t, g in enumerate(gradients, start=1):
        v = b2 * v + (1 - b2) * g**2
        adam = direction = g / (np.sqrt(v / (1 - b2**t)) + config.eps)
        blocks = [np.split(row, columns, axis=1) for row in np.split(g, rows)]
        for i in range(rows):
            for j in range(columns):
                b = blocks[i][j]
                left[i, j] = b2 * left.get((i, j), 0.0) + (1 - b2) * b @ b.T
                right[i, j] = b2 * right.get((i, j), 0.0) + (1 - b2) * b.T @ b
                if t % config.matrix_every == 0:
                    roots[i, j] = [root(x[i, j], config.matrix_eps) for x in (left, right)]
                if roots:
                    blocks[i][j] = roots[i, j][0] @ b @ roots[i, j][1]
        if roots:
            direction = np.block(blocks)
            direction = direction * np.linalg.norm(adam) / np.linalg.norm(direction)
        m = b1 * m + (1 - b1) * direction
        p = p - config.lr * (b1 * m + (1 - b1) * direction) / (1 - b1**t)
    return p


def assert_ten_steps(kit, vit, config, formula):
    """Every kernel of a ViT is, after ten steps, what `formula(config, p, gradients)` gives in float64."""
    params, gradients = drawn(vit[1], 0), [drawn(vit[1], seed + 1) for seed in range(STEPS)]
    trajectory, _ = kit.train(config, params, gradients)
    ours, grads = kernels(trajectory[-1]), [kernels(gradient) for gradient in gradients]
    for kernel, start in kernels(params).items():
        series = zip(*(separate(kernel, g[kernel]) for g in grads), strict=True)
        for p, end, gs in zip(
            separate(kernel, start), separate(kernel, ours[kernel]), series, strict=True
        ):
            expected = formula(config, p, gs)
            assert_moved_alike(end, expected, p)


def test_ten_steps_of_shampoo_are_those_of_the_formula_in_float64(kit, vit):
    """Roots after steps 3, 6 and 9, and Adam's direction before."""
    config = kit.config(name="shampoo", matrix_every=3, matrix_block=40, lr=0.05)
    assert_ten_steps(kit, vit, config, shampoo_in_float64)


def soap_in_float64(config, p, gradients):
    """Blocks are halves of the side of 72; each has Adam's moments, and bases from the axes on."""
    b1, b2 = config.matrix_b1, config.matrix_b2
    halves = {72: 2}
    rows, columns = (halves.get(side, 1) for side in p.shape)
    ends = []
    for i, row in enumerate(np.split(p, rows)):
        ends.append([])
        for j, end in enumerate(np.split(row, columns, axis=1)):
            moments, bases = [0.0, 0.0], [np.eye(side) for side in end.shape]
            m = v = 0.0
            for t, gradient in enumerate(gradients, start=1):
                g = np.split(np.split(gradient, rows)[i], columns, axis=1)[j]
                if t > 1 and (t - 1) % config.basis_every == 0:
                    for k, (moment, basis) in enumerate(zip(moments, bases, strict=True)):
                        damped = moment + config.matrix_eps * np.linalg.norm(moment) * np.eye(
                            len(moment)
                        )
                        bases[k] = np.linalg.qr(damped @ basis)[0]
                m = b1 * m + (1 - b1) * g
                ahead = b1 * m + (1 - b1) * g if config.nesterov else m
                left, right = bases
                v = b2 * v + (1 - b2) * (left.T @ g @ right) ** 2
                u = left.T @ ahead @ right / (1 - b1**t)
                u /= np.sqrt(v / (1 - b2**t)) + config.eps
                end = end - config.lr * left @ u @ right.T
                moments = [
                    b2 * x + (1 - b2) * y for x, y in zip(moments, (g @ g.T, g.T @ g), strict=True)
                ]
            ends[-1].append(end)
    return np.block(ends)


@pytest.mark.parametrize("nesterov", [False, True])
def test_ten_steps_of_soap_are_those_of_the_formula_in_float64(kit, vit, nesterov):
    """Bases are refreshed before steps 4, 7 and 10; before that the directions are Adam's."""
    config = kit.config(name="soap", basis_every=3, matrix_block=40, lr=0.05, nesterov=nesterov)
    assert_ten_steps(kit, vit, config, soap_in_float64)


def test_bases_of_soap_become_eigenvectors_and_other_steps_leave_them(kit):
    """Of gradients that are always the same the moments are too, up to a factor."""
    random = np.random.default_rng(0)
    u, v = (np.linalg.qr(random.standard_normal((8, 8)))[0] for _ in range(2))
    gradient = {"mlp": {"kernel": np.float32(u * np.geomspace(1, 1e-2, 8) @ v.T)}}
    config = kit.config(name="soap", basis_every=5)

    def basis_after(steps):
        _, state = kit.train(config, gradient, [gradient] * steps)
        named = patterns.named(state)
        return next(np.asarray(x)[0, 0] for n, x in named.items() if n.endswith("left_basis"))

    np.testing.assert_array_equal(basis_after(5), np.eye(8))
    np.testing.assert_array_equal(basis_after(6), basis_after(10))
    cosines = np.abs(basis_after(101).T @ u)
    np.testing.assert_allclose(cosines[:4, :4], np.eye(4), atol=1e-4)


def test_directions_without_a_gradient_stay_finite(kit):
    """A kernel that has no gradient, and one whose gradient has rank 1."""
    gradients = {"up": np.zeros((8, 16), np.float32), "down": np.ones((16, 8), np.float32)}
    gradients = {name: {"kernel": kernel} for name, kernel in gradients.items()}
    for fields in ({"name": "soap", "basis_every": 1}, {"name": "shampoo", "matrix_every": 1}):
        trajectory, _ = kit.train(kit.config(**fields), gradients, [gradients] * 3)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(trajectory[-1])), fields


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_a_side_without_a_divisor_is_no_blocks(kit, name):
    odd = {"mlp": {"kernel": np.zeros((16, 31), np.float32)}}
    config = kit.config(name=name, matrix_block=30)
    with pytest.raises(ConfigError, match="config.optim.matrix_block = 30: a side of 31"):
        kit.make(config, odd)[0].init(odd)


@pytest.mark.parametrize("name", ["muon", "adamuon"])
def test_ten_steps_are_those_of_timm(vit, trained, name, monkeypatch):
    """Their matrices are (outputs, inputs); in float64, where they would round to bfloat16."""
    torch = pytest.importorskip("torch")
    timm_muon = without_torchvision.imported("timm.optim.muon")
    iterate = functools.partial(timm_muon.zeropower_via_newtonschulz, dtype=torch.float64)
    monkeypatch.setattr(timm_muon, "zeropower_via_newtonschulz", iterate)
    params, gradients = drawn(vit[1], 0), [drawn(vit[1], seed + 1) for seed in range(STEPS)]
    trajectory = trained(name=name, weight_decay=0.1, **COMMON)

    def transposed(tree):
        return [torch.tensor(m.T) for n, k in kernels(tree).items() for m in separate(n, k)]

    theirs = [torch.nn.Parameter(p) for p in transposed(params)]
    optimizer = timm_muon.Muon(
        theirs, lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True, algo=name, betas=(0.9, 0.95),
        ns_coefficients="polar_express", safety_factor=1.01, eps=1e-8,
    )  # fmt: skip
    for gradient in gradients:
        for p, g in zip(theirs, transposed(gradient), strict=True):
            p.grad = g
        optimizer.step()
    starts, ends = transposed(params), transposed(trajectory[-1])
    for start, p, ours in zip(starts, theirs, ends, strict=True):
        assert_moved_alike(ours, p.detach(), start)


def test_ten_steps_are_those_of_optax(kit, vit):
    """Its momentum with Nesterov's step is corrected for its bias, ours and timm's is not: without."""
    config = kit.config(
        name="muon", polynomial="jordan", nesterov=False, weight_decay=0.1, **COMMON
    )
    params, gradients = drawn(vit[1], 0), [drawn(vit[1], seed + 1) for seed in range(STEPS)]
    trajectory, _ = kit.train(config, params, gradients)
    found = matrices.find(config, params, vit[0].inputs)

    def numbers(tree):
        return patterns.map_named(
            lambda name, _: (
                optax.contrib.MuonDimensionNumbers(
                    found.inner_axes(name, "i"), found.inner_axes(name, "o")
                )
                if name in found.roles
                else None
            ),
            tree,
        )

    optimizer = optax.contrib.muon(
        0.05, weight_decay=0.1, nesterov=False, consistent_rms=0.2, eps=0.0,
        muon_weight_dimension_numbers=numbers(params),
    )  # fmt: skip
    theirs, state = params, jax.jit(optimizer.init)(params)

    @jax.jit
    def step(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        theirs, state = step(gradient, state, theirs)
    for name, expected in kernels(theirs).items():
        np.testing.assert_allclose(
            kernels(trajectory[-1])[name], expected, rtol=0, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_matrix_is_adamws(vit, trained, name):
    params = drawn(vit[1], 0)
    ours, adamw = trained(name=name, **COMMON)[:2], trained(name="adamw", lr=0.05)[:2]
    same = {
        name
        for name, x in patterns.named(ours[-1]).items()
        if np.array_equal(x, patterns.named(adamw[-1])[name])
    }
    assert same == set(patterns.names(params)) - set(kernels(params))


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 16, 64), (2, 17, 30)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_singular_values_become_about_one(shape, dtype):
    """Also of ill-conditioned matrices, wide ones by their Gram matrix, in bfloat16."""
    random = np.random.default_rng(0)
    u, _, vt = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
    x = (u * np.geomspace(1, 1e-2, shape[1])) @ vt
    y = orthogonalize(jnp.asarray(x, dtype), "polar_express")
    values = np.linalg.svd(np.asarray(y), compute_uv=False)
    assert values.min() > 0.7 and values.max() < 1.3, values


@pytest.mark.parametrize("polynomial", newton_schulz.POLYNOMIALS)
@pytest.mark.parametrize("shape", [(11, 64), (8, 128), (16, 32), (16, 16)])
def test_no_singular_value_grows_in_bfloat16_whatever_the_others_are(shape, polynomial):
    """A few large ones beside some equal smaller ones, as gradients of a head have; one step that took its Gram matrix
    from the step before gave values of 10⁵ here.
    """
    random, (m, n), count = np.random.default_rng(0), shape, 200
    u, _ = np.linalg.qr(random.standard_normal((count, m, m)))
    v, _ = np.linalg.qr(random.standard_normal((count, n, m)))
    large = np.arange(m) < random.integers(1, m, (count, 1))
    values = np.where(large, 1.0, random.uniform(0, 1, (count, 1)))
    x = (u * values[:, None]) @ v.mT
    y = orthogonalize(jnp.asarray(x, jnp.bfloat16), polynomial)
    assert np.linalg.norm(np.asarray(y), 2, axis=(1, 2)).max() < 1.3


def test_the_count_of_operations_is_that_of_the_program():
    from vit_jax.compute import flops

    for m, n in ((16, 16), (16, 24), (16, 25), (16, 64)):
        x = jax.ShapeDtypeStruct((3, m, n), jnp.float32)
        program = jax.make_jaxpr(lambda x: newton_schulz.orthogonalize(x, "jordan"))(x)
        direct = 5 * (4 * m * m * n + 2 * m**3)
        assert flops.count(program) == 3 * min(direct, 16 * m * m * n + 16 * m**3)


@pytest.mark.parametrize("name", FORMULAS)
def test_patch_embeddings_move_as_fast_as_other_matrices(kit, vit, name):
    """A convolution's update has the root mean square of AdamW's too: timm's AdaMuon once took a step that
    was smaller by the root of its pixels.
    """
    config = kit.config(name=name, matrices=(".*kernel",), **COMMON | {"lr": 1.0})
    params, gradient = drawn(vit[1], 0), drawn(vit[1], 1)
    after = jax.device_get(kit.train(config, params, [gradient])[0][0])
    moved = jax.tree.map(lambda a, b: np.sqrt(np.mean((a - b) ** 2)), after, params)
    moved = {n: x for n, x in patterns.named(moved).items() if n.endswith("kernel")}
    assert set(moved) == {*kernels(params), "embedding/kernel", "head/kernel"}
    # The norm is a sum of equal squares, thousands of them, which all round alike.
    for kernel, rms in moved.items():
        assert rms == pytest.approx(0.2, rel=1e-4 if name != "muon" else 0.1), kernel


def test_shared_options_hold_for_matrices_too(kit, vit):
    """Layer decay, rules, freezing and the type of the momentum."""
    params, gradients = drawn(vit[1], 0), [drawn(vit[1], 1), drawn(vit[1], 2)]
    plain, _ = kit.train(kit.config(name="muon", **COMMON), params, gradients)
    config = kit.config(
        name="muon", layer_decay=0.5, lr_rules=((".*mlp/up/kernel", 3.0),), moment_dtype="bfloat16",
        freeze=(".*mlp/down/kernel", ".*qkv/.*"), **COMMON,
    )  # fmt: skip
    trajectory, state = kit.train(config, params, gradients)
    start, usual, ours = (kernels(tree) for tree in (params, plain[0], trajectory[0]))
    layers = np.array([0.25, 0.5])
    for name, p in start.items():
        factor = layers * {"up": 3.0, "out": 1.0}.get(name.split("/")[-2], 0.0)
        factor = factor.reshape(-1, *[1] * (p.ndim - 1))
        np.testing.assert_allclose(ours[name] - p, factor * (usual[name] - p), atol=1e-6)
    kept = {x.dtype for n, x in patterns.named(state).items() if n.endswith("mlp/up/kernel")}
    assert kept == {jnp.dtype("bfloat16")}
    assert not any("mlp/down/kernel" in name for name in patterns.names(state))


def test_every_family_has_its_matrices(kit):
    """By name and shape, of all families; none is an embedding or a classifier."""
    for family in registry.families():
        size = 240 if "CrossViT" in family.VARIANTS[0] else 224
        config = registry.model_config(family.VARIANTS[0], image_size=size, num_classes=10)
        params = registry.abstract_weights(config)[1].params
        found = matrices.find(kit.config(name="muon"), params, config.inputs)
        assert any("layers" in name for name in found.roles), family
        for name in found.roles:
            assert not re.search(r"embedding|head/|position|token/|root/", name), name


def test_a_view_has_the_matrices_as_they_are_multiplied_with(kit, vit):
    """Rows are inputs; of layers that have more inputs than outputs it is transposed."""
    found = matrices.find(kit.config(name="muon"), vit[1], vit[0].inputs)
    for name, kernel in kernels(drawn(vit[1], 0)).items():
        view = np.asarray(found.view(name, jnp.asarray(kernel)))
        expected = np.stack(list(separate(name, kernel))).astype(np.float32)
        transposed = expected.shape[1] > expected.shape[2]
        np.testing.assert_array_equal(view.swapaxes(1, 2) if transposed else view, expected)
        np.testing.assert_array_equal(found.restore(name, jnp.asarray(view)), kernel)


def test_heads_can_be_matrices_of_their_own(kit, vit):
    found = matrices.find(kit.config(name="muon", per_head=True), vit[1], vit[0].inputs)
    counts = {name.split("/")[-2]: (found.count(name), found.size(name)) for name in found.roles}
    assert counts["qkv"] == (2 * 3 * 3, (24, 8)) and counts["out"] == (2 * 3, (8, 24))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"freeze": (".*layers/.*",)}, "config.optim.freeze freezes all"),
        ({"matrices": (".*scale",)}, r"config.optim.matrices: .*scale .* has no rows and columns"),
        ({"matrices": ("no_such",)}, "config.optim.matrices: the pattern 'no_such'"),
        ({"name": "muom"}, "config.optim.name = 'muom' is not an optimizer; did you mean 'muon'"),
    ],
)
def test_a_wrong_choice_of_matrices_is_refused(kit, vit, fields, match):
    config = kit.config(**{"name": "muon"} | fields)
    with pytest.raises(ConfigError, match=match):
        kit.make(config, vit[1])


def test_models_without_matrices_are_refused(kit):
    thin = {"mlp": {"kernel": np.zeros((3, 64), np.float32)}}
    with pytest.raises(ConfigError, match="config.optim.name='muon' is for matrices"):
        kit.make(kit.config(name="muon"), thin)
    with pytest.raises(ConfigError, match="mlp/kernel .* a side of 3, below 4"):
        kit.make(kit.config(name="muon", matrices=("mlp/kernel",)), thin)


def test_a_new_preconditioner_is_a_function_and_a_line(kit, vit, monkeypatch):
    """The sign of the momentum, on matrices alone."""

    def signs(config, matrices):
        return optax.stateless(lambda us, _: jax.tree.map(jnp.sign, us))

    monkeypatch.setitem(preconditioners.PRECONDITIONERS, "signs", None)  # and removes it afterwards
    preconditioners.register("signs", signs)
    params, gradient = drawn(vit[1], 0), drawn(vit[1], 1)
    (after,), _ = kit.train(kit.config(name="signs", lr=1.0), params, [gradient])
    for name, p in kernels(params).items():
        moved = p - kernels(after)[name]
        np.testing.assert_allclose(moved, np.sign(kernels(gradient)[name]), atol=1e-6)


@pytest.mark.parametrize(("name", "decomposition"), [("shampoo", "eigh"), ("soap", "qr")])
def test_steps_between_refreshes_decompose_nothing(kit, vit, name, decomposition):
    """The decomposition is in a branch of the one program, and nowhere else."""
    from vit_jax.compute import flops

    optimizer, _ = kit.make(kit.config(name=name), vit[1])
    state = jax.eval_shape(optimizer.init, vit[1])
    update = jax.make_jaxpr(optimizer.update)(vit[1], state, vit[1])
    equations = list(flops.equations(update))

    def count(some):
        return sum(equation.primitive.name == decomposition for equation in some)

    branches = [e.params["branches"] for e in equations if e.primitive.name == "cond"]
    stay, refresh = (
        sum(count(flops.equations(branch[which])) for branch in branches) for which in (0, 1)
    )
    assert stay == 0 and count(equations) == refresh == 4  # two stacks of two sides
    # Several stacks at the same time would wait for each other forever on a CPU.
    found = [e for e in equations if e.primitive.name == decomposition]
    assert {e.invars[0].aval.ndim for e in found} == {2}


@pytest.mark.parametrize("name", NAMES)
def test_first_moments_are_kept_in_their_type(kit, vit, name):
    """One number for each of the parameters, and nothing else."""
    optimizer, _ = kit.make(kit.config(name=name, moment_dtype="bfloat16"), vit[1])
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, vit[1]))
    small = sum(x.size for x in state if x.dtype == jnp.bfloat16)
    assert small == sum(x.size for x in jax.tree.leaves(vit[1]))
    update = jax.eval_shape(
        optimizer.update, vit[1], jax.eval_shape(optimizer.init, vit[1]), vit[1]
    )
    assert [x.dtype for x in jax.tree.leaves(update[1])] == [x.dtype for x in state]
