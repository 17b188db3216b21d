"""Which of several processes holds up the others, by real processes and their real times; in whole runs:
`integration/test_hosts.py`.
"""

import sys

from tests.integration.conftest import Hosts
from tests.integration.test_hosts import assert_named

SLOW = """
import sys, time
from etils import epath
from vit_jax.config import Hosts
from vit_jax.devices import processes
from vit_jax.training.upkeep.clock import Clock
from vit_jax.training.upkeep.stragglers import Stragglers

processes.initialize()
clock = Clock(epath.Path(sys.argv[1]), Hosts(), write=False)
stragglers = Stragglers(clock)
clock.training()
for step in range(9):
    with clock.during("input"):
        time.sleep(1.0 if processes.index() == 2 else 0.1)
    with clock.waiting():
        processes.barrier(f"step {step}")
    stragglers.log(step)
processes.barrier("end")
"""


def test_the_process_that_holds_up_the_others_is_named(tmp_path):
    run = Hosts(tmp_path / "logs", [sys.executable, "-c", SLOW, str(tmp_path)], 3, 1)
    try:
        assert run.codes() == [0, 0, 0], run.log(0)
    finally:
        run.kill()
    assert_named(run, 2)
