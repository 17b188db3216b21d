"""Masked autoencoders against the official code's answers, transformers, and NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import oracles
from tests.models.conftest import parameters
from tests.new_models import drawn
from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats
from vit_jax.models import positions, registry
from vit_jax.models.embeddings import cut_patches, sincos_2d
from vit_jax.objectives.contract import Learner, ObjectiveContext
from vit_jax.objectives.mae import Mae, MaeOptions


def made(model="ViT-mu/8", masked=0.75, normalize=True, decoder=None, **options):
    config = registry.model_config(
        model, **{"image_size": 32, "num_classes": 0, "position": "fixed2d"} | options
    )
    context = ObjectiveContext(config, (0.5,) * 3, (0.25,) * 3, 10, int)
    decoder = decoder or dict(width=16, depth=2, heads=2)
    return Mae(MaeOptions(masked, normalize, **decoder), context), config


def fixed(config):
    """What a model has besides parameters: its table of positions."""
    return jax.jit(lambda: registry.split(registry.build(config, rngs=nnx.Rngs(0)))[1].variables)()


def random_model(config):
    return nnx.merge(registry.abstract(config)[0], parameters(config), fixed(config))


def learner(objective, config):
    own = drawn(lambda: objective.make_modules(nnx.Rngs(1)))
    return Learner(random_model(config), own, None, 0)


def of_tensors(t, prefix, width, heads):
    """A stack of blocks and the norm after it, of MAE's tensors, as our nested dict."""
    depth = len({n.split(".")[1] for n in t if n.startswith(f"{prefix}blocks.")})

    def every(name, *shape):
        arrays = (t[f"{prefix}blocks.{i}.{name}"] for i in range(depth))
        return np.stack([a.T.reshape(shape) if shape else a for a in arrays])

    def affine(name, size):
        bias = every(f"{name}.bias")
        return {"kernel": every(f"{name}.weight", *size), "bias": bias}

    size = width // heads
    qkv = affine("attn.qkv", (width, 3, heads, size))
    qkv["bias"] = qkv["bias"].reshape(depth, 3, heads, size)
    norms = {
        ours: {"scale": every(f"{theirs}.weight"), "bias": every(f"{theirs}.bias")}
        for ours, theirs in (("attention_norm", "norm1"), ("mlp_norm", "norm2"))
    }
    hidden = t[f"{prefix}blocks.0.mlp.fc1.bias"].shape[0]
    layers = norms | {
        "attention": {"qkv": qkv, "out": affine("attn.proj", (heads, size, width))},
        "mlp": {
            "up": affine("mlp.fc1", (width, hidden)),
            "down": affine("mlp.fc2", (hidden, width)),
        },
    }
    norm = {"scale": t[f"{prefix}norm.weight"], "bias": t[f"{prefix}norm.bias"]}
    return {"layers": layers, "norm": norm}


