"""What no tensor tells is asked for, and what is not read is refused by its name."""

import importlib.util
import time

import pytest

from tests import lazily, without_torchvision
from tests.interchange.test_dinov2 import drawn
from tests.models.conftest import parameters
from tests.objectives.test_mae import new_of_transformers
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats
from vit_jax.interchange.conversions import translation
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.models import registry
from vit_jax.models.embeddings import sincos_2d

torch = lazily.Package("torch")


@pytest.fixture(scope="module")
def theirs():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    return without_torchvision.timm_models()


@pytest.mark.parametrize(
    "name", ["crossvit_plain", "dvt_t2t12_none", "localvit_act3_hs_se", "t2t_transformer"]
)
def test_heads_of_an_unpublished_size_are_asked_for(shared_data, name):
    path = shared_data / "oracle" / "relatives" / f"{name}.ckpt.npz"
    with pytest.raises(
        CheckpointError, match="(?s)heads: published models have, by .*--model=heads="
    ):
        formats.read_checkpoint(path)


def test_the_grid_of_rotations_of_an_unpublished_width_is_asked_for(theirs, tmp_path):
    from timm.models.eva import Eva

    model = Eva(
        img_size=28, patch_size=14, embed_dim=48, depth=2, num_heads=3, qkv_fused=False, mlp_ratio=8 / 3,
        swiglu_mlp=True, use_rot_pos_emb=True, ref_feat_shape=(16, 16), num_classes=2,
    )  # fmt: skip
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="rope_grid"):
        formats.read_checkpoint(tmp_path / "weights.pth", heads=3, rope="axial")


def others(package):
    from timm.models import convnext, hiera, swin_transformer

    stem = package.create_model("vit_base_mci_224", depth=1, num_classes=2)
    return {
        "ConvNeXt": convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=2),
        "Hiera": hiera.Hiera(stages=(1, 1, 1, 1), embed_dim=8, num_heads=1, num_classes=2),
        "Swin": swin_transformer.SwinTransformer(
            img_size=32, window_size=2, depths=(1, 1), num_heads=(1, 2), embed_dim=8, num_classes=2
        ),
        "MobileCLIP": stem,
    }


@pytest.mark.parametrize("family", ["ConvNeXt", "Hiera", "Swin", "MobileCLIP"])
def test_families_that_are_not_read_are_refused_by_their_name(theirs, tmp_path, family):
    torch.save(others(theirs)[family].state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=f"a model of the family {family} "):
        formats.read_checkpoint(tmp_path / "weights.pth")


def test_a_dinov2_of_images_that_are_not_square_is_not_written_for_transformers(tmp_path):
    _, checkpoint = drawn(image_size=(12, 16))
    with pytest.raises(CheckpointError, match="images of 12x16, only square ones"):
        formats.write_checkpoint(checkpoint, tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


def test_a_decoder_that_is_not_written_is_named(tmp_path, caplog):
    pytest.importorskip("transformers")
    theirs = new_of_transformers(num_hidden_layers=1)
    positions = torch.tensor(sincos_2d((4, 4), 16, periods=4))  # its new models have others
    theirs.decoder.decoder_pos_embed.data[:, 1:] = positions
    theirs.save_pretrained(tmp_path / "mae")
    formats.write_checkpoint(formats.read_checkpoint(tmp_path / "mae"), tmp_path / "run", "orbax")
    assert "what the objective Mae owns is not written" in caplog.text


@pytest.mark.parametrize("form", ["official", "timm", "huggingface"])
def test_shapes_are_found_without_the_arrays(form):
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=3, num_classes=2, activation="gelu"
    )
    conversion = conversions_of(registry.family_of(config))[form]
    table, like = conversion.rules(config, conversion.layout(config)), registry.abstract(config)[1]
    params = parameters(config)
    written = {name: x.shape for name, x in translation.to_theirs(table, params)}
    assert written == {name: shape for name, (shape, _) in translation.specs(table, like).items()}


def test_the_shapes_of_a_large_model_take_no_time():
    """The official format splits heads: of ViT-G/14, 1.8 billion parameters, whole arrays took seconds."""
    config = registry.model_config("ViT-G/14", num_classes=2)
    conversion = conversions_of(registry.family_of(config))["official"]
    table, like = conversion.rules(config, conversion.layout(config)), registry.abstract(config)[1]
    began = time.process_time()
    assert len(translation.specs(table, like)) > 700
    assert time.process_time() - began < 0.5
