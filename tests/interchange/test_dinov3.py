"""DINOv3's own files: known by their tensors, computed as transformers and timm do, and written again."""

import importlib.util
import re

import absl.logging
import jax
import numpy as np
import pytest
from flax import nnx

from tests import lazily, without_torchvision
from tests.interchange import dinov3_files
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, loading, safetensors
from vit_jax.interchange.conversions import vit_dinov3
from vit_jax.models import registry

torch = lazily.Package("torch")

# Depth, width, heads, hidden size, gates, biases: patterns of the released sizes, and what is beside the network.
NETWORKS = {
    "S": ((2, 64, 4, 96, False, True), {}),
    "S of the release": ((1, 64, 4, 96, False, True), {"masks": "all"}),
    "H+": ((2, 80, 5, 64, True, True), {}),
    "7B": ((2, 128, 4, 96, True, False), {"local_norm": True}),
}
SIZE = 16


def tensors_of(name):
    sizes, options = NETWORKS[name]
    return dinov3_files.drawn(*sizes, patch=4, **options)


def save(tensors, path):
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).uniform(-1, 1, (2, SIZE, SIZE, 3)).astype(np.float32)


def output_of(foreign, images):
    definition, _ = registry.abstract(foreign.model_config)
    params = jax.tree.map(np.asarray, foreign.params)
    return jax.jit(lambda p, x: nnx.merge(definition, p)(x))(params, images)


def tokens_of_transformers(tensors, heads, images):
    pytest.importorskip("transformers")
    model = dinov3_files.of_transformers(tensors, heads)
    with torch.no_grad():
        return model(torch.from_numpy(images).permute(0, 3, 1, 2)).last_hidden_state.numpy()


def without_registers(tokens):
    return np.delete(tokens, np.arange(1, 1 + dinov3_files.REGISTERS), axis=1)


@pytest.mark.parametrize("name", NETWORKS)
def test_their_own_files_compute_as_in_transformers_and_come_back(tmp_path, images, name):
    (_, _, heads, _, gated, biased), _ = NETWORKS[name]
    tensors = tensors_of(name)
    path = save(tensors, tmp_path / "own.pth")
    assert formats.detect(path) == "authors"
    foreign = formats.read_checkpoint(path, image_size=SIZE)
    config = foreign.model_config
    said = (config.heads, config.rope, config.rope_theta, config.registers, config.epsilon)
    assert said == (heads, "centred", 100.0, dinov3_files.REGISTERS, 1e-5)
    assert (config.gated_mlp, config.qkv_bias, config.key_bias) == (gated, biased, not biased)
    expected = tokens_of_transformers(tensors, heads, images)
    oracles.assert_close(output_of(foreign, images).tokens, without_registers(expected), 1e-5)
    # Directly, and by way of a checkpoint of ours.
    formats.write_checkpoint(foreign, tmp_path / "a.safetensors", "authors")
    loading.convert(path, tmp_path / "run", "orbax", image_size=SIZE)
    loading.convert(tmp_path / "run", tmp_path / "b.safetensors", "authors")
    for written in ("a", "b"):
        found = safetensors.read(tmp_path / f"{written}.safetensors")[0]
        assert sorted(found) == sorted(tensors)
        for each, tensor in tensors.items():
            assert np.asarray(found[each]).tobytes() == tensor.tobytes(), each
    assert formats.read_checkpoint(tmp_path / "b.safetensors").model_config == config


def test_half_precision_comes_back_too(tmp_path):
    tensors = {n: torch.from_numpy(x).to(torch.bfloat16) for n, x in tensors_of("S").items()}
    torch.save(tensors, tmp_path / "own.pth")
    loading.convert(tmp_path / "own.pth", tmp_path / "run", "orbax", image_size=SIZE)
    loading.convert(tmp_path / "run", tmp_path / "again.safetensors", "authors")
    found = safetensors.read(tmp_path / "again.safetensors")[0]
    for name, tensor in tensors.items():
        again = np.asarray(found[name])
        assert again.tobytes() == tensor.view(torch.int16).numpy().tobytes(), name


