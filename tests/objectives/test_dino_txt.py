"""Text for a frozen image tower, and maps of images by words."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.models.conftest import parameters
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.evaluation.run import evaluate_run
from vit_jax.evaluation.templates import check_templates
from vit_jax.interchange import formats
from vit_jax.interchange.loading import load_run
from vit_jax.models import registry
from vit_jax.objectives.contract import ObjectiveContext
from vit_jax.objectives.image_text import patches
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextOptions
from vit_jax.pictures import masks
from vit_jax.prediction.images import find_images
from vit_jax.prediction.maps import write_maps
from vit_jax.prediction.words import WordSegmenter
from vit_jax.recipes.user_files import load_config
from vit_jax.training import loop
from vit_jax.training.assembly import resolve

TINY = dict(image_size=16, patch=8, width=16, depth=1, heads=2, mlp_dim=32, num_classes=0)


def build(objective: dict, **model):
    """An objective, the model and what the objective owns, its parameters random."""
    config = registry.model_config("ViT-S/16", **TINY | model)
    context = ObjectiveContext(config, (), (), total_steps=1, to_steps=int, batch_size=2)
    text = dict(text_depth=1, text_width=16, text_heads=2, text_mlp_dim=32, text_length=8)
    options = ImageTextOptions(**text | dict(vocabulary=259, text_end=1, text_pad=0) | objective)
    built = ImageText(options, context)
    model = nnx.eval_shape(lambda: registry.build(config, rngs=nnx.Rngs(0)))
    own = nnx.eval_shape(lambda: built.make_modules(nnx.Rngs(1)))
    random = np.random.default_rng(0)
    for module in (model, own):
        for _, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            parameter.set_value(jnp.float32(random.normal(size=parameter.shape, scale=0.3)))
    return built, model, own


@functools.partial(jax.jit, static_argnums=0)
def _computed(objective, definitions, states, images):
    model, own = map(nnx.merge, definitions, states)
    output = model(images)
    maps = patches.patch_vectors(objective, own, model, images)
    return output.tokens, objective.image_vectors(own, output), maps


def computed(objective, model, own, images):
    """Tokens, vectors of images and vectors of patches, in one program."""
    definitions, states = zip(nnx.split(model), nnx.split(own), strict=True)
    return _computed(objective, definitions, states, images)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def of_blocks(x: np.ndarray, head) -> np.ndarray:
    """dino.txt's blocks, norm and projection in float64, written from its description."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(head)))

    def norm(x, scale, bias):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * scale + bias

    def layer(p, x):
        y = norm(x, **p["attention_norm"])
        qkv = p["attention"]["qkv"]
        q, k, v = (
            np.einsum("bnd,dhc->bhnc", y, qkv["kernel"][:, i]) + qkv["bias"][i][:, None]
            for i in range(3)
        )
        logits = np.einsum("bhnc,bhmc->bhnm", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("bhnm,bhmc->bnhc", weights, v)
        out = p["attention"]["out"]
        y = np.einsum("bnhc,hcd->bnd", y, out["kernel"]) + out["bias"]
        x = x + p["attention_scale"]["scale"] * y
        up, down = p["mlp"]["up"], p["mlp"]["down"]
        y = norm(x, **p["mlp_norm"])
        gate, value = (y @ up["kernel"][:, i] + up["bias"][i] for i in (0, 1))
        y = gate / (1 + np.exp(-gate)) * value @ down["kernel"] + down["bias"]
        return x + p["mlp_scale"]["scale"] * y

    stacked = params["encoder"]["layers"]
    for i in range(2):
        x = layer(jax.tree.map(lambda p, i=i: p[i], stacked), x)
    return norm(x, **params["encoder"]["norm"]) @ params["projection"]["kernel"]


def test_vectors_are_those_of_dino_txt():
    objective, model, own = build(dict(image_blocks=2, embed=24), pool="token")
    images = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 16, 3)), jnp.float32)
    tokens, vectors, maps = computed(objective, model, own, images)
    x = of_blocks(np.asarray(tokens, np.float64), own.image_head)
    expected = np.concatenate([x[:, 0], x[:, 1:].mean(1)], axis=-1)
    np.testing.assert_allclose(vectors, unit(expected), atol=1e-5)
    np.testing.assert_allclose(maps.reshape(2, 4, -1), unit(x[:, 1:]), atol=1e-5)
    # Half of a text's vector is of the mean of patches.
    text = unit(np.random.default_rng(2).normal(size=(3, 24)))
    np.testing.assert_allclose(patches.part_of_texts(objective, text), unit(text[:, 12:]))
    # SwiGLU of 8/3 of the width, in steps of 64.
    assert objective.blocks.mlp_dim == 64 and objective.text_config().outputs == 24


