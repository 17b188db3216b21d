"""T2T-ViT against its authors' code, its formula in float64, and softmax attention."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx

import vit_jax
from tests.models import oracles
from tests.models.conftest import apply, parameters, run, statistics
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.compute import performer, windows
from vit_jax.interchange import checkpoint_file, formats, loading, safetensors
from vit_jax.models import registry
from vit_jax.models.embeddings import sinusoids
from vit_jax.models.zoo import t2t

# Trainable parameters and G multiply-adds with attention, facts §14.
COSTS = {
    "T2T-ViT-7": (4_255_694, 1.15),
    "T2T-ViT-10": (5_834_702, 1.52),
    "T2T-ViT-12": (6_887_374, 1.76),
    "T2T-ViT-14": (21_465_806, 4.78),
    "T2T-ViT-19": (39_085_070, 8.48),
    "T2T-ViT-24": (64_000_974, 13.66),
    "T2T-ViT_t-14": (21_465_422, 6.09),
    "T2T-ViT_t-19": (39_084_686, 9.78),
    "T2T-ViT_t-24": (64_000_590, 14.97),
}
ORACLES = ["t2t_performer_a", "t2t_performer_b", "t2t_transformer"]
KINDS = {"performer": "T2T-ViT-7", "full": "T2T-ViT_t-14"}
TINY = dict(
    image_size=(16, 24), token_width=8, random_features=4, depth=2, width=16, mlp_dim=32, heads=2,
    num_classes=5, remat="none", unroll=1,
)  # fmt: skip


def tiny(kind="performer", **options):
    return registry.model_config(KINDS[kind], **TINY | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def soft_split(x, size, stride, padding):
    """As PyTorch unfolds, but with a window's channels side by side."""
    x = np.pad(x, ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0)))
    cut = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    cut = cut[:, ::stride, ::stride].transpose(0, 1, 2, 4, 5, 3)
    return cut.reshape(*cut.shape[:3], -1)


def token_layer(p, x, split):
    """A layer between the splits: a map to a map (T2T §3.1; facts §14)."""
    x = soft_split(x, *split)
    b, h, w, inputs = x.shape
    y = oracles.layer_norm(p["attention_norm"], x.reshape(b, -1, inputs), 1e-5)
    qkv = p["attention"]["qkv"]
    q, k, v = np.einsum("bnd,dtoc->tbnc", y, qkv["kernel"])
    if "bias" in qkv:
        q, k, v = q + qkv["bias"][0], k + qkv["bias"][1], v + qkv["bias"][2]
    if "directions" in p["attention"]:
        weights = estimated_weights(q, k, p["attention"]["directions"])
    else:
        weights = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(inputs))
        weights = weights / weights.sum(-1, keepdims=True)
    out = p["attention"]["out"]
    x = v + weights @ v @ out["kernel"][0] + out["bias"]
    y = oracles.gelu(oracles.linear(p["mlp"]["up"], oracles.layer_norm(p["mlp_norm"], x, 1e-5)))
    return (x + oracles.linear(p["mlp"]["down"], y)).reshape(b, h, w, -1)


def estimated_weights(q, k, directions):
    """Of a Performer, from its definition: (B, Q, N)."""
    q, k = (
        np.exp(x @ directions.T - np.square(x).sum(-1, keepdims=True) / 2)
        / np.sqrt(len(directions))
        for x in (q, k)
    )
    products = q @ k.swapaxes(1, 2)
    return products / (products.sum(-1, keepdims=True) + 1e-8)


