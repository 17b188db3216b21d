"""How a process finds its run: it connects to the door that process 0 has opened at the run's address (`door.py`), says
who it is, and waits there for the other processes.

Both sides send one line of JSON. `processes.py` begins the run once all processes have met.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from vit_jax.base import starts
from vit_jax.base.errors import ConfigError, UserError

START_AGAIN = 42
# The states that an answer of the door has.
BEGIN = "begin"  # with `port`: all processes have come
END = "end"  # with `message` and `code`: all processes end
REFUSED = "refused"  # with `message`: this process ends, and the run continues
LATER = "later"  # with `message`: this process tries again
_CONNECT_SECONDS = 10.0
_GRACE_SECONDS = 20.0  # for an answer after the wait: it says which processes did not come
_RETRY_SECONDS = 0.5
_LONGEST_LINE = 1 << 16


class HostsError(UserError):
    """Other processes of the run cannot be reached. Start all of them again."""

    exit_code = START_AGAIN


@dataclasses.dataclass(frozen=True)
class Participant:
    """A process that wants to be part of a run.

    Attributes:
      command: of vit_jax, such as 'train'.
      num_processes, process_id: how many processes it expects, and which of them it is.
      version: of vit_jax.
      host, pid: where it is, for messages.
      since: when it started to wait, for messages.
    """

    command: str
    num_processes: int
    process_id: int
    version: str = dataclasses.field(default_factory=lambda: sys.modules["vit_jax"].__version__)
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)
    since: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %Z"))

    def __str__(self) -> str:
        return f"vit_jax {self.command} on {self.host} (pid {self.pid}, since {self.since})"


class Joined:
    """The connection of a process to the door. It is open for as long as this process lives.

    Args:
      address: HOST:PORT of process 0.
      own: this process.
      seconds: how long to wait for all other processes.

    Attributes:
      service_port: the port of JAX's coordination service on the host of process 0.

    Raises:
      ConfigError: the processes of the run do not belong together, in all of them; or the run does not admit this
        process at its first start.
      HostsError: other processes did not come; or the run does not admit this process at a restart.
    """

    def __init__(self, address: str, own: Participant, seconds: float):
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            self._connection, answer = _try_to_join(address, own, left)
            if answer["state"] != LATER:
                break
            if left == 0:
                waited = f"process {own.process_id} waited {duration(seconds)}"
                raise HostsError(f"{waited}: {answer['message']}")
            time.sleep(_RETRY_SECONDS)
        raise_unless_begun(answer)
        self.service_port = answer["port"]

    def close(self) -> None:
        """Tells the door that this process has ended."""
        self._connection.close()


@contextlib.contextmanager
def reserved_port(address: str) -> Iterator[int]:
    """A free port for a server of gRPC in this process, kept until that server listens.

    gRPC lets two servers share a port, and each of their clients may reach either. So a socket that does not listen
    keeps the port: another run that looks for a free one does not get it.

    Args:
      address: HOST:PORT of the run; the port is free on the same interfaces.
    """
    host = loopback_host(address) or ""
    with socket.socket(address_family(host)) as reserving:
        reserving.bind((host, 0))
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield reserving.getsockname()[1]


def address_family(host: str) -> socket.AddressFamily:
    """The family of the sockets for a loopback host, or for '', all interfaces of IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def loopback_host(address: str) -> str | None:
    """The host of HOST:PORT if it means this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    return host if host in ("localhost", "::1") or host.startswith("127.") else None


def _try_to_join(
    address: str, own: Participant, seconds: float
) -> tuple[socket.socket | None, dict[str, Any]]:
    """One try to join a run.

    Args:
      address: HOST:PORT of process 0.
      own: this process.
      seconds: how long to wait for the other processes.

    Returns:
      A connection and the answer of the door. Without a connection, the answer has the reason.
    """
    try:
        connection = connect(address, min(seconds, _CONNECT_SECONDS))
    except OSError as error:
        return None, {"state": LATER, "message": _unreachable(address, error)}
    try:
        answer = ask(connection, own, seconds, grace_seconds=_GRACE_SECONDS)
    except OSError as error:
        answer = {"state": LATER, "message": _unreachable(address, error)}
    except ValueError:
        answer = refused(
            f"what listens at --coordinator={address} does not answer as process 0 of vit_jax {own.version}: it is "
            "another program, or another version. Give the run another --coordinator, or all processes one version"
        )
    if answer["state"] == LATER:
        connection.close()
    return connection, answer


def connect(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=max(1.0, seconds))


def ask(
    connection: socket.socket, own: Participant, seconds: float, grace_seconds: float = 0.0
) -> dict[str, Any]:
    """Says who this process is, and waits for the answer of the door.

    Args:
      connection: to the door.
      own: this process.
      seconds: how long this process waits for the other processes.
      grace_seconds: how much longer it waits for the answer, which then says who did not come.

    Raises:
      OSError: the door closes the connection, or does not answer in time.
      ValueError: another program answers.
    """
    hello = {"participant": dataclasses.asdict(own), "seconds": seconds}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    connection.settimeout(seconds + grace_seconds)
    with connection.makefile("rb") as lines:
        line = lines.readline(_LONGEST_LINE)
    if not line:
        raise ConnectionResetError("it closed the connection")
    return json.loads(line)


def _unreachable(address: str, error: OSError) -> str:
    host = address.rpartition(":")[0]
    if isinstance(error, socket.gaierror):
        return f"the name {host} of --coordinator={address} does not resolve ({error.strerror})"
    reason = error.strerror or str(error)
    return f"process 0 does not answer at --coordinator={address} ({reason}). Was it started?"


def raise_unless_begun(answer: dict[str, Any]) -> None:
    """Raises the error that an answer stands for, if it stands for one.

    Raises:
      ConfigError, HostsError: see `Joined`.
    """
    if answer["state"] == REFUSED:
        raise own_failure(answer["message"])
    if answer["state"] == END:
        failure = ConfigError if answer["code"] == ConfigError.exit_code else HostsError
        raise failure(answer["message"])


def own_failure(message: str) -> UserError:
    """The error of a process that ends alone. It is final at a first start, where no second try would help."""
    return HostsError(message) if starts.is_restart() else ConfigError(message)


def refused(message: str) -> dict[str, Any]:
    """The answer to a process that is not admitted."""
    return {"state": REFUSED, "message": message}


def duration(seconds: float) -> str:
    """A time as messages give it."""
    return f"{seconds / 60:.3g} minutes"
