"""Networks that take images of sizes of their own, timm's NaFlexVit and transformers' SigLIP 2, against these: six
images in one padded batch, and the same bytes when they are written again.
"""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import lazily, without_torchvision
from tests.interchange.test_timm import randomize, save
from tests.models import oracles
from tests.models.conftest import parameters
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import registry
from vit_jax.models.contract import PatchBatch

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")

GRIDS = [(16, 16), (13, 19), (8, 32), (40, 6), (5, 51), (64, 4)]
PATCH, TOKENS = 4, 260
SIZE = dict(patch_size=PATCH, embed_dim=32, depth=2, num_heads=4, num_classes=5)
GAP = dict(init_values=1e-5, global_pool="avg", reg_tokens=4, fc_norm=True)
# Arguments of timm's NaFlexVit, and the options that they are here.
NAFLEX = {
    "gap": (GAP, dict(native_resize="bicubic", native_aspect=False, registers=4, last_norm="pooled")),
    "par_gap": (GAP | dict(pos_embed_ar_preserving=True), dict(native_aspect=True)),
    "parfac_gap": (
        GAP | dict(pos_embed_ar_preserving=True, pos_embed="factorized"),
        dict(position="factorized", native_resize="linear", native_aspect=True),
    ),
    "map": (dict(init_values=1e-5, reg_tokens=1), dict(pool="map", registers=1, native_resize="bicubic")),
    "siglip": (
        dict(act_layer="gelu_tanh", pos_embed_interp_mode="bilinear"),
        dict(pool="map", activation="gelu_tanh", native_resize="bilinear"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    """Six images in `TOKENS` patches each, of which those after their last must not be seen."""
    patches = np.random.default_rng(0).uniform(-1, 1, (6, TOKENS, PATCH * PATCH * 3))
    return PatchBatch(jnp.asarray(patches, jnp.float32), jnp.asarray(GRIDS, jnp.int32))


@pytest.fixture(scope="module")
def naflexvit():
    """timm's module, imported without torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    without_torchvision.timm_models()
    from timm.models import naflexvit

    return naflexvit


def our_output(checkpoint, batch):
    definition, _ = registry.abstract(checkpoint.model_config)
    params = jax.tree.map(np.asarray, checkpoint.params)
    return jax.jit(lambda p, batch: nnx.merge(definition, p)(batch))(params, batch)


def options_of(checkpoint, names):
    return {name: getattr(checkpoint.model_config, name) for name in names}


@pytest.mark.parametrize("kind", NAFLEX)
def test_timms_networks_are_ours_and_theirs_again(naflexvit, tmp_path, batch, kind):
    arguments, recognised = NAFLEX[kind]
    model = randomize(naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(), **SIZE | arguments))
    folder = tmp_path / "theirs"
    folder.mkdir()
    save(model, folder / "model.safetensors")
    description = {"architecture": f"naflexvit_base_patch16_{kind}", "model_args": SIZE}
    (folder / "config.json").write_text(json.dumps(description))
    checkpoint = formats.read_checkpoint(folder)
    assert options_of(checkpoint, recognised) == recognised
    assert checkpoint.model_config.image_size == 16 * PATCH
    index, grids = np.arange(TOKENS), np.asarray(GRIDS)
    real = index < grids.prod(1)[:, None]
    places = np.where(real, index, 0)
    places = np.stack([places // grids[:, 1:], places % grids[:, 1:]], axis=-1)
    with torch.no_grad():
        patches = torch.tensor(np.asarray(batch.patches), dtype=torch.float64)
        theirs = model.double()(patches, torch.tensor(places), torch.tensor(real)).numpy()
    assert theirs.std() > 0.05
    oracles.assert_close(our_output(checkpoint, batch).logits, theirs, 1e-5)
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
    before, after = (
        safetensors.read(tmp_path / side / "model.safetensors")[0] for side in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    for name in before:
        assert np.asarray(before[name]).tobytes() == np.asarray(after[name]).tobytes(), name
    again = formats.read_checkpoint(tmp_path / "ours")
    assert again.model_config == checkpoint.model_config
    # What timm would build of it.
    stated = json.loads((tmp_path / "ours" / "config.json").read_text())["model_args"]
    cfg = naflexvit.NaFlexVitCfg()
    built = naflexvit.NaFlexVit(naflexvit._overlay_kwargs(cfg, **stated), num_classes=5)
    built.load_state_dict({n: torch.tensor(np.asarray(x)) for n, x in after.items()}, strict=True)


def test_a_new_model_of_ours_is_written_as_one_of_timm(naflexvit, tmp_path, batch):
    config = registry.model_config(
        "ViT-mu/4", image_size=64, depth=1, num_classes=3, position="factorized", native_resize="linear",
        activation="gelu", head_init="normal",
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="factorized positions of the class token"):
        formats.write_checkpoint(checkpoint_of(config), tmp_path / "refused", "timm")
    config = registry.model_config(
        "ViT-mu/4", image_size=64, depth=1, num_classes=3, native_resize="bicubic", activation="gelu",
        head_init="normal",
    )  # fmt: skip
    checkpoint = checkpoint_of(config)
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
    again = formats.read_checkpoint(tmp_path / "ours")
    ours, theirs = (our_output(c, batch).logits for c in (checkpoint, again))
    # The class token's position is added to the token there.
    oracles.assert_close(theirs, np.asarray(ours, np.float64), 1e-5)


def checkpoint_of(config):
    params = parameters(config)
    return formats.LoadedCheckpoint(config, params, None, None, {}, {}, {})


def test_a_file_that_does_not_state_its_positions_asks(naflexvit, tmp_path):
    model = naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(), **SIZE | GAP)
    path = save(model, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"native_aspect: published models .* False .* True"):
        formats.read_checkpoint(path, heads=4)


def test_siglip_2_is_transformers_for_images_of_any_size(tmp_path, batch):
    torch.manual_seed(0)
    fields = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=PATCH,
        num_patches=256,
    )  # fmt: skip
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**fields))
    randomize(model).save_pretrained(tmp_path / "theirs")
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    real = np.arange(TOKENS) < np.asarray(GRIDS).prod(1)[:, None]
    with torch.no_grad():
        patches = torch.tensor(np.asarray(batch.patches))
        masks = torch.tensor(real.astype(np.int32)), torch.tensor(GRIDS)
        theirs = model(patches, *masks)
    output = our_output(checkpoint, batch)
    oracles.assert_close(output.features, theirs.pooler_output.numpy(), 1e-5)
    oracles.assert_close(output.tokens[real], theirs.last_hidden_state.numpy()[real], 1e-5)
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    before, after = (
        safetensors.read(tmp_path / side / "model.safetensors")[0] for side in ("theirs", "ours")
    )
    for name in after:
        assert np.asarray(before[name]).tobytes() == np.asarray(after[name]).tobytes(), name