def forward(config, p, x):
    """Logits in float64."""
    for name, split in zip(("first", "second"), config.splits, strict=False):
        x = token_layer(p["embedding"][name], x, split)
    x = soft_split(x, *config.splits[2])
    x = oracles.linear(p["embedding"]["project"], x.reshape(len(x), -1, x.shape[-1]))
    x = np.concatenate([np.repeat(p["class_token"], len(x), 0), x], 1) + p["position"]
    for i in range(config.depth):
        block = oracles.layer(p["encoder"]["layers"], i)
        attention, y = block["attention"], oracles.layer_norm(block["attention_norm"], x, 1e-5)
        q, k, v = np.einsum("bnd,dthc->tbhnc", y, attention["qkv"]["kernel"])
        if config.qk_scale:
            q = q * config.qk_scale * np.sqrt(q.shape[-1])
        x = x + oracles.attended(attention, oracles.maps(q, k), v)
        y = oracles.layer_norm(block["mlp_norm"], x, 1e-5)
        y = oracles.gelu(oracles.linear(block["mlp"]["up"], y))
        x = x + oracles.linear(block["mlp"]["down"], y)
    return oracles.linear(p["head"], oracles.layer_norm(p["encoder"]["norm"], x, 1e-5)[:, 0])


@functools.cache
def arrays(kind):
    """Random parameters and state."""
    config = tiny(kind)
    return parameters(config), statistics(config)


@pytest.mark.parametrize("name", t2t.VARIANTS)
def test_parameters_and_multiply_adds_are_those_of_the_authors_code(name):
    config = registry.model_config(name)
    parameters, products = COSTS[name]
    assert registry.count_parameters(config) == parameters
    assert config.flops() / 2e9 == pytest.approx(products, abs=0.005)
    fixed = registry.abstract_weights(config)[1].variables
    sizes = dict(zip(patterns.names(fixed), map(np.size, jax.tree.leaves(fixed)), strict=True))
    assert sizes.pop("position") == 197 * config.width
    assert sum(sizes.values()) == (0 if "_t" in name else 4096)


@pytest.mark.parametrize("name", ORACLES)
def test_logits_and_tokens_are_those_of_the_authors_code(name, shared_data):
    path, tensors, answers, arguments = oracles.relative_of(shared_data, name)
    model = vit_jax.load(path, heads=arguments["num_heads"], qk_scale=0)
    config = model.config
    assert config.image_size == arguments["img_size"]
    assert config.token_width == arguments.get("token_dim", 64)
    np.testing.assert_array_equal(model.position[...], tensors["pos_embed"])

    @jax.jit
    def answer(x):
        first = model.embedding.first(x, None)
        return model(x), model.patches(x), first.reshape(len(x), -1, first.shape[-1])

    output, tokens, first = jax.device_get(answer(answers["images"]))
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    close(output.logits, answers["logits"])
    close(output.features, answers["features"])
    close(output.tokens[:1], answers["tokens"])
    close(tokens[:1], answers["t2t_tokens"])
    close(first[:1, :64], answers["first_t2t_layer"])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formula_and_gradients_its_slopes(kind):
    config = tiny(kind)
    params, variables = arrays(kind)
    x = images(config)
    weigh = np.sin(1.0 + np.arange(15)).reshape(3, 5)

    def loss(params):
        logits = apply(config, params, x).logits
        return jnp.sum(logits * weigh), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    exact = functools.partial(oracles.in_float64, variables=variables)
    expected = forward(config, exact(params), x)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

    gradients = dict(zip(patterns.names(gradient), jax.tree.leaves(gradient), strict=True))
    in_double = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    slopes = oracles.directional(lambda p: np.sum(forward(config, exact(p), x) * weigh), in_double)
    for name, direction, slope in slopes:
        found = np.sum(np.asarray(gradients[name], np.float64) * direction)
        scale = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        assert found == pytest.approx(slope, abs=1e-4 * scale + 1e-6), name


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(7, 4, 2), (14, 8, 3), (3, 2, 1), (3, 1, 1), (2, 2, 0)]
)
def test_a_soft_split_cuts_the_windows_that_unfolding_cuts(size, stride, padding):
    x = np.random.default_rng(0).normal(size=(2, 24, 17, 3)).astype(np.float32)
    found = windows.soft_split(x, size=size, stride=stride, padding=padding)
    np.testing.assert_array_equal(found, soft_split(x, size, stride, padding))


