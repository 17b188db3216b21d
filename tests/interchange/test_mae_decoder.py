"""The decoder of a masked autoencoder, read and written as MAE's authors and transformers have it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import oracles
from tests.objectives.test_mae import made, new_of_transformers, of_checkpoint, of_transformers
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.checkpoints import descriptions, saving
from vit_jax.interchange import formats, loading, saved_objectives
from vit_jax.interchange.conversions import mae, translation
from vit_jax.models import registry
from vit_jax.models.embeddings import sincos_2d
from vit_jax.objectives.mae import Mae, MaeOptions, decoder_of
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.initial_weights import module_weights, read_checkpoint, start_from


def of_file(path, objective, **hints):
    """The decoder that a file holds, read with the number of heads that it does not tell."""
    checkpoint = formats.read_checkpoint(path, hints=hints)
    found = saved_objectives.find_saved(checkpoint, Mae, {"heads": objective.options.heads})
    return found and found.read().params


def test_the_decoder_is_read_from_a_file_of_the_authors(shared_data, tmp_path):
    path, tensors, _, said = oracles.relative_of(shared_data, "mae_p16")
    sizes = {"width": 32, "depth": 2, "heads": 4}
    encoder = dict(
        image_size=said["img_size"], width=said["embed_dim"], depth=said["depth"], heads=said["num_heads"],
        mlp_dim=4 * said["embed_dim"], activation="gelu",
    )  # fmt: skip
    objective, config = made("ViT-mu/16", decoder=sizes, **encoder)
    found = of_file(path, objective, **vars(config))
    _, expected = of_checkpoint(tensors, said["num_heads"], 4)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # And written again under the same names.
    theirs = dict(translation.to_theirs(mae.rules_of(objective.decoder, "timm"), found))
    for name, array in theirs.items():
        np.testing.assert_array_equal(array, tensors[name])
    assert {n for n in tensors if n.startswith(("decoder", "mask"))} == {
        *theirs,
        "decoder_pos_embed",
    }
    # One of another size, or with other positions, begins anew.
    other, _ = made("ViT-mu/16", decoder=sizes | {"depth": 1}, **encoder)
    new = registry.split(other.make_modules(nnx.Rngs(0)))[1].params
    checkpoint = formats.read_checkpoint(path, hints=vars(config))
    saved = saved_objectives.find_saved(checkpoint, Mae, {"heads": 4})
    taken, reset = other.continue_from(saved, registry.Weights(new, {}))
    assert not taken and {*reset} == {*patterns.names(new)}
    assert "the decoder has another size" in reset["embed/kernel"]
    np.savez(
        tmp_path / "moved.npz", **tensors | {"decoder_pos_embed": tensors["decoder_pos_embed"] + 1}
    )
    assert of_file(tmp_path / "moved.npz", objective, **vars(config)) is None


def test_the_decoder_is_read_from_a_folder_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    theirs = new_of_transformers(num_hidden_layers=1)
    table = theirs.decoder.decoder_pos_embed
    table.data[:, 1:] = torch.tensor(sincos_2d((4, 4), 16, periods=4))
    theirs.save_pretrained(tmp_path)
    objective, config = made(width=24, depth=1, heads=2, mlp_dim=96, activation="gelu")
    found = of_file(tmp_path, objective, **vars(config))
    _, expected = of_checkpoint(of_transformers(theirs), 2, 2)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_transformers_has_the_authors_loss_of_a_file_of_theirs(shared_data, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path, _, io, said = oracles.relative_of(shared_data, "mae_p16")
    checkpoint = formats.read_checkpoint(path, hints={"heads": said["num_heads"]})
    checkpoint.layout[mae.LAYOUT] = {"heads": 4}  # which nothing tells
    formats.write_checkpoint(checkpoint, tmp_path / "mae", "huggingface")
    theirs = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path / "mae").eval()
    images = torch.tensor(io["images"]).permute(0, 3, 1, 2)
    for normalize, name in ((False, "loss"), (True, "loss_norm_pix")):
        theirs.config.norm_pix_loss = normalize
        with torch.no_grad():
            found = theirs(images, noise=torch.tensor(io["noise"])).loss
        np.testing.assert_allclose(float(found), io[name], rtol=1e-5)


def test_a_run_goes_on_with_encoder_and_decoder_of_a_file(shared_data):
    path, tensors, _, said = oracles.relative_of(shared_data, "mae_p16")
    config = load_config("configs/mae.py:smoke")
    config.update_from_flattened_dict({
        "init_from": str(path), "data.image_size": said["img_size"], "model.name": "ViT-mu/16",
        "model.width": said["embed_dim"], "model.depth": said["depth"], "model.heads": said["num_heads"],
        "model.mlp_dim": 4 * said["embed_dim"], "model.pool": "token", "objective.depth": 2,
        "model.position": "learned",
    })  # fmt: skip
    assembly = assemble(resolve(config), num_classes=0, examples_per_epoch=1000)
    state = start_from(assembly, jax.jit(assembly.init)(jax.random.key(0)))
    _, expected = of_checkpoint(tensors, said["num_heads"], 4)
    jax.tree.map(np.testing.assert_array_equal, state.params["objective"], expected)
    np.testing.assert_array_equal(state.params["class_token"], tensors["cls_token"])
    jax.tree.map(np.testing.assert_array_equal, state.ema["objective"], expected)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of MAE, as if it had been trained: its workdir, assembly, and the arrays in its checkpoint."""
    workdir = tmp_path_factory.mktemp("mae") / "run"
    config = load_config("configs/mae.py:smoke")
    config.update_from_flattened_dict({
        "model.name": "ViT-mu/8", "model.width": 24, "model.depth": 2, "model.heads": 2, "model.mlp_dim": 96,
        "model.pool": "token", "objective.width": 16, "objective.heads": 2, "objective.masked": 0.6,
        "objective.mlp_ratio": 3,
    })  # fmt: skip
    assembly = assemble(resolve(config), num_classes=0, examples_per_epoch=16)
    random = np.random.default_rng(0)

    def drawn(x):
        return jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype)

    parts = jax.tree.map(drawn, jax.eval_shape(assembly.init, jax.random.key(0)).parts())
    description = descriptions.describe(assembly.config, assembly.model_config, (), 16)
    checkpoints = saving.Checkpoints(workdir, assembly.config.checkpoint)
    checkpoints.save_now(1, parts, description | {"seconds": 0.0})
    checkpoints.close()
    return workdir, assembly, jax.device_get(parts)


