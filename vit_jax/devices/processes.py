"""Several processes as one run: how they find each other, wait for each other, agree, and end
together.

What they compute together is XLA's business, directed by the mesh (`meshes.py`). In a run of one
process nothing is started and every function here answers at once.

They meet at the door of process 0 (`door.py`). All else goes through JAX's coordination service, a small server in
process 0, and not through the devices: those may be busy, or gone.
"""

import atexit
import collections
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
import traceback

import jax
from jax._src import distributed as jax_distributed  # its client has no public name

from vit_jax.base import logs
from vit_jax.base.errors import UserError
from vit_jax.devices import engines, gpus, meeting
from vit_jax.devices.door import Door
from vit_jax.devices.meeting import START_AGAIN, HostsError

AUTO = "auto"  # the coordinator that the environment names
HEARTBEAT_SECONDS = 60
WAIT_MINUTES = 20.0
_FAILURE = "vit_jax/failure"
_LISTEN_SECONDS = 1.0
_LEAVE_SECONDS = 10
_CONNECT_SECONDS = 120
# The same in all processes: the calls of one name come in the same order, in whatever thread.
_turns = collections.defaultdict(itertools.count)


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    command: str = "in Python",
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    wait_minutes: float = WAIT_MINUTES,
    from_environment: bool = True,
) -> None:
    """Joins the run's other processes; before any device is used, and once.

    1. What the arguments say, or JAX's own variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
       JAX_PROCESS_ID;
    2. else what JAX finds around it, where that is more than one process: TPU pods and GKE, SLURM,
       Open MPI;
    3. else this process is alone, and nothing is started.

    It uses all devices of its node, or its share of them if it is not the node's only process.

    Args:
      coordinator: HOST:PORT on which process 0 listens.
      num_processes, process_id: how many there are, and which of them this is.
      command: of vit_jax, the same in all processes of a run.
      heartbeat_seconds: a process that gave no sign of life for this long is taken for dead, and
        all others end.
      wait_minutes: how long to wait for the others to join; after that, exit code 42.
      from_environment: whether a process without these three arguments joins the run that its environment names. An
        evaluation does not: in the shell of a worker it would join the run of that worker, and end it.

    Raises:
      ConfigError: only some of the three are given, or they make no sense; the processes do not belong together; or,
        at the first start of a run, the coordinator's port is held, or its run does not admit this process.
      HostsError: some of the others did not come, or cannot be joined.
    """
    gpus.reserve_memory(os.environ)
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None) and not from_environment:
        return
    if coordinator == AUTO:
        coordinator = None
    place = engines.find_place(coordinator, num_processes, process_id)
    if place is None:
        return
    seconds = wait_minutes * 60
    own = meeting.Participant(command, place.num_processes, place.process_id)
    address = _find_coordinator(place, seconds)
    if place.process_id == 0:
        door = Door(address, own)
        with meeting.reserved_port(address) as service_port:
            door.gather(service_port, seconds)
            _connect(address, service_port, place, heartbeat_seconds)
    else:
        door = meeting.Joined(address, own, seconds)
        _connect(address, door.service_port, place, heartbeat_seconds)
    listener = threading.Thread(target=_listen, name="vit_jax-hosts", daemon=True)
    listener.start()
    atexit.register(_leave, listener, door)


def index() -> int:
    """Which process this is, known before any device is used."""
    return jax_distributed.global_state.process_id if count() > 1 else 0


def count() -> int:
    """How many processes the run has, known before any device is used."""
    state = jax_distributed.global_state
    return state.num_processes if state.client else 1


def barrier(name: str, minutes: float = WAIT_MINUTES) -> None:
    """Waits for all processes. Raises `HostsError`, which names those that are late."""
    if count() == 1:
        return
    try:
        _client().wait_at_barrier(f"vit_jax/{name}", round(minutes * 60_000))
    except jax.errors.JaxRuntimeError as error:
        lines = str(error).splitlines()
        late = [line.strip() for line in lines if line.strip().isdigit()]
        who = f"no sign of process {', '.join(late)}" if late else lines[0]
        raise HostsError(f"waited {minutes:g} minutes for the others at {name!r}: {who}") from error


