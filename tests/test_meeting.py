"""How the processes of a run meet at the door of process 0, and who is refused there."""

import concurrent.futures
import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.services.ports import free_port
from tests.waiting import PATIENCE, until
from vit_jax.base.errors import ConfigError
from vit_jax.devices import meeting
from vit_jax.devices.door import Door
from vit_jax.devices.meeting import HostsError, Joined, Participant

SERVICE_PORT = 4321


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def participant(process_id, num_processes=2, command="train", **changes):
    return Participant(command, num_processes, process_id, **changes)


@contextlib.contextmanager
def meeting_at(address, own, seconds=PATIENCE):
    """The door of process 0, and its gathering in another thread."""
    door = Door(address, own)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield door, pool.submit(door.gather, SERVICE_PORT, seconds), pool
    door.close()


@contextlib.contextmanager
def a_run_of_two(address):
    """A door at which both processes have met, and the connection of process 1."""
    with meeting_at(address, participant(0)) as (_, gathered, _):
        joined = Joined(address, participant(1), PATIENCE)
        gathered.result(PATIENCE)
        yield joined


def test_all_processes_learn_where_the_service_listens(address):
    with meeting_at(address, participant(0, 3)) as (_, gathered, pool):
        others = [pool.submit(Joined, address, participant(i, 3), PATIENCE) for i in (1, 2)]
        assert [other.result(PATIENCE).service_port for other in others] == [SERVICE_PORT] * 2
        gathered.result(PATIENCE)


def test_missing_processes_are_named_in_all_that_came(address):
    with meeting_at(address, participant(0, 4), seconds=1) as (_, gathered, _):
        with pytest.raises(HostsError, match="processes 1, 3 of 4 did not come"):
            Joined(address, participant(2, 4), PATIENCE)
        with pytest.raises(HostsError, match="processes 1, 3 of 4 did not come"):
            gathered.result(PATIENCE)


def test_the_one_that_waits_the_least_ends_the_wait_of_all(address):
    with meeting_at(address, participant(0, 3)) as (_, gathered, _):
        with pytest.raises(HostsError, match="process 2 of 3 did not come"):
            Joined(address, participant(1, 3), 0.5)
        with pytest.raises(HostsError, match="process 2 of 3"):
            gathered.result(PATIENCE)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"version": "0.1.7"}, "0.1.7.*the version of vit_jax"), ({"num_processes": 3}, "num_proc")],
    ids=["version", "number"],
)
def test_processes_that_do_not_belong_together_all_end_with_2(address, changes, field):
    with meeting_at(address, participant(0)) as (_, gathered, _):
        with pytest.raises(ConfigError, match=f"process 1 on .*{field}"):
            Joined(address, participant(1, **({"num_processes": 2} | changes)), PATIENCE)
        with pytest.raises(ConfigError, match=field):
            gathered.result(PATIENCE)


@pytest.mark.parametrize(("restarts", "error"), [("0", ConfigError), ("1", HostsError)])
def test_a_second_process_of_a_number_is_refused_itself(address, monkeypatch, restarts, error):
    monkeypatch.setenv("VIT_JAX_RESTARTS", restarts)
    with a_run_of_two(address):
        with pytest.raises(
            error, match=rf"as process 1: that is vit_jax train .*pid {os.getpid()}"
        ):
            Joined(address, participant(1), PATIENCE)
        with pytest.raises(error, match="as process 0: that is"):
            Joined(address, participant(0), PATIENCE)


def test_a_process_that_the_run_does_not_have_is_refused(address):
    with a_run_of_two(address), pytest.raises(ConfigError, match="process 2: it has 2 processes"):
        Joined(address, participant(2, 3), PATIENCE)


def test_another_command_is_refused_while_the_run_waits_for_its_own(address):
    with meeting_at(address, participant(0)) as (_, gathered, _):
        with pytest.raises(ConfigError, match="vit_jax train .* and this is vit_jax evaluate"):
            Joined(address, participant(1, command="evaluate"), PATIENCE)
        Joined(address, participant(1), PATIENCE)
        gathered.result(PATIENCE)


def test_one_that_ends_before_all_have_come_is_replaced(address):
    with meeting_at(address, participant(0, 3)) as (door, gathered, pool):
        killed = subprocess.Popen([
            sys.executable, "-c",
            "from vit_jax.devices.meeting import Joined, Participant;"
            f"Joined({address!r}, Participant('train', 3, 1), {PATIENCE})",
        ])  # fmt: skip
        until(lambda: 1 in door._members)
        killed.kill()
        killed.wait()
        until(lambda: 1 not in door._members)
        others = [pool.submit(Joined, address, participant(i, 3), PATIENCE) for i in (1, 2)]
        for other in others:
            assert other.result(PATIENCE).service_port == SERVICE_PORT
        gathered.result(PATIENCE)


def test_a_restarted_process_waits_until_the_run_of_its_predecessor_has_ended(address):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with a_run_of_two(address) as joined:
            joined.close()
            with pytest.raises(HostsError, match="process 1 of the run at .* has ended, and the"):
                Joined(address, participant(1), 0.1)
            waiting = pool.submit(Joined, address, participant(1), PATIENCE)
            with pytest.raises(concurrent.futures.TimeoutError):
                waiting.result(0.3)
        with meeting_at(address, participant(0)) as (_, gathered, _):
            gathered.result(PATIENCE)
            assert waiting.result(PATIENCE).service_port == SERVICE_PORT


def test_process_0_that_does_not_listen_is_named_with_the_reason(address):
    with pytest.raises(HostsError, match=f"--coordinator={address} .Connection refused"):
        Joined(address, participant(1), 0.1)


def test_a_name_that_does_not_resolve_is_named():
    with pytest.raises(HostsError, match=r"the name no-such-host\.invalid .* does not resolve"):
        Joined("no-such-host.invalid:1234", participant(1), 0.1)


def test_another_program_at_the_address_is_told_from_a_run():
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match="is another program, or another version"):
            Joined(f"127.0.0.1:{server.server_port}", participant(1), PATIENCE)
        server.shutdown()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[" * 100_000, b'{"participant": {"x": 1}}\n']
)
def test_what_is_no_process_of_vit_jax_does_not_disturb_the_door(address, said):
    with meeting_at(address, participant(0)) as (_, gathered, _):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        Joined(address, participant(1), PATIENCE)
        gathered.result(PATIENCE)


def test_a_held_port_names_the_run_that_holds_it(address):
    held = f"cannot listen on .*vit_jax train .*{os.getpid()}"
    with a_run_of_two(address), pytest.raises(ConfigError, match=held):
        Door(address, participant(0))


def test_a_reserved_port_is_given_once_and_to_grpc(address):
    with meeting.reserved_port(address) as port:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        with socket.socket() as shared:  # as gRPC binds
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind(("127.0.0.1", port))
            shared.listen()


@pytest.mark.parametrize(
    ("address", "host"), [("127.0.0.1:80", "127.0.0.1"), ("localhost:80", "localhost"),
                          ("[::1]:80", "::1"), ("10.0.0.3:80", None)],
)  # fmt: skip
def test_a_run_on_one_machine_listens_on_that_machine_alone(address, host):
    assert meeting.loopback_host(address) == host