@pytest.mark.parametrize("to", ["authors", "huggingface"])
def test_a_runs_decoder_is_written_and_read_again(run, tmp_path, to):
    workdir, assembly, parts = run
    path = tmp_path / ("mae.safetensors" if to == "authors" else "mae")
    loading.convert(workdir, path, to)
    checkpoint = formats.read_checkpoint(path)
    # The average is what is evaluated, and what others get.
    expected = parts["ema"] | {"position": parts["ema_variables"]["position"]}
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, expected)
    found = saved_objectives.find_saved(checkpoint)
    options = assembly.networks.objective.options
    stated = MaeOptions(**found.options)
    if to == "authors":
        assert stated == options
    assert decoder_of(checkpoint.model_config, stated) == assembly.networks.objective.decoder
    jax.tree.map(np.testing.assert_array_equal, found.read().params, parts["ema_objective"])
    # From one to the other, and into a run, this one's checkpoint too.
    other = "huggingface" if to == "authors" else "authors"
    again = tmp_path / ("again.safetensors" if other == "authors" else "again")
    loading.convert(path, again, other)
    jax.tree.map(
        np.testing.assert_array_equal,
        saved_objectives.find_saved(formats.read_checkpoint(again)).read().params,
        found.read().params,
    )
    new = registry.Weights(jax.tree.map(jnp.zeros_like, parts["params_objective"]), {})
    for source in (path, workdir):
        config = dataclasses.replace(assembly.config, init_from=str(source))
        again = dataclasses.replace(assembly, config=config)
        own = module_weights(again, read_checkpoint(again), new)
        jax.tree.map(np.testing.assert_array_equal, own.params, parts["ema_objective"])


def test_transformers_predicts_the_same_of_what_is_written_for_it(run, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    workdir, assembly, parts = run
    loading.convert(workdir, tmp_path / "mae", "huggingface")
    theirs, report = transformers.ViTMAEForPreTraining.from_pretrained(
        tmp_path / "mae", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    random = np.random.default_rng(0)
    images = random.normal(size=(3, 32, 32, 3)).astype(np.float32)
    noise = random.random((3, 16)).astype(np.float32)
    with torch.no_grad():
        answer = theirs.eval()(torch.tensor(images).permute(0, 3, 1, 2), noise=torch.tensor(noise))
    objective = assembly.networks.objective
    parts = assembly.networks.learner(
        parts["ema"] | {"objective": parts["ema_objective"]},
        {"model": parts["ema_variables"]}, step=0,
    )  # fmt: skip
    order = np.argsort(noise, axis=1)
    found = jax.jit(lambda x: objective.predict(parts, x, order, None))(images)
    expected = np.take_along_axis(answer.logits.numpy(), order[:, objective.visible :, None], 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    loss = jax.jit(lambda x: objective.loss(parts, x, order, None).mean())(images)
    np.testing.assert_allclose(loss, float(answer.loss), rtol=1e-5)


def test_an_encoder_that_the_authors_code_has_not_is_not_written_for_it(run, tmp_path):
    workdir, _, _ = run
    checkpoint = formats.read_checkpoint(workdir)
    for why, options in {
        "MAE's own code has no registers": {"registers": 2},
        "no models without a class token": {"pool": "mean"},
        "activation": {"activation": "quick_gelu"},
    }.items():
        config = made(**{"activation": "gelu"} | options)[1]
        other = dataclasses.replace(checkpoint, model_config=config)
        with pytest.raises(CheckpointError, match=why):
            formats.write_checkpoint(other, tmp_path / "out", "authors")
    # timm has encoders alone.
    loading.convert(workdir, tmp_path / "encoder.safetensors", "timm")
    assert (
        saved_objectives.find_saved(formats.read_checkpoint(tmp_path / "encoder.safetensors"))
        is None
    )
