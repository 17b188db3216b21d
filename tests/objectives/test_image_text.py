"""Learning from images and texts: frozen image towers, both judges, and what cannot be learned from."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax.base.errors import ConfigError
from vit_jax.data.texts import TextRows
from vit_jax.evaluation import retrieval, words
from vit_jax.evaluation.run import evaluate_run, make_judges
from vit_jax.evaluation.templates import TEMPLATES, with_run_templates
from vit_jax.interchange.loading import load_run
from vit_jax.objectives.image_text.image_text import ImageTextOptions
from vit_jax.planning import plan
from vit_jax.recipes.user_files import load_config
from vit_jax.training import loop
from vit_jax.training.assembly import assemble, resolve


def tiny(**objective):
    config = load_config("image_text:smoke")
    config.model.update(dict(depth=1, width=16, heads=2, mlp_dim=32, patch=16))
    config.objective.update(dict(text_depth=1) | objective)
    config.batch_size, config.duration, config.eval.every = 16, "3 steps", "3 steps"
    config.log.every, config.checkpoint.every, config.audit.every = "1 steps", "3 steps", 0
    config.data.eval_split = "test[:24]"
    return config


def test_a_frozen_image_tower_keeps_its_bits_and_learns_nothing(tmp_path):
    config = resolve(tiny(loss="softmax", text="clip", embed=8))
    frozen = tiny(loss="softmax", text="clip", embed=8)
    frozen.optim.freeze = ("(?!objective/).*",)
    assembly = assemble(resolve(frozen), num_classes=0, examples_per_epoch=100)
    state = jax.jit(assembly.init)(jax.random.key(0))
    batch = {
        "image": jnp.asarray(np.random.default_rng(0).integers(0, 255, (16, 32, 32, 3)), jnp.uint8),
        "tokens": jnp.asarray(np.random.default_rng(1).integers(3, 200, (16, 16)), jnp.int32)
        .at[:, 9]
        .set(1),
    }
    step, before = jax.jit(assembly.train_step), jax.device_get(state.params)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    after = jax.device_get(state.params)
    assert losses[-1] < losses[0]
    own, old = after.pop("objective"), before.pop("objective")
    assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(before)))
    assert not np.array_equal(own["text"]["token_table"], old["text"]["token_table"])
    # No gradient of the image tower is computed.
    whole = assemble(config, num_classes=0, examples_per_epoch=100)
    trains_all = jax.jit(whole.train_step)

    def flops(step, like):
        return step.lower(like, batch).cost_analysis()["flops"]

    assert flops(step, state) < flops(trains_all, jax.eval_shape(whole.init, jax.random.key(0)))


def test_a_run_is_judged_by_retrieval_and_by_classes(tmp_path):
    config = tiny()
    evaluators, config.eval.evaluators = config.eval.evaluators, ()
    loop.train(config, tmp_path)
    run = load_run(tmp_path)
    assert run.objective_modules is None  # the model answers without it
    run.config.eval.evaluators = evaluators
    again, _ = evaluate_run(run, resolve(run.config))
    assert again["retrieval/images"] == 24 and again["zero_shot/examples"] == 24
    assert 0 <= again["retrieval/image_to_text_1"] <= again["retrieval/image_to_text_10"] <= 1
    # A suite, and an evaluator by its name alone, make texts like the captions of the run.
    for name in ("cat", "dog"):
        (tmp_path / "sets/cifar10" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "sets/cifar10" / name / "0.png")
    suite, _ = make_judges(run, resolve(run.config), "zero_shot", str(tmp_path / "sets"))
    data = {"name": "folder", "path": str(tmp_path / "sets/cifar10"), "eval_split": "test"}
    config = run.config.copy_and_resolve_references()
    config.eval.evaluators = (("zero_shot", {"data": data | {"holdout": 1.0}}),)
    named, _ = make_judges(run, resolve(config))
    for _, evaluator in (*suite.evaluators, *named.evaluators):
        assert evaluator.options.templates == run.config.eval.evaluators[1][1]["templates"]


def test_templates_are_those_of_the_run_unless_others_are_named():
    white = {"templates": ("a white {}",)}
    own = ("retrieval", ("zero_shot", white), ("zero_shot", {"prefix": "clip"}))
    taken = with_run_templates(("zero_shot", "word_maps", ("zero_shot", {"prefix": "a"})), own)
    assert taken == (
        ("zero_shot", white), ("word_maps", {}), ("zero_shot", {"prefix": "a"} | white),
    )  # fmt: skip
    clip = (("zero_shot", {"templates": TEMPLATES}), ("zero_shot", {"prefix": "clip"}))
    assert with_run_templates(clip, own) == clip


def test_recall_counts_the_nearest_right_one():
    images, texts = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[[0, 0, 2, 1]]
    pairs = np.asarray([(0, 0), (0, 1), (1, 2), (2, 3)])
    found = retrieval.recalls(images, texts, pairs, (1, 3))
    assert found["image_to_text_1"] == 1 / 3 and found["text_to_image_1"] == 0.5
    same = np.ones((3, 1), np.float32)  # one vector for all
    assert retrieval.recalls(same, same, np.asarray([(i, i) for i in range(3)]), (1,)) == {
        "image_to_text_1": 0.0, "text_to_image_1": 0.0, "images": 3, "texts": 3,
    }  # fmt: skip


def test_prompts_are_canonical_and_wordnet_ids_have_names():
    assert (
        words.prompt("Great_White-Shark", "A photo of the {}!") == "a photo of the great whiteshark"
    )
    assert words.names_of(["n01440764"]) == ["tench"] and words.names_of(["a"]) == ["a"]


@pytest.mark.parametrize(
    ("text", "names", "warned"),
    [
        ("siglip", ["C", "C++", "Java", "C#"], ["the same text, .*: 'C', 'C\\+\\+', 'C#' .1 groups"]),
        ("siglip", ["cat", "!!!", "dog"], ["no token is left: '!!!' .1."]),
        ("siglip", ["great_white", "Great White!", "a", "A"], ["'great_white', 'Great White!'; 'a', 'A'"]),
        ("siglip", ["x" * 40 + "a", "x" * 40 + "b"], ["the same text"]),  # cut to 32 tokens
        ("clip", ["Cat", "cat"], ["'Cat', 'cat'"]),
        ("clip", ["C", "C++", "!!!"], []),
        ("siglip", ["cat", "dog"], []),
    ],
)  # fmt: skip
def test_classes_whose_texts_are_alike_are_named_in_a_warning(text, names, warned, caplog):
    rows = TextRows(ImageTextOptions(text=text, text_length=32))
    words.warn_of_names(names, "a photo of {}", rows, text)
    assert len(caplog.messages) == len(warned)
    for message, expected in zip(caplog.messages, warned, strict=True):
        assert re.search(expected, message)


def test_prompts_of_clip_are_those_of_its_authors():
    named = (["Great White"], ["a photo of a {}."])
    assert words.prompts(*named, "clip") == ["a photo of a Great White."]
    assert words.prompts(*named, "siglip") == ["a photo of a great white"]


def test_a_plan_needs_no_number_of_classes():
    assert plan.make_assembly(tiny()).step_flops > 0


def test_one_pair_has_nothing_to_compare_with():
    config = tiny()
    config.batch_size = 1
    with pytest.raises(ConfigError, match="config.batch_size = 1"):
        assemble(resolve(config), num_classes=0, examples_per_epoch=100)
