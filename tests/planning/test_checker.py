"""libtpu's checker of wrong results takes our options, on every kind of TPU; compiled without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.compute import choices
from vit_jax.planning import target


def compiled(topology: str, **more) -> jax.stages.Compiled:
    mesh = Mesh(np.array(target.find(topology).devices[:1]), ("data",))
    options = choices.compiler_options(mesh) | choices.checker_options(mesh) | more
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(lambda x: x @ x, compiler_options=options).lower(x).compile()


@pytest.mark.parametrize(
    "topology",
    ["v5e:2x2", *(pytest.param(t, marks=pytest.mark.slow) for t in ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"))],
)  # fmt: skip
def test_the_checkers_options_are_taken(topology):
    mesh = Mesh(np.array(target.find(topology).devices[:1]), ("data",))
    assert choices.checker_options(mesh)["xla_tpu_enable_sdc_checker"]
    assert compiled(topology).as_text()


@pytest.mark.slow
def test_an_option_that_the_checker_does_not_know_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_sdc_unknown"):
        compiled("v5e:2x2", xla_tpu_sdc_unknown=True)


def test_other_platforms_have_no_checker():
    assert choices.checker_options(Mesh(np.array(jax.devices()[:1]), ("data",))) == {}
