"""The drill for TPUs runs on a CPU, so that nothing but the figures is new on a TPU."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks import tpu_drill
from vit_jax.devices import chips
from vit_jax.planning import hlo


def test_traced_operations_stand_beside_what_they_take_at_least(tmp_path):
    @jax.jit
    def turns(x, kernel):
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.exp(-jnp.square(x @ kernel)), x)

    x, kernel = jnp.ones((64, 128)), jnp.ones((128, 128))
    compiled = turns.lower(x, kernel).compile()
    with jax.profiler.trace(tmp_path):
        for _ in range(tpu_drill.STEPS):
            jax.block_until_ready(compiled(x, kernel))
    program, tpu = hlo.parse(compiled.as_text()), chips.TPUS["v5e"]
    table = list(tpu_drill.rows(program, tpu, tpu_drill.read_trace(tmp_path)))
    products = [row for row in table if "product" in row["kind"]]
    assert sum(row["products"] for row in products) == pytest.approx(
        1e6 * 4 * 2 * 64 * 128 * 128 / tpu.peak
    )
    assert all(row["measured"] > row["products"] and row["bytes"] > 0 for row in products)
    sums = tpu_drill.by_kind(table)
    assert sum(row["measured"] for row in sums) == pytest.approx(
        sum(row["measured"] for row in table)
    )
    assert all(row["measured_over_estimated"] is None for row in sums)  # None on CPUs.


@pytest.mark.slow
def test_the_drill_is_rehearsed(tmp_path):
    out = tmp_path / "drill.json"
    command = [sys.executable, tpu_drill.__file__, "--rehearse", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    case = json.loads(out.read_text())["rehearsal"]
    assert case["kinds"][0]["measured"] > 0 and case["operations_us"] <= 3 * case["step_us"]