def test_performer_features_estimate_softmax_attention_better_the_more_there_are():
    q, k, v = np.random.default_rng(0).normal(0, 0.2, (3, 4, 32, 1, 16)).astype(np.float32)
    logits = np.einsum("bqhc,bnhc->bqn", q, k)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    exact = np.einsum("bqn,bnhc->bqhc", weights, v)

    @functools.partial(jax.jit, static_argnums=0)
    def estimates(count):
        keys = jax.random.split(jax.random.key(0), 4)
        draw = lambda key: performer.orthogonal_directions(key, count, 16)  # noqa: E731
        return jax.vmap(lambda key: performer.attend(q, k, v, draw(key)))(keys)

    counts = (16, 64, 256, 1024)
    errors = [np.linalg.norm(estimates(count) - exact) for count in counts]
    errors = np.array(errors) / np.linalg.norm(exact) / 2
    # As with independent draws: half of it with four times as many.
    np.testing.assert_allclose(errors[1:] / errors[:-1], 0.5, atol=0.15)
    assert errors[-1] < 0.1


@pytest.mark.parametrize("count", [4, 16, 64])
def test_directions_are_orthogonal_and_as_long_as_the_authors_code_has_them(count):
    w = np.asarray(performer.orthogonal_directions(jax.random.key(0), count, 16))
    smaller = w @ w.T if count < 16 else w.T @ w
    np.testing.assert_allclose(smaller, count * np.eye(min(count, 16)), atol=1e-4)


# Wide enough to measure.
WIDE = tiny(width=64, heads=4, token_width=32, num_classes=0)


@jax.jit
def new(key):
    return registry.split(registry.build(WIDE, rngs=nnx.Rngs(key)))[1]


@functools.cache
def drawn(seed):
    """New parameters and state."""
    return jax.device_get(new(jax.random.key(seed)))


def test_random_features_are_state_that_training_leaves_alone_and_another_seed_draws_anew():
    (params, variables), (_, others) = drawn(0), drawn(1)
    one, other = (w["embedding"]["first"]["attention"]["directions"] for w in (variables, others))
    assert np.abs(one - other).max() > 0.1
    assert not [name for name in patterns.names(params) if "directions" in name]

    @jax.jit
    def train(params, variables, x):
        model = nnx.merge(registry.abstract(WIDE)[0], params, variables)
        model(x, deterministic=False, rngs=nnx.Rngs(dropout=0))
        return registry.split(model)[1].variables

    jax.tree.map(np.testing.assert_array_equal, train(params, variables, images(WIDE)), variables)


def test_kernels_begin_with_the_deviation_of_the_authors_code():
    params, variables = drawn(0)
    named = dict(zip(patterns.names(params), jax.tree.leaves(params), strict=True))
    for name, kernel in named.items():
        if name.endswith("kernel"):
            assert np.std(kernel) == pytest.approx(0.02, rel=0.1), name
    assert np.std(named["class_token"]) == pytest.approx(0.02, rel=0.4)
    np.testing.assert_array_equal(variables["position"], sinusoids(*WIDE.table))


def test_dropout_between_the_splits_is_on_in_training_alone_and_full_attention_has_none():
    for kind, rate in (("performer", 0.1), ("full", 0.0)):
        config = tiny(kind)
        assert config.token_dropout == rate
        params, x = arrays(kind)[0], images(config)
        exact = run(config, params, x).logits
        drawn = run(config, params, x, jax.random.key(0)).logits
        assert (np.abs(drawn - exact).max() > 1e-3) == bool(rate)
    model = nnx.merge(registry.abstract(tiny())[0], *arrays("performer"))
    with pytest.raises(ValueError, match="needs rngs unless deterministic=True"):
        model(images(tiny()), deterministic=False)


