"""BEiT, BEiT v2 and data2vec-vision: their files of timm, of transformers and of the authors, one layer or two of random
weights, against the code that they are from.
"""

import dataclasses
import importlib.util

import numpy as np
import pytest

import vit_jax
from tests import lazily
from tests.interchange import zoo
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")
if importlib.util.find_spec("timm") is None:
    pytest.skip("pip install --no-deps timm", allow_module_level=True)

TINY = dict(embed_dim=16, depth=2, num_heads=2, num_classes=5, patch_size=4, img_size=(8, 12))


def test_a_table_that_all_blocks_share_and_the_authors_names_are_read(tmp_path):
    """As pre-training leaves them: a token of hidden patches and a head of visual words beside the network."""
    arguments = TINY | dict(use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
    model = zoo.build("beit_base_patch16_224", **arguments)
    folder = zoo.save(model, tmp_path / "theirs", arguments)
    checkpoint = formats.read_checkpoint(folder)
    config = checkpoint.model_config
    assert (config.position, config.position_place) == ("bias2d", "shared")
    assert zoo.difference(model, checkpoint) <= zoo.BOUND
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
    written = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert formats.read_checkpoint(tmp_path / "ours").model_config == config
    assert written[-1000:] == (folder / "model.safetensors").read_bytes()[-1000:]
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
