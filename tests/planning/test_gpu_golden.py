"""What recipes compile to for GPUs is what was reviewed: see `gpu_golden.py`. Runs where JAX's compiler for CUDA is
installed, which the tests' environment has not: 4.4 GB.
"""

import json

import pytest

from tests.planning import gpu_golden
from vit_jax.base.errors import ConfigError
from vit_jax.planning import target

pytestmark = pytest.mark.slow
REWRITE = "if this is meant: python -m tests.planning.gpu_golden"


@pytest.fixture(autouse=True)
def compiler():
    try:
        target.find("h100:1")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", gpu_golden.CASES)
def test_a_recipe_compiles_for_gpus_to_what_was_reviewed(name):
    reviewed = gpu_golden.read(name)
    if reviewed["versions"] != gpu_golden.versions():
        pytest.skip(f"reviewed with {reviewed['versions']}, here {gpu_golden.versions()}")
    case = gpu_golden.CASES[name]
    now = json.loads(json.dumps(gpu_golden.reviewed_part(case, gpu_golden.plan_of(case))))
    assert now == {key: reviewed[key] for key in now}, f"{name} {REWRITE} {name}"


@pytest.mark.parametrize("name", gpu_golden.COMPILED)
def test_models_compile_for_one_gpu(name):
    made = gpu_golden.plan_of(gpu_golden.COMPILED[name])
    assert made["fits"] and made["seconds"]["floor"] > 0
    # Nothing that multiplies is missed: attention by cuDNN is not in the count of the traced step.
    parts = made["roofline"]
    assert parts["matrix products"]["flops"] == pytest.approx(made["flops_per_device"], rel=0.03)