@pytest.mark.parametrize(
    ("split", "grids"),
    {(7, 4, 2): (56, 28, 14), (11, 6, 5): (38, 19, 10), (14, 8, 3): (28, 14, 7)}.items(),
)
def test_the_first_split_chooses_the_grid(split, grids):
    config = registry.model_config("T2T-ViT-12", first_split=split)
    assert config.grids == tuple((n, n) for n in grids)
    assert config.tokens == grids[-1] ** 2 + 1
    # 588, 363 and 147 numbers go into the first layer (facts §13).
    like = registry.abstract(config)[1]["embedding"]["first"]["attention_norm"]["scale"]
    assert like.shape == (3 * split[0] ** 2,)


def test_sinusoids_are_those_of_their_definition():
    table = sinusoids(3, 6)[0]
    for row in range(3):
        for pair in range(3):
            angle = row / 10_000 ** (2 * pair / 6)
            expected = (np.sin(angle), np.cos(angle))
            np.testing.assert_allclose(table[row, 2 * pair : 2 * pair + 2], expected, atol=1e-7)


def written(config, path, kind="performer"):
    """`path`, with random weights and a table of positions that is no sinusoid."""
    params, variables = arrays(kind)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, variables=variables), path, "authors"
    )
    return path


def test_at_another_resolution_sinusoids_are_made_anew_and_learned_positions_interpolated(tmp_path):
    path = written(tiny(), tmp_path / "a.safetensors")
    table = arrays("performer")[1]["position"]
    np.testing.assert_array_equal(vit_jax.load(path).position[...], table)
    larger = vit_jax.load(path, image_size=(32, 48))
    assert larger.config.grid == (2, 3)
    np.testing.assert_array_equal(larger.position[...], sinusoids(1 + 2 * 3, 16))
    learned = vit_jax.load(path, position="learned", image_size=(32, 48))
    assert "position" in registry.split(learned)[1].params
    np.testing.assert_allclose(learned.position[0, 0], table[0, 0])
    assert np.abs(learned.position[...] - larger.position[...]).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_ours_is_read_again_bit_by_bit_and_computes_the_same(kind, tmp_path):
    path = written(tiny(kind), tmp_path / "a.safetensors", kind)
    checkpoint = formats.read_checkpoint(path)
    assert checkpoint.model_config == tiny(kind, remat="auto", unroll=-1)
    found = checkpoint.params, checkpoint.variables
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, arrays(kind))


def test_a_file_as_the_authors_script_saves_it_gives_the_average_that_they_evaluate(
    shared_data, tmp_path
):
    pytest.importorskip("torch")
    folder = shared_data / "oracle" / "relatives"
    path, answers = folder / "t2t_saved.pth.tar", np.load(folder / "t2t_saved.io.npz")
    model = vit_jax.load(path, heads=2, qk_scale=0)
    logits = jax.jit(lambda x: model(x).logits)(answers["images"])
    np.testing.assert_allclose(logits, answers["logits"], atol=1e-5)
    assert np.abs(logits - answers["logits_state_dict"]).max() > 1e-3

    loading.convert(path, tmp_path / "again.safetensors", "authors", heads=2, qk_scale=0)
    before = checkpoint_file.open_once(epath.Path(path)).tensors
    after = safetensors.read(tmp_path / "again.safetensors")[0]
    assert before.keys() == after.keys()
    for name in before:
        assert np.asarray(before[name]).tobytes() == np.asarray(after[name]).tobytes(), name
    assert (
        formats.read_checkpoint(path, heads=2, qk_scale=0).preprocessing.eval_resize == 71
    )  # 64 / 0.9


