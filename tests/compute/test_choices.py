"""What is chosen for a device, and the sentence that says so."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base.errors import ConfigError
from vit_jax.compute import attend, choices, gpu
from vit_jax.compute import platform as platforms
from vit_jax.compute.choices import AUTO
from vit_jax.data.options import Data
from vit_jax.devices import gpus, meshes
from vit_jax.evaluation.forward import make_forward
from vit_jax.models import registry
from vit_jax.models.zoo import vit_zoo
from vit_jax.planning import collectives, hlo, target


def one_device():
    return meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])


def test_a_formula_is_that_of_the_platform_or_plain(monkeypatch):
    @platforms.by_platform
    def same(x):
        return x

    @same.on("gpu")
    def negative(x):
        return -x

    found = {}
    for platform in ("cpu", "gpu", "tpu", "another"):
        monkeypatch.setattr(platforms, "current", lambda platform=platform: platform)
        found[platform] = same(1)
    assert found == {"cpu": 1, "gpu": -1, "tpu": 1, "another": 1}
    assert same.plain(1) == 1


def test_cpus_and_tpus_compute_some_formulas_their_own_way(monkeypatch):
    x, kernel = jax.numpy.ones((1, 2, 4)), jax.numpy.ones((4, 3, 2, 2))

    def lowered(platform):
        monkeypatch.setattr(platforms, "current", lambda: platform)
        return jax.jit(lambda *a: attend.project(*a)).lower(x, kernel, None).as_text()

    programs = {lowered(platform) for platform in ("cpu", "gpu", "tpu")}
    assert len(programs) == 3


def attention_on(platform, monkeypatch, asked="auto", tokens=197, **options):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    given = dict(queries=tokens, keys=tokens, heads=12, head_size=64, dtype="bfloat16") | options
    return attend.choose(asked, **given)


def test_the_implementation_of_attention_is_chosen_by_device_type_and_shape(monkeypatch):
    assert attention_on("cpu", monkeypatch, tokens=4096) == "xla"
    assert attention_on("gpu", monkeypatch) == "cudnn"
    assert attention_on("gpu", monkeypatch, tokens=65) == "xla"
    assert attention_on("gpu", monkeypatch, tokens=577) == "cudnn"
    assert attention_on("gpu", monkeypatch, tokens=577, dtype="float32") == "xla"
    assert attention_on("gpu", monkeypatch, tokens=577, head_size=36) == "xla"
    assert attention_on("tpu", monkeypatch) == "short"
    assert attention_on("tpu", monkeypatch, tokens=1025, head_size=128) == "short"
    assert attention_on("tpu", monkeypatch, tokens=7) == "xla"
    assert attention_on("tpu", monkeypatch, tokens=8) == "short"
    assert attention_on("tpu", monkeypatch, tokens=2560) == "short"
    assert attention_on("tpu", monkeypatch, head_size=72) == "short"
    assert attention_on("tpu", monkeypatch, head_size=36) == "xla"
    assert attention_on("tpu", monkeypatch, tokens=1370, head_size=36) == "splash"
    assert attention_on("tpu", monkeypatch, tokens=4097) == "splash"
    assert attention_on("cpu", monkeypatch, asked="splash") == "splash"
    assert attention_on("cpu", monkeypatch, asked="short") == "short"


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
def test_no_published_size_takes_plain_attention_from_224_to_1024_pixels(kind, monkeypatch):
    monkeypatch.setattr(platforms, "device_kind", lambda: kind)
    for (_, width, _, heads), patch in itertools.product(vit_zoo.SIZES.values(), (14, 16, 32)):
        shape = dict(heads=heads, head_size=width // heads)
        for pixels in range(224, 1025, 32):
            tokens = (pixels // patch) ** 2 + 1
            assert attention_on("tpu", monkeypatch, tokens=tokens, **shape) != "xla"


def test_kernels_are_for_as_many_queries_as_keys(monkeypatch):
    assert attention_on("gpu", monkeypatch, tokens=577, queries=1) == "xla"
    assert attention_on("tpu", monkeypatch, asked="splash", queries=1) == "xla"


def test_no_kernel_is_chosen_where_a_bias_is_added(monkeypatch):
    assert attention_on("gpu", monkeypatch, tokens=577, biased=True) == "xla"
    assert attention_on("tpu", monkeypatch, tokens=4097, biased=True) == "xla"
    with pytest.raises(ConfigError, match="model.attention=cudnn cannot add a bias"):
        attention_on("gpu", monkeypatch, asked="cudnn", tokens=577, biased=True)


def test_heads_that_the_kernel_for_short_sequences_does_not_take_are_an_error(monkeypatch):
    with pytest.raises(ConfigError, match="attention=short takes 8 to 2560 tokens.*12 heads of 36"):
        attention_on("tpu", monkeypatch, asked="short", head_size=36)


def test_a_kernel_of_gpus_is_refused_elsewhere(monkeypatch):
    with pytest.raises(ConfigError, match="cudnn needs a GPU, and this is computed on a CPU"):
        attention_on("cpu", monkeypatch, asked="cudnn", tokens=577)


@pytest.mark.parametrize(
    ("platform", "asked", "layers", "policy", "expected"),
    [
        ("cpu", AUTO, 12, "none", 12),
        ("cpu", AUTO, 12, "full", 1),
        ("cpu", AUTO, 48, "none", 1),
        ("gpu", AUTO, 12, "none", 12),
        ("gpu", AUTO, 12, "save_products", 12),
        ("gpu", AUTO, 64, "none", 1),
        ("gpu", 0, 24, "none", 24),
        ("tpu", AUTO, 12, "none", 1),
        ("tpu", 0, 12, "none", 12),
        ("cpu", 5, 12, "full", 5),
        ("cpu", 20, 12, "none", 12),
    ],
)
def test_layers_are_unrolled_where_it_pays(monkeypatch, platform, asked, layers, policy, expected):
    monkeypatch.setattr(platforms, "current", lambda: platform)
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
        ("tpu", "ViT-S/16", "auto", "save_products"),
        ("tpu", "BiT-R50x1", "auto", "none"),
        ("gpu", "ViT-S/16", "auto", "none"),
    ],
)
def test_cpus_and_tpus_store_few_arrays_but_all_of_convolutions(
    monkeypatch, platform, name, asked, expected
):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    assert choices.remat(registry.model_config(name, remat=asked)) == expected


def test_a_cpu_computes_in_float32_what_it_would_emulate(monkeypatch, kit):
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: False)
    config = kit.config(dtype="bfloat16")
    parameters = kit.parameters(config)
    images = np.random.default_rng(2).integers(0, 256, kit.images.shape, np.uint8)
    data = Data(mean=(0.5,) * 3, std=(0.5,) * 3)

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
def test_a_cpu_with_bfloat16_computes_products_in_bfloat16_but_no_convolutions(
    monkeypatch, name, asked, expected
):
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: True)
    config = registry.model_config(name, dtype="bfloat16", dtype_on_cpu=asked)
    assert choices.with_compute_dtype(config).dtype == expected


def test_another_device_computes_as_the_config_says(monkeypatch, kit):
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    config = kit.config(dtype="bfloat16")
    assert choices.with_compute_dtype(config) is config


def test_options_for_gpus_are_known_to_xla_and_not_used_for_cpus():
    compiled = jax.jit(lambda x: x + 1).lower(1.0)
    compiled.compile(compiler_options=gpu.COMPILER_OPTIONS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        compiled.compile(compiler_options={"xla_gpu_no_such_option": True})
    assert choices.compiler_options(one_device()) == {}


def test_on_tpus_a_scattered_product_is_computed_whole():
    mesh = meshes.make_mesh({"data": 4, "fsdp": 1, "tensor": 1}, target.find("v5e:2x2").devices)
    rows = NamedSharding(mesh, P("data"))
    x, y = (jax.ShapeDtypeStruct((4 * 2048, d), jnp.bfloat16, sharding=rows) for d in (256, 512))

    def exchanges(options):
        product = jax.jit(lambda x, y: x.T @ y, out_shardings=rows, compiler_options=options)
        program = hlo.parse(product.lower(x, y).compile().as_text())
        return [(c.kind, c.times) for c in collectives.find(program)]

    # XLA's default: windows that are passed on.
    assert {kind for kind, _ in exchanges({})} == {"collective-permute"}
    assert exchanges(choices.compiler_options(mesh)) == [("reduce-scatter", 1)]


def test_memory_of_gpus_is_reserved_unless_the_user_says_how():
    environment = {}
    gpus.reserve_memory(environment)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.9"}
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    gpus.reserve_memory(chosen)
    assert chosen == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_the_platform_is_that_of_the_mesh():
    with jax.set_mesh(one_device()):
        assert platforms.current() == "cpu"


def test_all_choices_are_said_in_one_line(monkeypatch, kit):
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: False)
    config = kit.config(dtype="bfloat16", unroll=AUTO, remat="save_attention")
    summary = choices.summarize(config, one_device(), ["xla"])
    assert summary.startswith(
        "attention: xla, layers: scanned, remat: save_attention, computed in: "
    )
    assert (
        "float32 (bfloat16 would be emulated; set config.model.dtype_on_cpu=same to compute in it)"
        in summary
    )
    assert "layers: unrolled" in choices.summarize(
        dataclasses.replace(config, unroll=0), one_device()
    )


@pytest.mark.parametrize(
    ("name", "remat"),
    [("Mixer-S/32", "save_products"), ("BiT-R50x1", "none"), ("R26+ViT-S/32", "none")],
)
def test_every_family_says_its_choices(name, remat):
    assert f"remat: {remat}" in choices.summarize(registry.model_config(name), one_device())
