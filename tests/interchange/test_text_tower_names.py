"""Text towers under the names of OpenAI's CLIP, open_clip and big_vision: transformers' tensors, renamed here as those
codes have them, give the vectors of transformers, and are written again byte by byte.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import lazily
from tests.interchange.test_text_towers import TEXT, VISION, build
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, saved_objectives
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextOptions

torch = lazily.Package("torch")

HEADS = {"heads": VISION["num_attention_heads"]}
TEXT_HEADS = {"text_heads": TEXT["num_attention_heads"]}
PARTS = ("weight", "bias")
ENDS = {"clip": 29, "siglip": 1}  # CLIP's is the largest number, SigLIP's that of its vocabularies


def joint(state, layer, part):
    return np.concatenate([state[f"{layer}.self_attn.{x}_proj.{part}"] for x in "qkv"])


def blocks_of_openai(state, theirs, prefix, depth):
    """Blocks as torch.nn.MultiheadAttention keeps them."""
    result = {}
    for i in range(depth):
        layer, own = f"{theirs}.encoder.layers.{i}", f"{prefix}transformer.resblocks.{i}"
        for part in PARTS:
            result |= {
                f"{own}.attn.in_proj_{part}": joint(state, layer, part),
                f"{own}.attn.out_proj.{part}": state[f"{layer}.self_attn.out_proj.{part}"],
                f"{own}.ln_1.{part}": state[f"{layer}.layer_norm1.{part}"],
                f"{own}.ln_2.{part}": state[f"{layer}.layer_norm2.{part}"],
                f"{own}.mlp.c_fc.{part}": state[f"{layer}.mlp.fc1.{part}"],
                f"{own}.mlp.c_proj.{part}": state[f"{layer}.mlp.fc2.{part}"],
            }
    return result


def text_of_openai(state, prefix):
    text = {
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "ln_final.weight": state["text_model.final_layer_norm.weight"],
        "ln_final.bias": state["text_model.final_layer_norm.bias"],
    }
    blocks = blocks_of_openai(state, "text_model", prefix, TEXT["num_hidden_layers"])
    return {prefix + name: array for name, array in text.items()} | blocks


def openai(state):
    vision = {
        "class_embedding": state["vision_model.embeddings.class_embedding"],
        "positional_embedding": state["vision_model.embeddings.position_embedding.weight"],
        "conv1.weight": state["vision_model.embeddings.patch_embedding.weight"],
        "proj": state["visual_projection.weight"].T,
    }
    for part in PARTS:
        vision[f"ln_pre.{part}"] = state[f"vision_model.pre_layrnorm.{part}"]
        vision[f"ln_post.{part}"] = state[f"vision_model.post_layernorm.{part}"]
    return {
        **{f"visual.{name}": array for name, array in vision.items()},
        **blocks_of_openai(state, "vision_model", "visual.", VISION["num_hidden_layers"]),
        **text_of_openai(state, ""),
        "text_projection": state["text_projection.weight"].T,
        "logit_scale": state["logit_scale"],
    }


def open_clip(state):
    """SigLIP, whose image tower is timm's."""
    trunk = {
        "pos_embed": state["vision_model.embeddings.position_embedding.weight"][None],
        "attn_pool.latent": state["vision_model.head.probe"],
    }
    for part in PARTS:
        head = "vision_model.head"
        whole = state[f"{head}.attention.in_proj_{part}"]
        width = VISION["hidden_size"]
        trunk |= {
            f"patch_embed.proj.{part}": state[f"vision_model.embeddings.patch_embedding.{part}"],
            f"norm.{part}": state[f"vision_model.post_layernorm.{part}"],
            f"attn_pool.q.{part}": whole[:width],
            f"attn_pool.kv.{part}": whole[width:],
            f"attn_pool.proj.{part}": state[f"{head}.attention.out_proj.{part}"],
            f"attn_pool.norm.{part}": state[f"{head}.layernorm.{part}"],
            f"attn_pool.mlp.fc1.{part}": state[f"{head}.mlp.fc1.{part}"],
            f"attn_pool.mlp.fc2.{part}": state[f"{head}.mlp.fc2.{part}"],
        }
        for i in range(VISION["num_hidden_layers"]):
            layer = f"vision_model.encoder.layers.{i}"
            trunk |= {
                f"blocks.{i}.norm1.{part}": state[f"{layer}.layer_norm1.{part}"],
                f"blocks.{i}.norm2.{part}": state[f"{layer}.layer_norm2.{part}"],
                f"blocks.{i}.attn.qkv.{part}": joint(state, layer, part),
                f"blocks.{i}.attn.proj.{part}": state[f"{layer}.self_attn.out_proj.{part}"],
                f"blocks.{i}.mlp.fc1.{part}": state[f"{layer}.mlp.fc1.{part}"],
                f"blocks.{i}.mlp.fc2.{part}": state[f"{layer}.mlp.fc2.{part}"],
            }
    return {
        **{f"visual.trunk.{name}": array for name, array in trunk.items()},
        **text_of_openai(state, "text."),
        "text.text_projection.weight": state["text_model.head.weight"],
        "text.text_projection.bias": state["text_model.head.bias"],
        "logit_scale": state["logit_scale"][0],
        "logit_bias": state["logit_bias"][0],
    }


