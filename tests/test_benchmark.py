"""The FLOPs a benchmark tells against XLA's count, and where it says the time goes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.base.errors import UserError
from vit_jax.benchmarks import input as input_benchmark
from vit_jax.benchmarks import step
from vit_jax.config import default_config
from vit_jax.data.decoding import decode
from vit_jax.models import registry


@pytest.mark.parametrize("name", ["ViT-Ti/16", "Mixer-S/32"])
def test_model_flops_are_those_xla_counts_of_the_unrolled_program(name):
    config = registry.model_config(name, unroll=0)
    definition, like = registry.abstract(config)
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    lowered = jax.jit(lambda p, x: nnx.merge(definition, p)(x).logits).lower(like, images)
    # XLA counts element-wise operations too: a few percent.
    assert lowered.cost_analysis()["flops"] == pytest.approx(2 * config.flops(), rel=0.05)


def tiny(**overrides):
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": "ViT-mu/8", "model.depth": 2, "data.image_size": 16, "batch_size": 8,
        "model.num_classes": 5,
    } | overrides)  # fmt: skip
    return config


def test_a_step_is_timed_in_all_in_parts_and_beside_another_image_by_image():
    other = tiny(**{"model.depth": 1, "batch_size": 16})
    result = step.step(tiny(), steps=2, breakdown=True, against=other)
    assert result["images_per_second"] == pytest.approx(8 / result["step_seconds"])
    assert result["choices"].startswith("attention: xla, layers: scanned")
    parts = ("attention", "mlp", "norms", "loss", "optimizer", "transfers")
    assert all(result[f"{part}_seconds"] > 0 for part in parts)
    assert np.isfinite(result["loss"]) and result["temporary_memory_bytes"] > 0
    ratio = result["step_seconds"] / 8 / result["against_image_seconds"]
    assert result["seconds_over_against"] == pytest.approx(ratio)
    flops = result["model_flops_per_step"] / 8 / result["against_image_flops"]
    assert result["flops_over_against"] == pytest.approx(flops) and 1 < flops < 2


def test_images_a_second_are_those_of_the_batch_that_a_budget_of_patches_makes():
    native = {
        "data.native_tokens": 4,
        "data.native_lengths": (4, 8),
        "eval.batch_size": 8,
        "augment.mixup": 0.0,
    }
    native |= {"data.native_budget": 192, "data.native_multiple": 8}
    result = step.step(tiny(**native), steps=1)
    assert result["batch_size"] == 24  # of the longest images; config.batch_size is 8
    assert result["images_per_second"] == pytest.approx(24 / result["step_seconds"])


@pytest.mark.slow
def test_steps_and_answers_of_a_model_that_segments_are_timed():
    maps = {"objective.name": "segmentation", "objective.head": "linear", "augment.mixup": 0.0}
    config = tiny(**maps, **{"model.num_classes": None})
    assert np.isfinite(step.step(config, steps=1)["loss"])
    assert step.inference(config, steps=1)["images_per_second"] > 0


@pytest.mark.slow
def test_a_profile_leaves_a_trace(tmp_path):
    step.step(tiny(), steps=1, profile=str(tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_inference_is_timed():
    result = step.inference(tiny(), steps=2)
    assert result["steps"] == 2 and result["images_per_second"] > 0


@pytest.mark.parametrize("copy", [False, True])
def test_input_is_timed_with_and_without_latency_in_one_run(copy):
    config = tiny(**{"model.num_classes": 10, "data.threads": 1})
    result = input_benchmark.input_pipeline(config, steps=4, latency_ms=20, copy=copy)
    ratio = result["latency_images_per_second"] / result["images_per_second"]
    assert result["latency_ratio"] == pytest.approx(ratio) and ratio > 0
    assert result["latency_read_requests_peak"] > 4 and result["latency_read_ahead_mib_peak"] > 0
    assert result["pixels"] == ("copies of files" if copy else decode.PIXELS)


@pytest.mark.slow
def test_a_model_without_blocks_has_no_breakdown():
    config = tiny(**{"model.name": "Mixer-S/8", "model.token_mlp_dim": 8, "model.width": 16})
    with pytest.raises(UserError, match="no Transformer blocks: no breakdown"):
        step.step(config, steps=1, breakdown=True)


@pytest.mark.slow
def test_inference_over_image_sizes_is_timed_where_a_model_takes_them_and_drawn(tmp_path, command):
    code, out, err = command(
        "benchmark", "speed", "--models=ViT-mu/16", "--image_sizes=30,32,64", f"--out={tmp_path}",
        "--steps=1", "--config.batch_size=8", "--json",
    )  # fmt: skip
    assert code == 0, err
    small, large = json.loads(out.splitlines()[-1])["rows"]  # patches do not divide 30
    assert (small["image_size"], large["image_size"]) == (32, 64)
    assert small["largest_batch"] > large["largest_batch"] > 0 < large["images_per_second"]
    assert {path.name for path in tmp_path.iterdir()} == {"speed.png", "largest_batch.png"}
