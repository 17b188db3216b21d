"""Which decoder a run has is said, and is the same in all its processes."""

import logging
import os
import socket
import subprocess
import sys

import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import decode, decoders


def test_the_decoder_is_said_and_what_it_costs_to_have_none_that_is_compiled(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(decode, "_native", object())
    assert decoders.agree(default_config()) == "native"
    assert "images are decoded by the compiled decoder" in caplog.text
    monkeypatch.setattr(decode, "_native", None)
    assert decoders.agree(default_config()) == "OpenCV"
    message = caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.WARNING
    assert "40 % of the speed" in message and "apt-get install gcc" in message


def test_processes_with_different_decoders_are_refused_unless_that_is_allowed():
    assert decoders.common(["native"] * 4, False) == "native"
    names = ["native", "OpenCV", "native", "OpenCV"]
    with pytest.raises(ConfigError) as raised:
        decoders.common(names, False)
    assert "(OpenCV: process 1, 3; native: process 0, 2)" in str(raised.value)
    assert "--config.data.mixed_decoders=True" in str(raised.value)
    assert decoders.common(names, True) == "OpenCV, native"
    with pytest.raises(
        ConfigError, match="process 0, 1, 2, 3, 4, 5, 6, 7 and 2 more; native: process 10"
    ):
        decoders.common(["OpenCV"] * 10 + ["native"], False)


@pytest.mark.slow
def test_no_process_starts_where_one_of_two_has_another_decoder():
    code = """
import sys
from vit_jax.config import default_config
from vit_jax.data import decode, decoders
from vit_jax.devices import processes
processes.initialize(sys.argv[1], 2, int(sys.argv[2]))
decode._native = None if processes.index() else object()
try:
    decoders.agree(default_config())
except decoders.ConfigError as error:
    print(error)
processes.barrier("end")
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(i)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for i in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in running]
    assert said[0] == said[1] and "(OpenCV: process 1; native: process 0)" in said[0]
