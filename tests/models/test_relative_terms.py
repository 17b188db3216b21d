"""Positions of Transformer-XL and DeBERTa, positions of centres, and norms of sums, against NumPy in float64 and
transformers' modules with the same weights.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.lazily import Package
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats
from vit_jax.interchange.conversions import vit_flax
from vit_jax.models import registry
from vit_jax.models.contract import PatchBatch
from vit_jax.models.positions import of
from vit_jax.models.zoo import vit_zoo, vit_zoo_blocks

torch, transformers = Package("torch"), Package("transformers")
WIDTH, HEADS, SIZE, PATCHES = 16, 2, 8, 6


def drawn(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention(kind):
    """An attention with arrays of unit size, in place of those that it begins with."""
    module = vit_zoo_blocks.ATTENTION[kind](
        WIDTH,
        HEADS,
        norm=None,
        out_bias=False,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    definition, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(state))
    arrays = [0.3 * drawn(x.shape, i) for i, x in enumerate(leaves)]
    params = jax.tree.unflatten(tree, arrays)
    return definition, params


def positions(kind):
    """What attention takes for them."""
    config = vit_zoo.Config(
        (8, 12), patch=4, depth=1, width=WIDTH, mlp_dim=16, heads=HEADS, position=kind
    )
    shape = {"transformer_xl": (2, HEADS, SIZE), "deberta": (2 * PATCHES - 1, WIDTH)}[kind]
    return of(config).in_logits(drawn(shape, 7))


def logits_by_loops(kind, params, x, bias, others):
    """By the equations of the papers, in float64."""
    exact = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float64), tree)  # noqa: E731
    params, bias = exact(params), exact(bias)
    kernel, added = params["qkv"]["kernel"], params["qkv"]["bias"]
    q, k = (np.einsum("bnd,dhc->bnhc", x, kernel[:, i]) + added[i] for i in range(2))
    logits = np.zeros((len(x), HEADS, x.shape[1], x.shape[1]))
    u, v = bias[1] if kind == "transformer_xl" else np.zeros((2, HEADS, SIZE))
    for i, j in np.ndindex(logits.shape[2:]):
        term = np.einsum("bhc,bhc->bh", q[:, i] + u, k[:, j])
        if min(i, j) >= others:

            def of(name, distance):
                if kind == "transformer_xl":
                    angles = distance / 10_000 ** (np.arange(0, WIDTH, 2) / WIDTH)
                    embedding = np.concatenate([np.sin(angles), np.cos(angles)])
                else:
                    embedding = bias[distance + PATCHES - 1]
                return np.einsum("d,dhc->hc", embedding, params[name]["kernel"])

            term += np.einsum("bhc,hc->bh", q[:, i] + v, of("distance_keys", i - j))
            if kind == "deberta":
                term += np.einsum("bhc,hc->bh", k[:, j], of("distance_queries", j - i))
        logits[:, :, i, j] = term
    return logits / math.sqrt(SIZE * (3 if kind == "deberta" else 1))


@pytest.mark.parametrize("kind", ["transformer_xl", "deberta"])
def test_terms_of_distances_are_those_of_the_equations(kind):
    """With two tokens that are no patches, first; and 16 bits within what they round."""
    (definition, params), bias = attention(kind), positions(kind)
    x = drawn((2, 2 + PATCHES, WIDTH), 3)
    logits = logits_by_loops(kind, params, np.asarray(x, np.float64), bias, others=2)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    @jax.jit
    def weights(params, x, bias):
        module = nnx.merge(definition, params)
        exact = module(x, bias=bias)[1]
        module.dtype = jnp.bfloat16
        return exact, module(x, bias=bias)[1].astype(jnp.float32)

    exact, rounded = weights(params, x, bias)
    np.testing.assert_allclose(exact, expected, atol=1e-6)
    np.testing.assert_allclose(rounded, expected, atol=0.03)


def outputs_and_gradients(kind, x, target):
    (definition, params), bias = attention(kind), positions(kind)

    def total(params, bias, x):
        y = nnx.merge(definition, params)(x, bias=bias)[0]
        return jnp.vdot(y, target), y

    compute = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, y), gradients = compute(params, bias, x)
    return params, bias, y, gradients


def in_torch(x):
    return torch.from_numpy(np.array(x, np.float64)).requires_grad_()


def test_terms_of_deberta_and_their_gradients_are_those_of_transformers():
    """Its terms for keys read the embedding of i - j where the paper has j - i, so they get the embeddings reversed."""
    x, target = drawn((2, PATCHES, WIDTH), 3), drawn((2, PATCHES, WIDTH), 4)
    params, bias, y, gradients = outputs_and_gradients("deberta", x, target)
    modeling = transformers.models.deberta_v2.modeling_deberta_v2
    tensors = {name: in_torch(leaf) for name, leaf in patterns.named(params).items()}
    table, tokens = in_torch(bias), in_torch(x)

    def part(kinds):
        config = transformers.DebertaV2Config(
            hidden_size=WIDTH, num_attention_heads=HEADS, relative_attention=True, pos_att_type=kinds,
            max_relative_positions=PATCHES, hidden_dropout_prob=0.0,
        )  # fmt: skip
        return modeling.DisentangledSelfAttention(config).double()

    def projected(module, name, kernel):
        linear = getattr(module, name)
        del linear.weight
        linear.weight = kernel.reshape(WIDTH, -1).T
        torch.nn.init.zeros_(linear.bias)

    heads = [
        torch.einsum("bnd,dhc->bhnc", tokens, tensors["qkv/kernel"][:, i])
        + tensors["qkv/bias"][i][:, None]
        for i in range(3)
    ]
    q, k, v = (h.reshape(-1, PATCHES, SIZE) for h in heads)
    logits = q @ k.transpose(1, 2) / math.sqrt(3 * SIZE)
    first = torch.zeros(1, WIDTH, dtype=torch.float64)
    for kinds, name, at, rows in (
        (["c2p"], "pos_key_proj", "distance_keys/kernel", table),
        (["p2c"], "pos_query_proj", "distance_queries/kernel", table.flip(0)),
    ):
        module = part(kinds)
        projected(module, name, tensors[at])
        rows = torch.cat([first, rows])
        logits = logits + module.disentangled_attention_bias(q, k, None, rows, scale_factor=3)
    out = (torch.softmax(logits, -1) @ v).reshape(heads[0].shape)
    out = torch.einsum("bhnc,hcd->bnd", out, tensors["out/kernel"])
    np.testing.assert_allclose(y, out.detach().numpy(), atol=2e-6)
    (out * torch.from_numpy(np.array(target, np.float64))).sum().backward()
    of_params, of_table, of_tokens = gradients
    np.testing.assert_allclose(of_table, table.grad.numpy(), atol=1e-5)
    np.testing.assert_allclose(of_tokens, tokens.grad.numpy(), atol=1e-5)
    for name, gradient in patterns.named(of_params).items():
        np.testing.assert_allclose(gradient, tensors[name].grad.numpy(), atol=1e-5, err_msg=name)


def test_terms_of_transformer_xl_and_their_gradients_are_those_of_xlnet():
    """XLNet's code computes both directions; its axes are tokens, then images."""
    x, target = drawn((2, PATCHES, WIDTH), 3), drawn((2, PATCHES, WIDTH), 4)
    params, (_, bias), y, gradients = outputs_and_gradients("transformer_xl", x, target)
    config = transformers.XLNetConfig(
        d_model=WIDTH, n_head=HEADS, d_inner=16, n_layer=1, dropout=0.0, vocab_size=4
    )
    modeling = transformers.models.xlnet.modeling_xlnet
    theirs = modeling.XLNetRelativeAttention(config).double()
    model = transformers.XLNetModel(config)
    distances = model.relative_positional_encoding(PATCHES, PATCHES, bsz=2).double()
    tensors = {name: in_torch(leaf) for name, leaf in patterns.named(params).items()}
    shifts, tokens = in_torch(bias), in_torch(x)
    del theirs.r_w_bias, theirs.r_r_bias
    theirs.r_w_bias, theirs.r_r_bias = shifts
    q, k, v = (
        torch.einsum("bnd,dhc->nbhc", tokens, tensors["qkv/kernel"][:, i]) + tensors["qkv/bias"][i]
        for i in range(3)
    )
    r = torch.einsum("sbd,dhc->sbhc", distances, tensors["distance_keys/kernel"])
    out = theirs.rel_attn_core(q, k, v, r)
    out = torch.einsum("nbhc,hcd->bnd", out, tensors["out/kernel"])
    np.testing.assert_allclose(y, out.detach().numpy(), atol=2e-6)
    (out * torch.from_numpy(np.array(target, np.float64))).sum().backward()
    of_params, (_, of_shifts), of_tokens = gradients
    np.testing.assert_allclose(of_shifts, shifts.grad.numpy(), atol=1e-5)
    np.testing.assert_allclose(of_tokens, tokens.grad.numpy(), atol=1e-5)
    for name, gradient in patterns.named(of_params).items():
        np.testing.assert_allclose(gradient, tensors[name].grad.numpy(), atol=1e-5, err_msg=name)