def test_logits_of_another_scale_are_those_of_the_formula_and_the_scale_is_asked_for(tmp_path):
    config = tiny(qk_scale=16**-0.5)  # 1/√width
    checkpoint = formats.read_checkpoint(written(config, tmp_path / "a.safetensors"))
    assert checkpoint.model_config.qk_scale == config.qk_scale
    params, variables = arrays("performer")
    x = images(config)
    expected = forward(config, oracles.in_float64(params, variables), x)
    assert np.abs(expected - forward(tiny(), oracles.in_float64(params, variables), x)).max() > 1e-3
    found = jax.jit(lambda x: apply(config, params, x).logits)(x)
    np.testing.assert_allclose(found, expected, atol=1e-5)

    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    np.savez(tmp_path / "b.npz", **tensors)  # without our header
    with pytest.raises(
        CheckpointError, match="(?s)qk_scale: 0 .*; 0.25, 1/√width.*--model=qk_scale="
    ):
        formats.read_checkpoint(tmp_path / "b.npz", heads=2, image_size=(16, 24))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("tokens_to_token.attention2.w"), r"attention2.w \(4, 8\): missing"),
        (lambda t: t.update({"extra": t["head.bias"]}), r"extra \(5,\): in the file, but not"),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"][:7]}),
            r"norm.weight: \(7,\) in the file, \(16,\) in the model",
        ),
        (
            lambda t: t.update({"tokens_to_token.attention1.norm1.weight": np.ones(50, "f4")}),
            "windows of 50 numbers are of none of the known sizes: 7x7, 11x11, 14x14",
        ),
    ],
    ids=["lacks", "exceeds", "shape", "windows"],
)
def test_a_file_that_lacks_or_exceeds_tensors_is_an_error_that_names_them(change, words, tmp_path):
    written(tiny(), tmp_path / "a.safetensors")
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    change(tensors)
    np.savez(tmp_path / "b.npz", **tensors)
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(tmp_path / "b.npz", heads=2, qk_scale=0, image_size=(16, 24))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pool": "mean"}, "reads a class token"),
        ({"position": "none"}, "has a table of positions"),
        ({"token_bias": False}, "performers have biases"),
        ({"activation": "gelu_tanh"}, "authors computes with activation = 'gelu'"),
        ({"registers": 2}, r"no place for these parameters:\n  registers"),
    ],
)
def test_what_the_authors_code_cannot_compute_is_not_written(options, words, tmp_path):
    config = tiny(**options)
    checkpoint = formats.LoadedCheckpoint(config, parameters(config), variables=statistics(config))
    with pytest.raises(CheckpointError, match=words):
        formats.write_checkpoint(checkpoint, tmp_path / "a.safetensors", "authors")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("T2T-ViT-13", {}, "there is no T2T-ViT of size '13'; did you mean '1"),
        ("T2T-ViT_t-12", {}, "there is no T2T-ViT_t of size '12'"),
        ("T2T-ViT-7", {"image_size": 226}, "on a side of 226: take 225 or 227"),
        ("T2T-ViT-7", {"image_size": (224, 230)}, "on a side of 230: take 229 or 231"),
        ("T2T-ViT-7", {"first_split": (3, 4, 0)}, "0 < stride <= side"),
        ("T2T-ViT-7", {"first_split": (3, 2)}, "model.first_split"),
        ("T2T-ViT-7", {"heads": 3}, "width 256 cannot be split into 3 heads"),
        ("T2T-ViT-7", {"patch": 16}, "has no option 'patch'"),
    ],
)
def test_what_is_no_t2t_vit_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        registry.model_config(name, **options)


def test_weights_for_other_channels_are_refused_in_a_sentence(tmp_path):
    path = written(tiny(), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="normalises the 3 channels of its windows together"):
        vit_jax.load(path, channels=1, init_channels="mean")


@pytest.mark.slow
def test_a_small_one_learns_digits_by_the_recipes_smoke_argument(command, tmp_path):
    code, *_ = command("train", "--config=configs/t2t_vit.py:smoke", f"--workdir={tmp_path}")
    assert code == 0
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/accuracy"] >= 0.95