@pytest.mark.parametrize("name", ["S", "7B"])
def test_they_compute_as_in_timm_that_reads_the_same_file(images, name, tmp_path):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    without_torchvision.timm_models()
    from timm.models import eva

    (depth, width, heads, hidden, gated, biased), _ = NETWORKS[name]
    tensors = tensors_of(name)
    model = eva.Eva(
        img_size=SIZE, patch_size=4, embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=hidden / width,
        qkv_bias=biased, swiglu_mlp=gated, swiglu_align_to=8 if gated else 0, init_values=1e-5, num_reg_tokens=4,
        rope_type="dinov3", rope_temperature=100, rope_rotate_half=True, use_rot_pos_emb=True,
        use_abs_pos_emb=False, use_fc_norm=False, num_classes=0,
        norm_layer=lambda *args, **kwargs: torch.nn.LayerNorm(*args, eps=1e-5, **kwargs),
    )  # fmt: skip
    state = {n: torch.from_numpy(x) for n, x in tensors.items() if "local_cls" not in n}
    model.load_state_dict(eva.checkpoint_filter_fn(state, model), strict=True)
    with torch.no_grad():
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        expected = model.eval().forward_features(pixels).numpy()
    foreign = formats.read_checkpoint(save(tensors, tmp_path / "own.pth"), image_size=SIZE)
    oracles.assert_close(output_of(foreign, images).tokens, without_registers(expected), 1e-5)


def test_their_classifier_reads_the_class_token_beside_the_mean(tmp_path, images):
    tensors, random = tensors_of("7B"), np.random.default_rng(2)
    head = {
        "linear_head.weight": random.normal(0, 0.3, (5, 256)).astype(np.float32),
        "linear_head.bias": random.normal(0, 0.3, 5).astype(np.float32),
    }
    whole = {f"backbone.{name}": tensor for name, tensor in tensors.items()} | head
    foreign = formats.read_checkpoint(save(whole, tmp_path / "own.pth"), image_size=SIZE)
    assert (foreign.model_config.pool, foreign.model_config.num_classes) == ("token_mean", 5)
    tokens = without_registers(tokens_of_transformers(tensors, 4, images))
    read = np.concatenate([tokens[:, 0], tokens[:, 1:].mean(1)], axis=-1)
    expected = read @ head["linear_head.weight"].T + head["linear_head.bias"]
    oracles.assert_close(output_of(foreign, images).logits, expected, 1e-5)
    formats.write_checkpoint(foreign, tmp_path / "again.safetensors", "authors")
    found = safetensors.read(tmp_path / "again.safetensors")[0]
    assert sorted(found) == sorted(whole)
    for each, tensor in whole.items():
        assert np.asarray(found[each]).tobytes() == tensor.tobytes(), each


def test_a_classifier_without_its_network_is_refused(tmp_path):
    head = {"weight": np.ones((5, 256), np.float32), "bias": np.ones(5, np.float32)}
    with pytest.raises(CheckpointError, match="holds one layer, .* after 'linear_head.'"):
        formats.read_checkpoint(save(head, tmp_path / "head.pth"))