@pytest.mark.parametrize("pool", ["mean", "map"])
def test_a_patch_of_a_pooled_tower_is_what_it_gives_of_the_patch_alone(pool):
    objective, model, own = build(dict(embed=8), pool=pool, keep_class_token=True)
    images = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 16, 3)), jnp.float32)
    tokens, _, maps = computed(objective, model, own, images)
    tokens = np.asarray(tokens[:, 1:])
    alone = tokens if pool == "mean" else model.pool(tokens.reshape(-1, 1, 16)).reshape(2, 4, 16)
    expected = unit(np.asarray(alone) @ own.image_projection.kernel[...])
    np.testing.assert_allclose(maps.reshape(2, 4, -1), expected, atol=1e-5)


def test_a_class_token_has_no_patches_like_texts_and_blocks_need_one():
    objective, *_ = build({}, pool="token")
    with pytest.raises(ConfigError, match="config.objective.image_blocks"):
        patches.check_patches(objective)
    with pytest.raises(ConfigError, match="config.objective.image_blocks = 1"):
        build(dict(image_blocks=1), pool="mean")
    with pytest.raises(ConfigError, match="config.objective.embed = 7"):
        build(dict(image_blocks=1, embed=7), pool="token")


def tiny(**objective):
    config = load_config("dino_txt:smoke")
    config.objective.update(dict(text_depth=1, text_width=16, text_heads=2, text_mlp_dim=32))
    config.objective.update(dict(image_blocks=1) | objective)
    config.batch_size, config.duration, config.eval.every = 8, "3 steps", "3 steps"
    config.log.every, config.checkpoint.every, config.audit.every = "1 steps", "3 steps", 0
    config.data.update(dict(image_size=32, eval_split="test[:8]"))
    config.eval.evaluators[1][1]["data"]["eval_split"] = "test[:8]"
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A file of a ViT, and a run of text for it."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = TINY | dict(image_size=32, num_classes=3, pool="token")
    model = registry.model_config("ViT-S/16", **sizes)
    checkpoint = formats.LoadedCheckpoint(model, parameters(model))
    formats.write_checkpoint(checkpoint, folder / "vit.npz", "official")
    config = tiny(image_drop_path=0.3)
    config.init_from = str(folder / "vit.npz")
    # It computes as in evaluation all the same.
    config.model.drop_path, config.eval.evaluators = 0.5, ()
    loop.train(config, folder / "texts")
    return folder


@pytest.mark.slow
def test_a_run_on_a_frozen_tower_keeps_its_bits_and_is_judged(runs):
    before, run = (load_run(runs / name) for name in ("vit.npz", "texts"))
    old, new = (patterns.named(registry.split(r.model)[1].params) for r in (before, run))
    assert {n for n in old if not n.startswith("head/")} == new.keys()
    assert all(np.array_equal(old[name], new[name]) for name in new)
    run.config.eval.evaluators = tiny().eval.evaluators
    metrics, _ = evaluate_run(run, resolve(run.config))
    assert metrics["retrieval/images"] == metrics["word_maps/images"] == 8
    assert 0 <= metrics["word_maps/mean_iou"] <= 1


def test_maps_by_words_are_written_and_are_the_evaluators(runs, tmp_path):
    run = load_run(runs / "texts")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 56, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    words = ("one", "seven", "nothing")
    segmenter = WordSegmenter(run, words, threshold=-0.5)
    result = write_maps(
        segmenter, find_images([str(tmp_path / "a.png")]), tmp_path / "out", batch_size=2
    )
    # What is like none of the words is a class before theirs, black; without it the first word has a colour.
    words = ("none of these", *words)
    assert result["images"] == 1 and result["classes"] == list(words)
    (scores,) = segmenter.answers(*segmenter.weights, pixels[None, :32, :32])
    cosines = np.log(scores[..., 1:] / scores[..., :1]) - 0.5
    assert scores.shape == (1, 4, 4, 4) and np.abs(cosines).max() <= 1
    of_none, of_words = (masks.palette(3, black=black).any(1).tolist() for black in (True, False))
    assert of_none == [False, True, True] and all(of_words)
    mask = np.asarray(Image.open(tmp_path / "out/a.png"))
    assert mask.shape[:2] == (40, 56)
    table = json.loads((tmp_path / "out/maps.json").read_text())
    assert table["classes"] == {word: i for i, word in enumerate(words)}
    assert abs(sum(table["images"][0]["classes"].values()) - 1) < 1e-6


def test_words_that_make_no_map_are_refused(runs):
    for words in ([""], ["one"], ["one", "!"], ["one", "One"]):
        with pytest.raises(ConfigError, match="--words"):
            WordSegmenter(None, words)
    with pytest.raises(ConfigError, match="has no text tower"):
        WordSegmenter(load_run(runs / "vit.npz"), ["one", "two"])
    with pytest.raises(ConfigError, match=r"templates: 'a'"):
        check_templates(("a",), "here")
