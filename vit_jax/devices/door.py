"""The door of a run: process 0 opens it at the run's address, admits each process number once, and tells all processes
the port of JAX's coordination service.

JAX's service does not know strangers: a second process of one number ends the run that it joins. The door keeps a
connection to every process, and so it knows which processes are still there. The other side is in `meeting.py`.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import socket
import threading
import time
from typing import Any

from vit_jax.base.errors import ConfigError
from vit_jax.devices import meeting
from vit_jax.devices.meeting import Participant, loopback_host

_GRACE_SECONDS = 10.0  # for further processes to come, once two of them are known to differ
_HOLDER_SECONDS = 2.0  # for an answer of the program that holds a port of this machine
_HELLO_SECONDS = 10.0
_BACKLOG = 4096  # connections of processes that come at the same time
_NAMED = 10  # missing processes that a message names
# A host that vanishes closes no connection. So it is asked for a sign of life after 30 seconds, and every ten seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Door:
    """The server of process 0 at the run's address. It is open for as long as the run lasts.

    Args:
      address: HOST:PORT that all processes were given.
      own: process 0.

    Raises:
      ConfigError: another program listens on the port, at the first start of a run.
      HostsError: the same, at a restart.
    """

    def __init__(self, address: str, own: Participant):
        self._address = address
        self._own = own
        self._members = {}  # admitted processes that are still connected, by their numbers
        self._has_begun = False
        self._deadline = math.inf
        self._seconds = math.inf  # that the process which waits the least waits
        self._changed = asyncio.Event()
        self._is_closed = asyncio.Event()
        self._loop = concurrent.futures.Future()
        serve = self._serve(_listening(address, own))
        self._thread = threading.Thread(
            target=asyncio.run, args=(serve,), name="vit_jax-door", daemon=True
        )
        self._thread.start()

    def gather(self, service_port: int, seconds: float) -> None:
        """Waits until all processes have come, and tells them so.

        Args:
          service_port: where JAX's coordination service is going to listen.
          seconds: how long to wait.

        Raises:
          ConfigError: the processes have different versions or different ideas of their number.
          HostsError: some processes did not come. All that came raise the same error.
        """
        gathering = self._gather(service_port, seconds)
        decision = asyncio.run_coroutine_threadsafe(gathering, self._loop.result()).result()
        meeting.raise_unless_begun(decision)

    def close(self) -> None:
        """Refuses further processes: the run has ended."""
        self._loop.result().call_soon_threadsafe(self._is_closed.set)
        self._thread.join()

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._answer, sock=listening, backlog=_BACKLOG)
        self._loop.set_result(asyncio.get_running_loop())
        await self._is_closed.wait()
        server.close()

    async def _gather(self, service_port: int, seconds: float) -> dict[str, Any]:
        self._wait_at_most(seconds)
        while self._missing():
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        decision = self._decision(service_port)
        self._has_begun = decision["state"] == meeting.BEGIN
        for _, writer in list(self._members.values()):
            with contextlib.suppress(ConnectionError):  # It has just ended; JAX will miss it.
                await _send(writer, decision)
        return decision

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection until it is closed."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            hello = await _read_hello(reader)
            if hello is None:  # No process of vit_jax, or of a version that says other things.
                return
            participant, seconds = hello
            refusal = self._refusal(participant)
            if refusal:
                await _send(writer, refusal)
                return
            _keep_alive(writer.get_extra_info("socket"))
            self._members[participant.process_id] = (participant, writer)
            self._come(participant, seconds)
            try:
                await reader.read()  # It sends nothing more: this waits until it has ended.
            finally:
                del self._members[participant.process_id]

    def _come(self, participant: Participant, seconds: float) -> None:
        """Counts a process that has come and waits at most `seconds` more."""
        if self._difference(participant):
            seconds = _GRACE_SECONDS
        self._wait_at_most(seconds)
        self._changed.set()

    def _wait_at_most(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if deadline < self._deadline:
            self._deadline = deadline
            self._seconds = seconds

    def _refusal(self, participant: Participant) -> dict[str, Any] | None:
        """The answer to a process that is not admitted; `None` for one that is."""
        number = participant.process_id
        holder = self._own if number == 0 else None
        if number in self._members:
            holder, _ = self._members[number]
        what = f"cannot join the run at {self._address} as process {number}"
        advice = "Give a run of its own another --coordinator"
        if participant.command != self._own.command:
            other = f"process 0 is {self._own}, and this is vit_jax {participant.command}"
            return meeting.refused(f"{what}: {other}. {advice}")
        if holder is not None:
            return meeting.refused(
                f"{what}: that is {holder}. {advice}, or end the other one first"
            )
        if self._has_begun and number < self._own.num_processes:
            message = (
                f"process {number} of the run at {self._address} has ended, and the run has not yet"
            )
            return {"state": meeting.LATER, "message": message}
        if self._has_begun:
            return meeting.refused(f"{what}: it has {self._own.num_processes} processes. {advice}")
        return None

    def _missing(self) -> list[int]:
        numbers = range(1, self._own.num_processes)
        return [number for number in numbers if number not in self._members]

    def _difference(self, participant: Participant) -> str:
        """How a process differs from process 0; '' if it does not."""
        for name in ("version", "num_processes"):
            value = getattr(participant, name)
            expected = getattr(self._own, name)
            if value != expected:
                field = "the version of vit_jax" if name == "version" else f"--{name}"
                return (
                    f"process {participant.process_id} on {participant.host} has {value}, and process 0 on "
                    f"{self._own.host} has {expected} as {field}"
                )
        return ""

    def _decision(self, service_port: int) -> dict[str, Any]:
        """The answer to all processes that have come."""
        for _, (participant, _) in sorted(self._members.items()):
            difference = self._difference(participant)
            if difference:
                message = f"the processes of the run at {self._address} do not belong together: {difference}"
                return {"state": meeting.END, "code": ConfigError.exit_code, "message": message}
        missing = self._missing()
        if missing:
            message = (
                f"{_processes(missing)} of {self._own.num_processes} did not come to {self._address} within "
                f"{meeting.duration(self._seconds)}. Was each started, with this --coordinator, and can it reach that "
                "address?"
            )
            return {"state": meeting.END, "code": meeting.START_AGAIN, "message": message}
        return {"state": meeting.BEGIN, "port": service_port}


def _listening(address: str, own: Participant) -> socket.socket:
    """A socket that listens at the run's address: of a run on one machine on loopback, else on all interfaces."""
    port = int(address.rpartition(":")[2])
    host = loopback_host(address) or ""
    try:
        if not host and socket.has_dualstack_ipv6():
            everywhere = ("::", port)
            return socket.create_server(everywhere, family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server((host, port), family=meeting.address_family(host))
    except OSError as error:
        holder = _holder(address, own)
        raise meeting.own_failure(
            f"process 0 cannot listen on the port {port} of --coordinator={address}: {os.strerror(error.errno)}. "
            f"{holder}End it, or choose another port in all processes"
        ) from error


def _holder(address: str, own: Participant) -> str:
    """Who holds the port of a run, as a sentence."""
    try:
        with contextlib.closing(meeting.connect(address, _HOLDER_SECONDS)) as connection:
            answer = meeting.ask(connection, own, _HOLDER_SECONDS)
    except (OSError, ValueError):  # It does not listen, or is no process of vit_jax.
        return "Is another run, or an earlier start of this one, still there? "
    return f"This process {answer['message']}. " if answer["state"] == meeting.REFUSED else ""


async def _read_hello(reader: asyncio.StreamReader) -> tuple[Participant, float] | None:
    """Who has connected, and how long it waits; `None` if it says something else, or nothing in time."""
    try:
        line = await asyncio.wait_for(reader.readline(), _HELLO_SECONDS)
        hello = json.loads(line)
        return Participant(**hello["participant"]), float(hello["seconds"])
    except (TimeoutError, ValueError, TypeError, KeyError, RecursionError):
        return None


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _processes(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    named = ", ".join(map(str, numbers[:_NAMED]))
    rest = len(numbers) - _NAMED
    return f"processes {named}{f' and {rest} more' if rest > 0 else ''}"