def test_a_teachers_checkpoint_is_read_from_its_chunks_and_beside_its_heads(tmp_path):
    tensors = tensors_of("S")
    chunks = {name.replace("blocks.", "blocks.0."): x for name, x in tensors.items()}
    teacher = {f"backbone.{name}": torch.from_numpy(x) for name, x in chunks.items()}
    teacher |= {"dino_head.mlp.0.weight": torch.ones(2, 2), "dino_loss.center": torch.ones(2)}
    torch.save({"teacher": teacher, "iteration": 7}, tmp_path / "teacher.pth")
    found = formats.read_checkpoint(tmp_path / "teacher.pth")
    plain = formats.read_checkpoint(save(tensors, tmp_path / "own.pth"))
    assert found.model_config == plain.model_config
    pairs = zip(jax.tree.leaves(found.params), jax.tree.leaves(plain.params), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", dinov3_files.RELEASED)
def test_the_released_sizes_are_known_by_their_tensors(tmp_path, name):
    """By shapes, and the few values that are looked at: the other bytes of these files are holes."""
    *sizes, parameters = dinov3_files.RELEASED[name]
    shapes = dinov3_files.shapes_of(*sizes, local_norm=name == "vit7b16")
    buffers = ("bias_mask", "periods")
    counted = {n: np.prod(shape) for n, shape in shapes.items() if not n.endswith(buffers)}
    assert sum(counted.values()) == parameters
    path = tmp_path / f"dinov3_{name}_pretrain_lvd1689m-08c60483.safetensors"
    values = dinov3_files.periods(shapes["rope_embed.periods"][0])
    dinov3_files.write_sparse(path, shapes, {"rope_embed.periods": values})
    foreign = formats.read_checkpoint(path)
    depth, width, heads, hidden, gated, biased = sizes
    config = foreign.model_config
    found = (
        config.depth,
        config.width,
        config.heads,
        config.mlp_dim,
        config.gated_mlp,
        config.qkv_bias,
    )
    assert found == (depth, width, heads, hidden, gated, biased)
    assert {n: x.shape for n, x in foreign.params["encoder"]["norm"].items()}["scale"] == (width,)
    size = {"vits16plus": "S+", "vith16plus": "H+", "vit7b16": "7B"}.get(name) or name[3].upper()
    assert formats.describe_model(config).startswith(f"DINOv3 ViT-{size}/16, ")
    # How images are prepared its name says.
    prepared = foreign.preprocessing
    assert (prepared.mean[0], prepared.image_size, prepared.interpolation) == (
        0.485,
        224,
        "bicubic",
    )
    path.unlink()
    if name == "vit7b16":
        definition, params = registry.abstract(config)
        images = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
        output = jax.eval_shape(lambda p, x: nnx.merge(definition, p)(x), params, images)
        assert output.tokens.shape == (1, 1 + 196, 4096)


def test_images_of_satellites_are_prepared_in_their_own_way():
    config = registry.model_config("ViT-L/16", image_size=224, num_classes=0)
    name = "dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth"
    named = vit_dinov3.DINOv3().preprocessing_named
    assert named(["weights", name], config).mean[0] == 0.430
    assert named(["weights", "dinov3_vitl16.safetensors"], config).mean[0] == 0.485  # by photos
    assert named(["dinov3_vitl16_of_ours", "model.safetensors"], config) is None


def test_a_checkpoint_that_an_earlier_version_made_without_positions_is_warned_of(tmp_path, caplog):
    absl.logging.get_absl_logger().propagate = True
    config = registry.model_config(
        "ViT-mu/4", image_size=8, num_classes=0, position="none", registers=4
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), registry.abstract(config)[1])
    layout = {"format": "timm", "renamed": {"reg_token": "storage_tokens"}}
    foreign = formats.LoadedCheckpoint(config, params, layout=layout)
    formats.write_checkpoint(foreign, tmp_path / "run", "orbax")
    formats.read_checkpoint(tmp_path / "run")
    assert "lost its rotary positions: convert that file again" in caplog.text


def test_weights_of_transformers_are_written_for_their_own_code(tmp_path, images):
    transformers = pytest.importorskip("transformers")
    sizes, _ = NETWORKS["H+"]
    tensors = tensors_of("H+")
    dinov3_files.of_transformers(tensors, sizes[2]).save_pretrained(tmp_path / "theirs")
    loading.convert(tmp_path / "theirs", tmp_path / "own.safetensors", "authors")
    found = safetensors.read(tmp_path / "own.safetensors")[0]
    assert sorted(found) == sorted(tensors)
    exact = {"rope_embed.periods": 100.0 ** (np.arange(4) / 4), "mask_token": np.zeros((1, 80))}
    for name, tensor in (tensors | exact).items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.float32(tensor), err_msg=name)
    # And back: transformers' own tensors again.
    loading.convert(tmp_path / "own.safetensors", tmp_path / "back", "huggingface")
    again = transformers.DINOv3ViTModel.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        tokens = again(torch.from_numpy(images).permute(0, 3, 1, 2)).last_hidden_state.numpy()
    np.testing.assert_array_equal(tokens, tokens_of_transformers(tensors, sizes[2], images))


def test_a_network_of_timm_is_written_for_their_own_code_with_what_is_read_off_its_tokens(tmp_path):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    from tests.interchange import zoo

    sizes = dict(img_size=32, depth=2, embed_dim=64, num_heads=4, num_classes=0)
    model = zoo.build("vit_small_patch16_dinov3", **sizes)
    folder = zoo.save(model, tmp_path / "timm", sizes)
    loading.convert(folder, tmp_path / "own.safetensors", "authors")
    found = safetensors.read(tmp_path / "own.safetensors")[0]
    for name, tensor in model.state_dict().items():
        name = re.sub(r"gamma_(\d)", r"ls\1.gamma", name.replace("reg_token", "storage_tokens"))
        np.testing.assert_array_equal(np.asarray(found[name]), tensor.numpy(), err_msg=name)
    # timm's features are the mean of the patches: so they stay for us.
    config = formats.read_checkpoint(tmp_path / "own.safetensors").model_config
    assert (config.pool, config.keep_class_token) == ("mean", True)
    assert config == formats.read_checkpoint(folder).model_config
    with pytest.raises(CheckpointError, match="--model=pool=token --model=keep_class_token=False;"):
        loading.convert(folder, tmp_path / "out", "huggingface")
    loading.convert(folder, tmp_path / "out", "huggingface", pool="token", keep_class_token=False)


