"""Every copy of the state is audited while a run trains: bits that memory or links changed are found, reported with
their device and host, and corrected.

1. After a step that is due, every device computes marks of its arrays, and copies are compared. If they differ, steps
   may have computed with wrong bits, so the run goes back to its last good checkpoint.
2. Before the next step, and before a save, every device compares its arrays with its own marks. If they differ, the
   wrong bits were not used yet: they are replaced by the bits of a good copy, and the run continues as if nothing had
   happened. An array without a second copy cannot be healed, so the run goes back here too.

`copies` makes the marks and heals copies, `replay` finds devices that compute wrongly. An audit cannot find bits that
change and change back within a step, nor wrong bits that a step spreads to all copies.
"""

import collections
import dataclasses

import jax
import numpy as np
from absl import logging

from vit_jax import config
from vit_jax.base import patterns
from vit_jax.base.errors import UserError
from vit_jax.devices import processes
from vit_jax.training.state import TrainState
from vit_jax.training.upkeep.copies import Copies, Findings, Marks, hosts
from vit_jax.training.verdicts import Restore

_NAMED = 5  # arrays in a message
# Arrays that no step changes: a fixed teacher and the parameters below adapters.
_CONSTANT = ("frozen_teachers", "base")


class WrongState(Restore):
    """The state on the devices is not the state that was computed. The run continues from an earlier one."""

    exit_code = processes.START_AGAIN


class CordonHost(UserError):
    """One host was at fault too often. Take it out of the cluster, and start again."""

    exit_code = processes.START_AGAIN


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Marks of one step, and the earlier marks that they were compared with."""

    step: int
    marks: Marks
    before: jax.Array
    kept: np.ndarray


class Events:
    """How often each host was at fault.

    Attributes:
      cordon: which host to take out, as a sentence; '' for none.
    """

    def __init__(self, most: int):
        """Args: `most`: `config.audit.most`."""
        self._most = most
        self._count = collections.Counter()
        self.cordon = ""

    def add(self, at_fault: set[str]) -> None:
        """Counts one event for each of these hosts."""
        self._count.update(at_fault)
        host, count = self._count.most_common(1)[0]
        if count >= self._most:
            times = "once" if count == 1 else f"{count} times"
            self.cordon = (
                f"the host {host} was at fault {times} (config.audit.most = {self._most}): cordon it, so that the "
                "scheduler does not use it, have its memory and accelerators tested, and start again"
            )


class Audit:
    """The audit of a run; every process calls the same methods in the same order."""

    def __init__(
        self, options: config.Audit, like: TrainState, mesh: jax.sharding.Mesh, events: Events
    ):
        """Args: `like`: shapes, dtypes and shardings of the state."""
        self._options = options
        self._events = events
        self._copies = Copies(_tree(like), mesh)
        parts = [name.partition("/")[0] for name in self._copies.names]
        self._constant = np.array([part in _CONSTANT for part in parts])
        self._all = np.ones_like(self._constant)
        self._taken: _Taken | None = None

    def start(self, step: int, state: TrainState) -> None:
        """Marks a state that was just made or restored."""
        self._taken = None
        self._take(step, state)

    def after(self, step: int, state: TrainState) -> None:
        """Marks the state after a step that is due; does not wait for the devices."""
        if step % self._options.every == 0:
            self._take(step, state)

    def before(self, step: int, state: TrainState) -> TrainState:
        """The state that the next step begins with, verified if it was marked after `step`.

        Raises:
          WrongState: it is wrong, and no device has the right one.
          CordonHost: the same, and a host is at fault too often.
        """
        return self.verify(step, state) if self._taken.step == step else state

    def verify(self, step: int, state: TrainState) -> TrainState:
        """The state after `step`, verified now; raises as `before` does."""
        if self._taken.step != step:
            self._take(step, state)
            return self._resolved(self._taken, state, used=True)
        state = self._resolved(self._taken, state, used=True)
        before = self._taken.marks.of_devices
        marks = self._copies.mark(_tree(state), before, self._all)
        return self._resolved(_Taken(step, marks, before, self._all), state, used=False)

    def marks_of(self, parts: dict) -> dict[str, np.ndarray]:
        """The result of `fingerprints.fingerprint` for parts of the state that was verified last."""
        marks = np.asarray(self._taken.marks.totals)
        totals = dict(zip(self._copies.names, marks, strict=True))
        return {
            name: np.stack([totals[array] for array in patterns.names({name: part})])
            for name, part in parts.items()
        }

    def _take(self, step: int, state: TrainState) -> None:
        last = self._taken
        before = last.marks.of_devices if last else self._copies.none()
        kept = self._constant if last else np.zeros_like(self._all)
        marks = self._copies.mark(_tree(state), before, kept)
        self._taken = _Taken(step, marks, before, kept)

    def _resolved(self, taken: _Taken, state: TrainState, *, used: bool) -> TrainState:
        """The state, healed where that is needed.

        Args:
          used: whether steps may have computed with the wrong bits.
        """
        if not int(taken.marks.wrong):
            return state
        findings = self._copies.find(taken.marks, taken.before, taken.kept)
        message = f"audit after step {taken.step}: {self._named(findings)}"
        if used and self._options.differing == "rollback":
            self._give_up(f"{message}. Steps may have computed with them")
        if not findings.curable or not findings.faults:
            self._give_up(f"{message}. No other device has the right ones")
        _log(f"{message}. A good copy's bits took their place, and the run continues")
        healed = self._copies.heal(_tree(state), findings)
        state = _with_tree(state, healed)
        if used:  # From now on the marks of the healed state are compared.
            self._take(taken.step, state)
        return state

    def _give_up(self, message: str) -> None:
        if self._events.cordon:
            raise CordonHost(f"{message}, and {self._events.cordon}")
        raise WrongState(message)

    def _named(self, findings: Findings) -> str:
        """Who holds wrong bits, in words; counts the event."""
        names = hosts()
        arrays = collections.defaultdict(list)
        for fault in findings.faults:
            key = (fault.device, fault.certain, fault.why)
            arrays[key].append(fault.array)
        phrases = []
        at_fault = set()
        for (position, certain, why), of_device in arrays.items():
            device = self._copies.mesh.devices.flat[position]
            host = names[device.process_index]
            at_fault.add(host)
            holds = "holds" if certain else "may hold"
            listed = ", ".join(of_device[:_NAMED])
            others = " and others" if len(of_device) > _NAMED else ""
            phrases.append(
                f"{describe(device, host)} {holds} wrong bits in {listed}{others} ({why})"
            )
        if at_fault:
            self._events.add(at_fault)
        return "; ".join(phrases) or "the devices do not agree on what differs"


def describe(device: jax.Device, host: str) -> str:
    """A device, its process and its host, in words."""
    return f"device {device.id} of process {device.process_index} on {host}"


def _log(message: str) -> None:
    if jax.process_index() == 0:
        logging.error("%s", message)


def _tree(state: TrainState) -> dict:
    """All arrays of a state, by part."""
    by_part = state.parts()
    for name in _CONSTANT:
        tree = getattr(state, name)
        if tree is not None:
            by_part[name] = tree
    return by_part


def _with_tree(state: TrainState, tree: dict) -> TrainState:
    others = {name: tree[name] for name in _CONSTANT if name in tree}
    return state.with_parts(tree).replace(**others)