def gather(name: str, value: str, minutes: float = WAIT_MINUTES) -> list[str]:
    """The values that all processes pass, in their order, in each of them; waits for all.

    Raises:
      HostsError: see `barrier`.
    """
    if count() == 1:
        return [value]
    folder = f"vit_jax/{name}/{next(_turns[name])}"
    _client().key_value_set(f"{folder}/{index()}", value)
    barrier(name, minutes)
    answers = dict(_client().key_value_dir_get(folder))
    barrier(name, minutes)
    if index() == 0:
        _client().key_value_delete(folder)
    return [answers[f"{folder}/{process}"] for process in range(count())]


def broadcast_from_first(name: str, value: str, minutes: float = WAIT_MINUTES) -> str:
    """The value that process 0 passes, in all processes; waits for all. The values of the other processes are not sent.

    Raises:
      HostsError: see `barrier`.
    """
    if count() == 1:
        return value
    key = f"vit_jax/{name}/{next(_turns[name])}"
    if index() == 0:
        _client().key_value_set(key, value)
    barrier(name, minutes)
    answer = value if index() == 0 else _client().key_value_try_get(key)
    barrier(name, minutes)
    if index() == 0:
        _client().key_value_delete(key)
    return answer


def failures(name: str, failure: str, minutes: float = WAIT_MINUTES) -> dict[int, str]:
    """What failed in any process, by its index, in all of them; waits for all. Where nothing did,
    this costs no more than a barrier, however many processes there are.

    Args:
      failure: of this process; '' for none.

    Raises:
      HostsError: see `barrier`.
    """
    if count() == 1:
        return {0: failure} if failure else {}
    folder = f"vit_jax/failures/{name}/{next(_turns[f'failures/{name}'])}"
    try:
        if failure:
            _client().key_value_set(f"{folder}/{index()}", failure)
        barrier(f"failures/{name}", minutes)
        failed = _client().key_value_dir_get(folder)
    except jax.errors.JaxRuntimeError as error:
        raise HostsError(f"the other processes cannot be reached: {error}") from error
    return {int(key.rpartition("/")[2]): reason for key, reason in failed}


def post(name: str, value: str) -> None:
    """Leaves a value where the other processes find it, in place of an earlier one; waits for none."""
    if count() > 1:
        _client().key_value_set(f"vit_jax/posted/{name}/{index()}", value, allow_overwrite=True)


def posted(name: str) -> dict[int, str]:
    """The values that processes have posted so far, by their index; waits for none."""
    if count() == 1:
        return {}
    values = _client().key_value_dir_get(f"vit_jax/posted/{name}")
    return {int(key.rpartition("/")[2]): value for key, value in values}


def abort_all(message: str, code: int, *, stacks: bool = False) -> None:
    """Ends this process at once, and all others with it, each saying why.

    A process that ended alone would leave the others waiting in a collective: they are notified,
    meet at a last barrier and exit with the same code. If some do not come, they are dead or stuck,
    and the code is 42: start all again.

    Args:
      message: what happened.
      code: exit code.
      stacks: whether every process prints what each of its threads is doing.
    """
    if count() > 1:
        first = json.dumps({"process": index(), "message": message, "code": code, "stacks": stacks})
        try:
            _client().key_value_set(_FAILURE, first)
        except jax.errors.JaxRuntimeError:
            first = _failure() or first  # another process was faster, or process 0 is gone
        _end(json.loads(first), own=message)
    _say(message, stacks)
    _exit(code)


def abort_all_on_error(error: BaseException) -> None:
    """Ends all processes of a run because of an error in this one, see `leave`; a user's error by
    its message and code, any other with its traceback.
    """
    if isinstance(error, UserError):
        abort_all(str(error), error.exit_code)
    traceback.print_exception(error)
    abort_all(f"{type(error).__name__}: {str(error) or 'no message'}".splitlines()[0], 1)