def test_a_vit_reads_them_in_each_layer_and_at_another_size(kit):
    """Embeddings of DeBERTa that all layers share, and vectors of Transformer-XL in each; a run goes on at another
    resolution, where the latter have nothing to resize.
    """
    shapes = {"deberta": {"position": (11, 16)}, "transformer_xl": {}}
    shapes["transformer_xl"] = {"encoder/layers/position": (2, 2, 2, 8)}
    for kind, expected in shapes.items():
        config = kit.config(image_size=(8, 12), depth=2, remat="none", position=kind)
        abstract = patterns.named(registry.abstract(config)[1])
        found = {name: x.shape for name, x in abstract.items() if "position" in name}
        assert found == expected
        target = dataclasses.replace(config, image_size=(8, 16))
        name, shape = next(iter(expected.items()))
        step = config.fit_parameter(name, target, resize="bilinear")
        resized = {"deberta": (15, 16), "transformer_xl": None}[kind]
        assert (step and step[1](np.zeros(shape, np.float32)).shape) == resized
        plain = dataclasses.replace(config, position="none")
        products = {"transformer_xl": 1, "deberta": 2}[kind]
        tokens = config.tokens
        assert config.flops() - plain.flops() == 2 * products * 2 * tokens**2 * WIDTH
        with pytest.raises(ConfigError, match=f"position={kind} adds to the attention logits"):
            dataclasses.replace(config, attention="splash")