def big_vision(state, stacked=True):
    def linear(name, theirs):
        return {
            f"{name}/kernel": state[f"{theirs}.weight"].T,
            f"{name}/bias": state[f"{theirs}.bias"],
        }

    def norm(name, theirs):
        return {f"{name}/scale": state[f"{theirs}.weight"], f"{name}/bias": state[f"{theirs}.bias"]}

    def attention(name, weights, biases, out, heads):
        result, width = {}, out[0].shape[0]
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            result[f"{name}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
            result[f"{name}/{part}/bias"] = bias.reshape(heads, -1)
        result[f"{name}/out/kernel"] = out[0].T.reshape(heads, -1, width)
        return result | {f"{name}/out/bias": out[1]}

    def encoder(name, theirs, depth, heads):
        layers = []
        for i in range(depth):
            layer = f"{theirs}.encoder.layers.{i}"
            weights, biases = (
                [state[f"{layer}.self_attn.{x}_proj.{part}"] for x in "qkv"] for part in PARTS
            )
            out = [state[f"{layer}.self_attn.out_proj.{part}"] for part in PARTS]
            layers.append(
                norm("LayerNorm_0", f"{layer}.layer_norm1")
                | norm("LayerNorm_1", f"{layer}.layer_norm2")
                | attention("MultiHeadDotProductAttention_0", weights, biases, out, heads)
                | linear("MlpBlock_0/Dense_0", f"{layer}.mlp.fc1")
                | linear("MlpBlock_0/Dense_1", f"{layer}.mlp.fc2")
            )
        if stacked:
            blocks = {f"encoderblock/{n}": np.stack([x[n] for x in layers]) for n in layers[0]}
        else:
            blocks = {
                f"encoderblock_{i}/{n}": x
                for i, layer in enumerate(layers)
                for n, x in layer.items()
            }
        return {f"{name}/{n}": x for n, x in blocks.items()}

    head, patches = "vision_model.head", "vision_model.embeddings.patch_embedding"
    weights, biases = (np.split(state[f"{head}.attention.in_proj_{part}"], 3) for part in PARTS)
    out = [state[f"{head}.attention.out_proj.{part}"] for part in PARTS]
    pool = "img/MAPHead_0"
    named = {
        "img/embedding/kernel": state[f"{patches}.weight"].transpose(2, 3, 1, 0),
        "img/embedding/bias": state[f"{patches}.bias"],
        "img/pos_embedding": state["vision_model.embeddings.position_embedding.weight"][None],
        **encoder("img/Transformer", "vision_model", VISION["num_hidden_layers"], VISION["num_attention_heads"]),
        **norm("img/Transformer/encoder_norm", "vision_model.post_layernorm"),
        f"{pool}/probe": state[f"{head}.probe"],
        **attention(f"{pool}/MultiHeadDotProductAttention_0", weights, biases, out, VISION["num_attention_heads"]),
        **norm(f"{pool}/LayerNorm_0", f"{head}.layernorm"),
        **linear(f"{pool}/MlpBlock_0/Dense_0", f"{head}.mlp.fc1"),
        **linear(f"{pool}/MlpBlock_0/Dense_1", f"{head}.mlp.fc2"),
        "txt/Embed_0/embedding": state["text_model.embeddings.token_embedding.weight"],
        "txt/pos_embedding": state["text_model.embeddings.position_embedding.weight"][None],
        **encoder("txt/Encoder_0", "text_model", TEXT["num_hidden_layers"], TEXT["num_attention_heads"]),
        **norm("txt/Encoder_0/encoder_norm", "text_model.final_layer_norm"),
        **linear("txt/head", "text_model.head"),
        "t": state["logit_scale"],
        "b": state["logit_bias"],
    }  # fmt: skip
    return {f"params/{name}": array for name, array in named.items()}


CASES = {
    "openai": ("clip", openai, "authors"),
    "open_clip": ("siglip", open_clip, "authors"),
    "big_vision": ("siglip", big_vision, "big_vision"),
    "big_vision, a tensor for each block's": ("siglip", lambda s: big_vision(s, False), "big_vision"),
}  # fmt: skip


def written(path):
    return dict(np.load(path)) if path.suffix == ".npz" else load_file(path)


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_that_of_transformers_under_other_names_and_is_written_again(case, tmp_path):
    kind, rename, format = CASES[case]
    theirs = build(kind, eos_token_id=ENDS[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    named = {n: np.array(x, order="C") for n, x in rename(state).items()}
    path = tmp_path / ("renamed.npz" if format == "big_vision" else "renamed.safetensors")
    np.savez(path, **named) if format == "big_vision" else save_file(named, path)

    overrides = {} if format == "big_vision" else HEADS
    checkpoint = formats.read_checkpoint(path, **overrides)
    same = formats.read_checkpoint(tmp_path / "theirs")
    assert checkpoint.layout["format"] == format
    hints = {} if format == "big_vision" else TEXT_HEADS
    saved = saved_objectives.find_saved(checkpoint, ImageText, hints)
    expected = saved_objectives.find_saved(same, ImageText)
    of_transformers = ImageTextOptions(**expected.options)
    assert ImageTextOptions(**saved.options) == of_transformers
    # The same parameters of the same model give the vectors that test_text_towers.py compares.
    assert network(checkpoint.model_config) == network(same.model_config)
    for ours, others in (
        (checkpoint.params, same.params),
        (saved.read().params, expected.read().params),
    ):
        flat, other = (leaves_of(tree) for tree in (ours, others))
        assert flat.keys() == other.keys()
        for name, array in flat.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)

    checkpoint.objective, checkpoint.extras = saved, {}
    formats.write_checkpoint(checkpoint, again := tmp_path / f"again{path.suffix}", format)
    other = formats.read_checkpoint(tmp_path / "theirs")
    other.objective, other.extras, other.layout = expected, {}, {}
    formats.write_checkpoint(other, new := tmp_path / f"new{path.suffix}", format)
    alone = big_vision(state, False) if format == "big_vision" else named
    for file, wanted in ((again, named), (new, alone)):
        arrays = written(file)
        assert arrays.keys() == wanted.keys()
        for name, array in wanted.items():
            assert arrays[name].shape == array.shape, name
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    other.objective, other.extras = None, {}
    if format == "authors":
        with pytest.raises(CheckpointError, match="has none of theirs"):
            formats.write_checkpoint(other, tmp_path / "alone.safetensors", format)
        # What tensors do not tell is in the header.
        ours = saved_objectives.find_saved(formats.read_checkpoint(new))
        assert ImageTextOptions(**ours.options) == of_transformers


def network(config):
    """A config without what has no effect: positions of tokens that it has not."""
    unused = () if config.has_class_token else ("position_of_class",)
    return {n: x for n, x in vars(config).items() if n not in (*unused, "position_of_registers")}


def leaves_of(tree):
    import jax

    pairs, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in pairs}