def of_checkpoint(t, heads, decoder_heads):
    """MAE's tensors as our parameters: the model's, and the objective's."""
    width, decoder = len(t["norm.weight"]), len(t["decoder_norm.weight"])
    model = {
        "embedding": {
            "kernel": t["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
            "bias": t["patch_embed.proj.bias"],
        },
        "class_token": t["cls_token"],
        "encoder": of_tensors(t, "", width, heads),
    }
    own = {
        "embed": {"kernel": t["decoder_embed.weight"].T, "bias": t["decoder_embed.bias"]},
        "mask": t["mask_token"][0, 0],
        "decoder": of_tensors(t, "decoder_", decoder, decoder_heads),
        "head": {"kernel": t["decoder_pred.weight"].T, "bias": t["decoder_pred.bias"]},
    }
    return model, own


def loss_of(objective, config, noise):
    """A function of the parameters, of images, with the masks of this noise."""
    definition, weights = registry.abstract_weights(config)
    own_definition, _ = registry.split(nnx.eval_shape(lambda: objective.make_modules(nnx.Rngs(0))))
    variables = fixed(config)

    def loss(params, images):
        model, own = params
        parts = Learner(
            nnx.merge(definition, model, variables), nnx.merge(own_definition, own), None, 0
        )
        return objective.loss(parts, images, np.argsort(noise, axis=1), None).mean()

    return loss


@pytest.mark.parametrize("normalize", [False, True])
def test_loss_and_gradients_are_those_of_the_official_code(shared_data, normalize):
    tensors, io, said = oracles.answers_of(shared_data, "mae_p16")
    objective, config = made(
        "ViT-mu/16",
        normalize=normalize,
        image_size=said["img_size"],
        width=said["embed_dim"],
        depth=said["depth"],
        heads=said["num_heads"],
        mlp_dim=4 * said["embed_dim"],
        activation="gelu",
        decoder=dict(width=32, depth=2, heads=4),
    )
    np.testing.assert_allclose(fixed(config)["position"], tensors["pos_embed"], atol=1e-6)
    decoder = sincos_2d(config.grid, 32, periods=8)
    np.testing.assert_allclose(decoder, tensors["decoder_pos_embed"][:, 1:], atol=1e-6)
    params = of_checkpoint(tensors, said["num_heads"], 4)
    loss = loss_of(objective, config, np.asarray(io["noise"]))
    value, grads = jax.jit(jax.value_and_grad(loss))(params, jnp.asarray(io["images"]))
    expected = io["loss_norm_pix" if normalize else "loss"]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    if normalize:
        model, own = grads
        found = {
            "mask_token": own["mask"][None, None],
            "cls_token": model["class_token"],
            "decoder_embed.weight": own["embed"]["kernel"].T,
            "blocks.0.attn.qkv.weight": model["encoder"]["layers"]["attention"]["qkv"]["kernel"][0]
            .reshape(48, -1)
            .T,
            "decoder_pred.bias": own["head"]["bias"],
        }
        for name, gradient in found.items():
            exact = io[f"grad_norm_pix/{name}"]
            np.testing.assert_allclose(gradient, exact, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("normalize", [False, True])
def test_loss_is_that_of_transformers(normalize):
    torch = pytest.importorskip("torch")
    theirs = new_of_transformers(
        num_hidden_layers=2, mask_ratio=0.6, norm_pix_loss=normalize
    ).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    # The tables that Transformers 5 begins with are not those of the paper.
    for table in (theirs.vit.embeddings.position_embeddings, theirs.decoder.decoder_pos_embed):
        width = table.shape[-1]
        table.data[:, 1:] = torch.tensor(sincos_2d((4, 4), width, periods=width // 4))
    random = np.random.default_rng(0)
    images = random.normal(size=(3, 32, 32, 3)).astype(np.float32)
    noise = random.random((3, 16)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(images).permute(0, 3, 1, 2), noise=torch.tensor(noise)).loss
    objective, config = made(
        masked=0.6, normalize=normalize, width=24, depth=2, heads=2, mlp_dim=96, activation="gelu"
    )
    params = of_checkpoint(of_transformers(theirs), 2, 2)
    loss = jax.jit(loss_of(objective, config, noise))(params, images)
    np.testing.assert_allclose(loss, float(expected), rtol=1e-5)


def new_of_transformers(**options):
    """A small ViTMAEForPreTraining, random with seed 0, or a skipped test where transformers lacks."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(
        image_size=32, patch_size=8, hidden_size=24, num_attention_heads=2, intermediate_size=96,
        decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, layer_norm_eps=1e-6, **options,
    ))  # fmt: skip


def of_transformers(model):
    """The tensors of transformers' model by MAE's names."""
    tensors = {name: p.detach().numpy() for name, p in model.named_parameters()}
    names = (
        ("vit.embeddings.patch_embeddings.projection", "patch_embed.proj"),
        ("vit.embeddings.", ""), ("vit.layernorm", "norm"), ("vit.layers", "blocks"),
        ("decoder.decoder_layers", "decoder_blocks"), ("decoder.", ""), ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"), ("attention.o_proj", "attn.proj"),
    )  # fmt: skip
    found = {}
    for name, value in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            value = np.concatenate([tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
            name = name.replace("attention.q_proj", "attn.qkv")
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        found[name] = value
    return found


def test_parameters_and_operations_are_those_of_the_paper():
    sizes = {
        "ViT-B/16": (85_647_360, 26_008_320, 0.56),
        "ViT-L/16": (303_099_904, 26_139_392, 0.34),
        "ViT-H/14": (630_435_840, 26_178_124, 0.29),
    }
    for name, (encoder, decoder, share) in sizes.items():
        objective, config = made(name, image_size=224, decoder=dict(width=512, depth=8, heads=16))
        assert registry.count_parameters(config) == encoder
        own = nnx.eval_shape(lambda objective=objective: objective.make_modules(nnx.Rngs(0)))
        leaves = jax.tree.leaves(nnx.state(own, nnx.Param))
        assert sum(leaf.size for leaf in leaves) == decoder
        assert objective.flops() / config.flops() == pytest.approx(share, abs=0.005)


def test_the_encoder_sees_nothing_of_the_removed_patches():
    objective, config = made()
    parts = learner(objective, config)
    images = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    order = jnp.argsort(jax.random.uniform(jax.random.key(1), (2, 16)), axis=1)
    cut = np.array(cut_patches(images, (4, 4)))
    np.put_along_axis(cut, np.asarray(order)[:, 4:, None], 7.0, axis=1)
    changed = cut.reshape(2, 4, 4, 8, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(images.shape)
    predict = jax.jit(lambda x: objective.predict(parts, x, order, None))
    predicted = [predict(jnp.asarray(x)) for x in (images, changed)]
    np.testing.assert_array_equal(*predicted)
    assert predicted[0].shape == (2, 12, 8 * 8 * 3)


def test_layers_around_the_decoder_begin_as_the_authors_code_draws_them():
    objective, _ = made()

    @jax.jit
    def kernels():
        own = objective.make_modules(nnx.Rngs(0))
        return own.embed.kernel[...], own.head.kernel[...]

    for kernel in kernels():
        bound = (6 / sum(kernel.shape)) ** 0.5  # Xavier-uniform
        assert 0.97 * bound < np.abs(kernel).max() <= bound


@pytest.mark.parametrize("options", [{}, {"pool": "mean", "registers": 2, "position": "learned"}])
def test_every_parameter_learns(options):
    objective, config = made(**options)
    parts = learner(objective, config)
    (definition, weights), (own_definition, own) = map(registry.split, (parts.model, parts.modules))
    images = jax.random.normal(jax.random.key(0), (4, 32, 32, 3))

    def loss(params):
        model = nnx.merge(definition, params["model"], weights.variables)
        learner = Learner(model, nnx.merge(own_definition, params["own"]), None, 0)
        return objective(learner, {"image": images}, nnx.Rngs(dropout=0))[0].mean()

    grads = jax.jit(jax.grad(loss))({"model": weights.params, "own": own.params})
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masked": 0.99}, "leaves 0 to see and 16 to predict"),
        ({"masked": 0.001, "image_size": 8}, "leaves 0 to see"),
        ({"decoder": dict(width=18, heads=2)}, "must be divisible by 4"),
        ({"decoder": dict(width=16, heads=3)}, "config.objective.heads = 3"),
        ({"position": "relative"}, "needs model.position_at=stem"),
    ],
)
def test_what_leaves_nothing_to_see_or_predict_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_only_plain_vits_can_learn_so():
    objective, _ = made()
    model = registry.model_config("R26+ViT-S/32", image_size=32)
    with pytest.raises(ConfigError, match="needs a ViT or a DeiT"):
        Mae(objective.options, dataclasses.replace(objective.context, model=model))


def test_its_positions_become_a_learned_table_elsewhere(tmp_path):
    _, config = made(num_classes=3, activation="gelu")
    model = random_model(config)
    _, weights = registry.split(model)
    images = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    written = formats.LoadedCheckpoint(config, weights.params, variables=weights.variables)
    formats.write_checkpoint(written, tmp_path / "mae.safetensors", "timm")
    found = formats.read_checkpoint(tmp_path / "mae.safetensors")
    assert found.model_config == dataclasses.replace(config, position="learned")
    definition, _ = registry.abstract_weights(found.model_config)
    again = nnx.merge(definition, jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, found.params)))
    tokens = nnx.jit(lambda model: model(images).tokens)
    np.testing.assert_allclose(tokens(again), tokens(model), atol=1e-6)
    # Fine-tuned, it may be trained, at another resolution too; not the other way round.
    larger = dataclasses.replace(found.model_config, image_size=48)
    words, resize = positions.fit_parameter("position", config, larger, "bilinear")
    assert words == "bilinear" and resize(np.asarray(model.position[...])).shape == (1, 37, 32)
    with pytest.raises(ConfigError, match="positions learned at stem in the checkpoint, fixed2d"):
        positions.fit_parameter("position", found.model_config, config, "bilinear")