def _end_alone(message: str, code: int) -> None:
    """Ends this process at once, and no other."""
    _say(message, stacks=False)
    _exit(code)


def _find_coordinator(place: engines.Place, seconds: float) -> str:
    try:
        return place.find_coordinator(round(seconds))
    except RuntimeError as error:  # of JAX's own search for it, such as for a pod's name
        raise HostsError(f"cannot find process 0 of {place.where}: {error}") from error


def _connect(
    address: str, service_port: int, place: engines.Place, heartbeat_seconds: float
) -> None:
    """Joins JAX's coordination service, once all processes have met.

    Args:
      address: HOST:PORT at which they met.
      service_port: of the service, on the same host.
      place: this process in its run.
      heartbeat_seconds: see `initialize`.

    Raises:
      HostsError: the service cannot be joined.
    """
    service = f"{address.rpartition(':')[0]}:{service_port}"
    message = (
        f"process {place.process_id} has met the others at {address}, and not all of them joined JAX's coordination "
        f"service at {service} within {_CONNECT_SECONDS} s. Hosts must reach each other on all ports above 1023"
    )
    # JAX itself would abort, and say less. Its client is not connected yet, so that this process ends by itself.
    late = threading.Timer(_CONNECT_SECONDS, _end_alone, (message, START_AGAIN))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            service,
            place.num_processes,
            place.process_id,
            place.local_device_ids,
            # JAX would listen on all interfaces even in a run on one machine.
            coordinator_bind_address=service if meeting.loopback_host(address) else None,
            cluster_detection_method="deactivate",  # It would restrict the devices, see `gpus`.
            initialization_timeout=_CONNECT_SECONDS + 60,
            heartbeat_timeout_seconds=int(heartbeat_seconds),
        )
    except jax.errors.JaxRuntimeError as error:
        raise HostsError(f"cannot join the other processes of {place.where}: {error}") from error
    finally:
        late.cancel()


def _client():
    return jax_distributed.global_state.client


def _failure() -> str | None:
    """What the first process to fail has reported, if any did and the service still answers."""
    try:
        return _client().key_value_try_get(_FAILURE)
    except jax.errors.JaxRuntimeError:
        return None


def _listen() -> None:
    """Ends this process when another one says that it leaves, whatever the main thread does."""
    while not _left.wait(_LISTEN_SECONDS):
        if _client() is None:  # shut down in good order
            return
        failure = _failure()
        if failure and json.loads(failure)["process"] != index():
            _end(json.loads(failure))


_left = threading.Event()


def _leave(listener: threading.Thread, door: Door | meeting.Joined) -> None:
    """Waits for the others as JAX would, and then for the listener: a thread that comes back from JAX's own code while
    Python ends would abort the process.
    """
    try:
        jax.distributed.shutdown()
    finally:
        _left.set()
        listener.join(_LEAVE_SECONDS)
        door.close()


_ending = threading.Lock()


def _end(failure: dict, own: str = "") -> None:
    """Reports a failure, meets the other processes at a last barrier, and exits."""
    _ending.acquire()  # Never released: the other thread of this process that ends it waits here.
    message = failure["message"]
    if failure["process"] != index():
        message = f"process {failure['process']} ended the run: {message}"
        if own == failure["message"]:
            message = own
        elif own:
            message = f"{own}\n{message}"
    _say(message, failure["stacks"])
    code = failure["code"]
    try:
        _client().wait_at_barrier("vit_jax/leave", _LEAVE_SECONDS * 1000)
    except jax.errors.JaxRuntimeError:
        code = START_AGAIN
    if index() == 0:
        time.sleep(1)  # The service must outlive the others: without it they abort.
    _exit(code)


def _say(message: str, stacks: bool) -> None:
    who = f"vit_jax[{index()}]" if count() > 1 else "vit_jax"
    if stacks:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    print(f"{logs.end_status()}{who}: {logs.printable(message)}", file=sys.__stderr__)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        stream.flush()
    os._exit(code)