def changed(**tensors):
    return {name.replace("__", "."): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(rope_embed__periods=dinov3_files.periods(4, 50.0)), "periods is .*set rope_theta to what"),
        (changed(rope_embed__periods=np.float32([1, 3.2, 10, 31])), "periods is .*set rope_theta to what"),
        (changed(rope_embed__periods=dinov3_files.periods(6)), "6 periods, for heads of 24 channels"),
        (changed(blocks__0__attn__qkv__bias_mask=np.full(192, np.nan, np.float32)), "bias.*not finite"),
        (changed(blocks__0__attn__qkv__bias=None), "is a mask, and there is no"),
        (changed(blocks__0__attn__qkv__bias_mask=np.ones(192, np.float32)), "key_bias=True"),
        (changed(cls_norm__weight=np.ones(64, np.float32)), "cls_norm.weight.*not in the model"),
        (changed(pos_embed=np.ones((1, 17, 64), np.float32)), "periods.*not in the model"),
    ],
)  # fmt: skip
def test_what_the_model_would_not_compute_is_refused(tmp_path, change, message):
    tensors = tensors_of("S") | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if "qkv.bias" in "".join(change) and "mask" in "".join(change):
        tensors["blocks.0.attn.qkv.bias"] = np.ones(192, np.float32)
    path = save(tensors, tmp_path / "own.pth")
    options = {"heads": 4, "rope": "centred"} if "pos_embed" in change else {}
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        foreign = formats.read_checkpoint(path, image_size=SIZE, **options)
        jax.tree.map(np.asarray, foreign.params)


def test_other_periods_are_read_with_their_base(tmp_path):
    tensors = tensors_of("S") | {"rope_embed.periods": dinov3_files.periods(4, 50.0)}
    path = save(tensors, tmp_path / "own.pth")
    assert formats.read_checkpoint(path, rope_theta=50.0).model_config.rope_theta == 50.0


def test_without_periods_the_heads_are_those_of_the_published_width_or_asked_for(tmp_path):
    tensors = {n: x for n, x in tensors_of("S").items() if n != "rope_embed.periods"}
    path = save(tensors, tmp_path / "own.pth")
    with pytest.raises(
        CheckpointError, match="heads: published models have, by width, 3 at 192, 6 at 384"
    ):
        formats.read_checkpoint(path)
    foreign = formats.read_checkpoint(path, heads=4)
    assert foreign.model_config.rope == "centred" and "rope_theta" in foreign.assumed


def test_what_masks_hide_is_said(tmp_path, caplog):
    absl.logging.get_absl_logger().propagate = True
    tensors = tensors_of("S")
    tensors["blocks.1.attn.qkv.bias"] = np.ones(192, np.float32)
    foreign = formats.read_checkpoint(save(tensors, tmp_path / "own.pth"), image_size=SIZE)
    with caplog.at_level("INFO"):
        bias = np.asarray(foreign.params["encoder"]["layers"]["attention"]["qkv"]["bias"])
    assert np.count_nonzero(bias[1]) == 2 * 64
    assert "blocks.1.attn.qkv.bias: 64 values that its mask sets to 0 are read as 0" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 3}, "no pool='token' with a head"),
        ({"position": "learned"}, "no learned positions"),
        ({"qk_norm": True}, "no qk_norm"),
        ({"epsilon": 1e-6}, "no epsilon=1e-06"),
        ({"activation": "gelu_tanh"}, "no activation='gelu_tanh'"),
    ],
)
def test_what_their_code_has_not_is_not_written(tmp_path, options, message):
    usual = dict(
        rope="centred", rope_theta=100.0, layer_scale="all", registers=4, position="none", num_classes=0,
        activation="gelu", epsilon=1e-5, image_size=SIZE, key_bias=False,
    )  # fmt: skip
    config = registry.model_config("ViT-mu/4", **usual | options)
    params = registry.abstract(config)[1]
    with pytest.raises(CheckpointError, match=f"DINOv3's own code has {message}"):
        formats.write_checkpoint(
            formats.LoadedCheckpoint(config, params), tmp_path / "a.safetensors", "authors"
        )