def module_of_centres(**options):
    config = vit_zoo.Config(
        (8, 12),
        patch=4,
        depth=1,
        width=WIDTH,
        mlp_dim=16,
        heads=2,
        position="coordinates",
        **options,
    )
    return config, of(config).variables(nnx.Rngs(0))


def test_positions_of_centres_are_an_mlp_of_their_fourier_features():
    """Against NumPy in float64; the features against Segment Anything's, whose sines come first."""
    config, module = module_of_centres()
    params = nnx.to_pure_dict(nnx.state(module))
    p = {name: np.asarray(x, np.float64) for name, x in patterns.named(params).items()}
    expected = [p["tokens"][0, 0]]
    for row, column in np.ndindex(2, 3):
        centre = np.array([(column + 0.5) / 3, (row + 0.5) / 2]) * 2 - 1
        angles = centre @ p["frequencies"]
        features = np.concatenate([np.cos(angles), np.sin(angles)]) / math.sqrt(WIDTH)
        hidden = features @ p["mlp/up/kernel"] + p["mlp/up/bias"]
        hidden = hidden / 2 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        expected.append(hidden @ p["mlp/down/kernel"] + p["mlp/down/bias"])
    np.testing.assert_allclose(module()[0], expected, atol=1e-6)
    np.testing.assert_allclose(of(config).as_learned(params)[0], expected, atol=1e-6)

    theirs = transformers.models.sam.modeling_sam.SamPositionalEmbedding(
        transformers.SamVisionConfig(num_pos_feats=WIDTH // 2)
    )
    frequencies = in_torch(params["frequencies"] / (2 * np.pi)).float()
    theirs.positional_embedding = torch.nn.Parameter(frequencies)
    centres = torch.tensor([[(c + 0.5) / 3, (r + 0.5) / 2] for r, c in np.ndindex(2, 3)])
    sines = theirs(centres).detach().numpy()
    module.mlp = lambda x: x
    features = module()[0, 1:] * math.sqrt(WIDTH)
    np.testing.assert_allclose(np.roll(features, WIDTH // 2, axis=1), sines, atol=1e-5)


def test_positions_of_centres_are_those_of_each_image_s_own_grid(kit):
    """Of images of their own sizes and of another resolution, with the same parameters; written as a table."""
    config, module = module_of_centres()
    grids = jnp.array([[2, 3], [3, 1], [1, 6]])
    native = PatchBatch(jnp.zeros((3, 6, 48)), grids)
    found = of(config).at(module, module()[:, 1:], native)
    for rows, columns, own in zip(*grids.T.tolist(), found, strict=True):
        other = dataclasses.replace(config, image_size=(rows * 4, columns * 4))
        alone = nnx.merge(nnx.split(of(other).variables(nnx.Rngs(0)))[0], nnx.state(module))
        np.testing.assert_allclose(own[: rows * columns], alone()[0, 1:], atol=1e-6)
        assert config.fit_parameter("position/frequencies", other, resize="bilinear") is None
    model = kit.config(image_size=(8, 12), position="coordinates")
    params = kit.parameters(model)
    as_table = vit_flax.with_learned_position(model, params)
    images = drawn((2, 8, 12, 3), 5)
    expected = kit.run(model, params, images).logits
    np.testing.assert_allclose(kit.run(*as_table, images).logits, expected, atol=1e-5)


def test_a_block_that_normalises_sums_is_that_of_bert():
    config = vit_zoo.Config(
        (8, 8), patch=4, depth=1, width=WIDTH, mlp_dim=32, heads=HEADS, activation="gelu",
        norm_residual=True, position="none",
    )  # fmt: skip
    block = vit_zoo_blocks.make_block(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    definition, state = nnx.split(block)
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(state))
    params = jax.tree.unflatten(tree, [0.3 * drawn(x.shape, i) for i, x in enumerate(leaves)])
    theirs = transformers.models.bert.modeling_bert.BertLayer(
        transformers.BertConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=32,
            layer_norm_eps=config.epsilon, attn_implementation="eager",
        )
    ).double().eval()  # fmt: skip
    p = patterns.named(params)
    weights = {}
    for i, name in enumerate(("query", "key", "value")):
        at = f"attention.self.{name}"
        weights[f"{at}.weight"] = p["attention/qkv/kernel"][:, i].reshape(WIDTH, WIDTH).T
        weights[f"{at}.bias"] = p["attention/qkv/bias"][i].reshape(-1)
    weights["attention.output.dense.weight"] = p["attention/out/kernel"].reshape(WIDTH, WIDTH).T
    weights["attention.output.dense.bias"] = p["attention/out/bias"]
    for ours, name in (("mlp/up", "intermediate"), ("mlp/down", "output")):
        weights[f"{name}.dense.weight"] = p[f"{ours}/kernel"].T
        weights[f"{name}.dense.bias"] = p[f"{ours}/bias"]
    for ours, name in (("attention_norm", "attention.output"), ("mlp_norm", "output")):
        weights[f"{name}.LayerNorm.weight"] = p[f"{ours}/scale"]
        weights[f"{name}.LayerNorm.bias"] = p[f"{ours}/bias"]
    theirs.load_state_dict({name: torch.tensor(x) for name, x in weights.items()})
    x = drawn((2, 5, WIDTH), 3)
    expected = theirs(torch.from_numpy(x).double())
    expected = expected[0] if isinstance(expected, tuple) else expected
    y = nnx.merge(definition, params)(x, 0.0, None)[0]
    np.testing.assert_allclose(y, expected.detach().numpy(), atol=1e-5)


def test_orders_of_a_block_exclude_each_other():
    with pytest.raises(ConfigError, match="model.parallel and model.norm_residual .* take one"):
        vit_zoo.Config(
            (8, 8), patch=4, depth=1, width=8, mlp_dim=8, heads=1, norm_residual=True, parallel=True
        )


@pytest.mark.parametrize("position", ["learned", "bias2d"])
def test_norms_of_sums_are_not_written_for_timm(kit, tmp_path, position):
    config = kit.config(norm_residual=True, activation="gelu", epsilon=1e-6, position=position)
    checkpoint = formats.LoadedCheckpoint(config, kit.parameters(config))
    with pytest.raises(CheckpointError, match="norm_residual=True"):
        formats.write_checkpoint(checkpoint, tmp_path / "a.safetensors", "timm")
    assert not list(tmp_path.iterdir())
