"""BEiT's files as pre-training leaves them, of timm, of transformers and of its authors: two layers of random weights
against the code that they are from. Fine-tuned ones are in `test_zoo` and `test_round_trips`.
"""

import importlib.util

import numpy as np
import pytest

import vit_jax
from tests import lazily
from tests.interchange import zoo
from tests.interchange.test_zoo import tensors_of
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")
if importlib.util.find_spec("timm") is None:
    pytest.skip("pip install --no-deps timm", allow_module_level=True)

TINY = dict(embed_dim=16, depth=2, num_heads=2, num_classes=5, patch_size=4, img_size=(8, 12))


def test_a_table_that_all_blocks_share_and_the_authors_names_are_read(tmp_path):
    """With a token of hidden patches and a head of visual words beside the network."""
    arguments = TINY | dict(use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
    model = zoo.build("beit_base_patch16_224", **arguments)
    folder = zoo.save(model, tmp_path / "theirs", arguments)
    checkpoint = formats.read_checkpoint(folder)
    config = checkpoint.model_config
    assert (config.position, config.position_place) == ("bias2d", "shared")
    assert zoo.difference(model, checkpoint) <= zoo.BOUND
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
    assert formats.read_checkpoint(tmp_path / "ours").model_config == config
    before, after = (tensors_of(at / "model.safetensors") for at in (folder, tmp_path / "ours"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    # The authors' file.
    state = dict(model.state_dict())
    state |= {"mask_token": torch.zeros(1, 1, 16), "lm_head.weight": torch.zeros(3, 16)}
    state["rel_pos_bias.relative_position_index"] = model.rel_pos_bias.relative_position_index
    options = dict(heads=2, activation="gelu", pool="mean", image_size=(8, 12))
    torch.save({"model": state}, tmp_path / "beit.pth")
    again = formats.read_checkpoint(tmp_path / "beit.pth", **options)
    assert zoo.difference(model, again) <= zoo.BOUND
    state["rel_pos_bias.relative_position_index"] = torch.zeros(7, 7, dtype=torch.int64)
    torch.save({"model": state}, tmp_path / "beit.pth")
    with pytest.raises(CheckpointError, match="has other values than the model computes"):
        formats.read_checkpoint(tmp_path / "beit.pth", **options)
    with pytest.raises(CheckpointError, match="18 biases of distances is of no square grid"):
        formats.read_checkpoint(tmp_path / "beit.pth", **options | dict(image_size=None))


def test_a_beit_of_masked_images_is_read_with_its_shared_table(tmp_path):
    """transformers keeps its last norm and the head of visual words outside of the network."""
    config = transformers.BeitConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        vocab_size=7, use_mask_token=True, use_shared_relative_position_bias=True, layer_norm_eps=1e-5,
    )  # fmt: skip
    model = zoo.randomize(transformers.BeitForMaskedImageModeling(config))
    model.save_pretrained(tmp_path / "theirs")
    run = vit_jax.load_run(tmp_path / "theirs")
    x = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    with torch.no_grad():
        images = torch.from_numpy(x).permute(0, 3, 1, 2)
        expected = model.layernorm(model.beit(images).last_hidden_state).numpy()
    oracles.assert_close(run.model(x).tokens, expected, zoo.BOUND)
    run.save(tmp_path / "ours", format="huggingface")
    before, after = (tensors_of(tmp_path / at / "model.safetensors") for at in ("theirs", "ours"))
    own = before.keys() - {name for name in before if "mask_token" in name or "lm_head" in name}
    assert own == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in own)


def test_a_beit_of_transformers_that_is_not_square_is_refused(tmp_path):
    """transformers reshapes the table to columns before rows."""
    config = transformers.BeitConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=[8, 12],
        patch_size=4, use_relative_position_bias=True,
    )  # fmt: skip
    transformers.BeitModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="columns before rows.*only square images"):
        formats.read_checkpoint(tmp_path)
