"""What is chosen for a device, and how it is told."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from vit_jax.compute import choices, partitioning
from vit_jax.compute.choices import AUTO
from vit_jax.devices import meshes
from vit_jax.evaluation.forward import make_forward
from vit_jax.models import registry


def one_device():
    return meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])


@pytest.mark.parametrize(
    ("platform", "asked", "layers", "policy", "expected"),
    [
        ("cpu", AUTO, 12, "none", 12),
        ("cpu", AUTO, 12, "full", 1),
        ("gpu", AUTO, 24, "none", 24),
        ("gpu", AUTO, 48, "none", 1),
        ("tpu", AUTO, 12, "none", 1),
        ("tpu", 0, 12, "none", 12),
        ("cpu", 5, 12, "full", 5),
        ("cpu", 20, 12, "none", 12),
    ],
)
def test_layers_are_unrolled_where_it_pays(monkeypatch, platform, asked, layers, policy, expected):
    monkeypatch.setattr(partitioning, "platform", lambda: platform)
    assert choices.unrolled(asked, layers, policy) == expected


@pytest.mark.parametrize(
    ("platform", "name", "asked", "expected"),
    [
        ("cpu", "ViT-S/16", "auto", "save_products"),
        ("cpu", "Mixer-S/32", "auto", "save_products"),
        ("cpu", "BiT-R50x1", "auto", "none"),
        ("cpu", "R26+ViT-S/32", "auto", "none"),
        ("cpu", "ViT-S/16", "none", "none"),
        ("cpu", "BiT-R50x1", "full", "full"),
        ("tpu", "ViT-S/16", "auto", "none"),
        ("gpu", "ViT-S/16", "auto", "none"),
    ],
)
def test_cpus_store_few_arrays_but_all_of_convolutions(
    monkeypatch, platform, name, asked, expected
):
    monkeypatch.setattr(partitioning, "platform", lambda: platform)
    assert choices.remat(registry.model_config(name, remat=asked)) == expected


def test_a_cpu_computes_in_float32_what_it_would_emulate(monkeypatch, kit):
    monkeypatch.setattr(choices, "has_amx", lambda: False)
    config = kit.config(dtype="bfloat16")
    parameters = kit.parameters(config)
    images = np.random.default_rng(2).integers(0, 256, kit.images.shape, np.uint8)
    data = SimpleNamespace(mean=(0.5,) * 3, std=(0.5,) * 3)

    def logits(config):
        definition, _ = registry.abstract(config)
        weights = registry.Weights(parameters, {})
        return jax.jit(make_forward(definition, config, data))(weights, images).logits

    exact = logits(kit.config(dtype="float32"))
    np.testing.assert_array_equal(logits(config), exact)
    insists = kit.config(dtype="bfloat16", dtype_on_cpu="same")
    assert not np.array_equal(logits(insists), exact)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("ViT-S/16", "auto", "bfloat16"),
        ("ViT-S/16", "float32", "float32"),
        ("Mixer-S/32", "auto", "bfloat16"),
        ("BiT-R50x1", "auto", "float32"),
        ("R26+ViT-S/32", "auto", "float32"),
    ],
)
def test_a_cpu_with_amx_computes_products_in_bfloat16_but_no_convolutions(
    monkeypatch, name, asked, expected
):
    monkeypatch.setattr(choices, "has_amx", lambda: True)
    config = registry.model_config(name, dtype="bfloat16", dtype_on_cpu=asked)
    assert choices.computed(config).dtype == expected


def test_another_device_computes_as_the_config_says(monkeypatch, kit):
    monkeypatch.setattr(partitioning, "platform", lambda: "tpu")
    config = kit.config(dtype="bfloat16")
    assert choices.computed(config) is config


def test_the_platform_is_that_of_the_mesh():
    with jax.set_mesh(one_device()):
        assert partitioning.platform() == "cpu"


def test_all_choices_are_told_in_one_line(monkeypatch, kit):
    monkeypatch.setattr(choices, "has_amx", lambda: False)
    config = kit.config(dtype="bfloat16", unroll=AUTO, remat="save_attention")
    told = choices.told(config, one_device())
    assert told.startswith("attention: xla, layers: scanned, remat: save_attention, computed in: ")
    assert (
        "float32 (bfloat16 would be emulated; config.model.dtype_on_cpu=same insists on it)" in told
    )
    assert "layers: unrolled" in choices.told(dataclasses.replace(config, unroll=0), one_device())


@pytest.mark.parametrize(
    ("name", "remat"),
    [("Mixer-S/32", "save_products"), ("BiT-R50x1", "none"), ("R26+ViT-S/32", "none")],
)
def test_every_family_tells_its_choices(name, remat):
    assert f"remat: {remat}" in choices.told(registry.model_config(name), one_device())
