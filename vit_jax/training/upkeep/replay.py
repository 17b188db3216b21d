"""Devices that compute wrongly: each computes the gradient of its rows of a batch alone, and then another device
does the same for the same rows; whoever gets other bits is at fault.

It is a program beside the step, with the step's own gradient function, state and batch, but as if each device
were a run of its own: nothing is summed up, so that a wrong result stays where it was made. Whole parameters
are gathered on every device for it. What a device holds is audited in `audit`.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from vit_jax.base import patterns
from vit_jax.compute import digests
from vit_jax.devices import meshes, processes
from vit_jax.training.state import TrainState, shardings_of
from vit_jax.training.upkeep.audit import CordonHost, Events, describe
from vit_jax.training.upkeep.copies import gather_table, hosts

Batch = dict[str, jax.Array]
_ROLLS = (0, 1, 2)  # the third only where two disagree: a majority
_FINITE = digests.SUM_OF_BITS  # a column of a table: whether all elements are finite


@dataclasses.dataclass(frozen=True)
class WrongResult:
    """A device whose gradients are not those of the other devices.

    Attributes:
      device: its position in the mesh, as an index into `mesh.devices.flat`.
      certain: whether it is this device; else one of several.
      times: of the gradients that it computed for the comparison, how many were wrong.
      arrays: of which parameters.
    """

    device: int
    certain: bool
    times: int
    arrays: list[str]


class Replay:
    """The replay of a run's steps; every process calls the same methods in the same order."""

    def __init__(
        self,
        gradient_of: Callable,
        like: TrainState,
        mesh: jax.sharding.Mesh,
        events: Events,
        wait_minutes: float = processes.WAIT_MINUTES,
    ):
        """Takes the run's parts.

        Args:
          gradient_of: as `step.make_gradient` makes it, for the rows of one device as a batch.
          like: shapes, dtypes and shardings of the state.
        """
        self._mesh, self._events, self._wait = mesh, events, wait_minutes
        self._names = patterns.names(like.params)
        self._gradients = _make_program(gradient_of, like, mesh)
        self._shards = meshes.batch_shards(mesh)
        self._roll = jax.jit(
            lambda batch, k: {
                name: jnp.roll(x, k * (x.shape[0] // self._shards), axis=0)
                for name, x in batch.items()
            },
            static_argnums=1,
            out_shardings=meshes.batch_sharding(mesh),
        )
        self._differ = jax.jit(self._compare)
        self._compiled: dict[tuple, Callable] = {}
        self._clean = 0  # the last step whose replay showed nothing

    def compile(self, state: TrainState, batch: Batch) -> None:
        """Has the program compiled by all processes before any of them runs it."""
        shapes = tuple((name, batch[name].shape) for name in sorted(batch))
        if shapes not in self._compiled:
            self._compiled[shapes] = self._gradients.lower(state, batch).compile()
            processes.barrier("compiled a replay", self._wait)

    def check(self, step: int, state: TrainState, batch: Batch) -> None:
        """Replays the step that follows `step`.

        Raises:
          CordonHost: a host is at fault too often.
        """
        tables = [self._table(state, batch, roll) for roll in _ROLLS[:2]]
        if not int(self._differ(*tables)):
            self._clean = step
            return
        tables.append(self._table(state, batch, _ROLLS[2]))
        wrong = judge(
            [gather_table(table, self._mesh)[..., digests.DIGEST] for table in tables], self._names
        )
        message = f"replay of step {step + 1}: {self._named(wrong)}"
        if self._events.cordon:
            raise CordonHost(
                f"{message}. Checkpoints after step {self._clean}, at which a replay last showed nothing, may have "
                f"wrong results in them; {self._events.cordon}"
            )
        if jax.process_index() == 0:
            logging.error("%s. The replay's results are not used, and the run continues", message)

    def not_finite(self, step: int, state: TrainState, batch: Batch) -> str:
        """Who is at fault for gradients of the step after `step` that were not finite; '' if it is the data or the
        model: some rows give such gradients on every device.
        """
        tables = [gather_table(self._table(state, batch, roll), self._mesh) for roll in _ROLLS]
        wrong: collections.Counter[int] = collections.Counter()
        for reports in _reports(tables):
            bad = {
                d: sum(not report[:, _FINITE].all() for report in of) for d, of in reports.items()
            }
            if all(times == len(reports[device]) for device, times in bad.items()):
                return ""  # on every device
            wrong.update({device: times for device, times in bad.items() if times})
        if not wrong:
            return (
                "computed again from the same state and data they are: a device that cannot be named computed wrongly "
                "once"
            )
        what = ["gradients that are not finite"]
        return self._named(
            [WrongResult(d, True, times, what) for d, times in sorted(wrong.items())]
        )

    def _table(self, state: TrainState, batch: Batch, roll: int) -> jax.Array:
        self.compile(state, batch)
        shapes = tuple((name, batch[name].shape) for name in sorted(batch))
        return self._compiled[shapes](state, self._roll(batch, roll) if roll else batch)

    def _compare(self, own: jax.Array, rolled: jax.Array) -> jax.Array:
        """int32, 0 where all devices got the same bits for the same rows."""
        own, rolled = (x.reshape(self._shards, -1, *x.shape[-2:]) for x in (own, rolled))
        return jnp.sum(
            (own[:, :1] != jnp.roll(rolled, -1, axis=0)) | (own[:, :1] != own), dtype=jnp.int32
        )

    def _named(self, results: list[WrongResult]) -> str:
        """Who computed wrongly, in words; counts the events."""
        names, phrases = hosts(), []
        for result in results:
            device = self._mesh.devices.flat[result.device]
            host = names[device.process_index]
            for _ in range(result.times):
                self._events.add({host})
            who = describe(device, host)
            verb = "computed" if result.certain else "may have computed"
            others = f" and {len(result.arrays) - 1} others" if len(result.arrays) > 1 else ""
            phrases.append(
                f"{who} {verb} other gradients than another device for the same rows, {result.times} of "
                f"{len(_ROLLS)} times, of {result.arrays[0]}{others}"
            )
        return "; ".join(phrases)


def judge(tables: Sequence[np.ndarray], names: Sequence[str]) -> list[WrongResult]:
    """Which devices computed wrongly.

    Args:
      tables: for each roll of the rows by one more shard, (replica, data, fsdp, tensor, arrays, columns).
      names: of the arrays.
    """
    wrong: dict[tuple[int, bool], list[np.ndarray]] = collections.defaultdict(list)
    for reports in _reports(tables):
        for who, differing in _judge_shard(reports).items():
            wrong[who] += differing
    results = []
    for (device, certain), differing in sorted(wrong.items()):
        arrays = [names[i] for i in np.flatnonzero(np.any(differing, axis=0))]
        results.append(WrongResult(device, certain, len(differing), arrays))
    return results


def _reports(tables: Sequence[np.ndarray]) -> Iterator[dict[int, list[np.ndarray]]]:
    """For the rows of each shard what every device got that computed with them, (arrays, columns) for each time."""
    shards = int(np.prod(tables[0].shape[:3]))
    tables = [table.reshape(shards, -1, *table.shape[-2:]) for table in tables]
    for shard in range(shards):
        reports = collections.defaultdict(list)
        for roll, table in enumerate(tables):
            place = (shard + roll) % shards
            for tensor, report in enumerate(table[place]):
                reports[place * table.shape[1] + tensor].append(report)
        yield reports


def _judge_shard(
    reports: Mapping[int, Sequence[np.ndarray]],
) -> dict[tuple[int, bool], list[np.ndarray]]:
    """Who got wrong results for the rows of one shard: (device, whether that is certain) -> for each wrong result
    which arrays differ, bool (arrays,).

    Each device has one vote, and none if it contradicts itself.

    Args:
      reports: by device, (arrays, columns) for each time that it computed with the rows.
    """
    same = {device: all((report == of[0]).all() for report in of) for device, of in reports.items()}
    votes = collections.Counter(of[0].tobytes() for device, of in reports.items() if same[device])
    (best, count), *_ = votes.most_common(1) or [(b"", 0)]
    known = 2 * count > sum(votes.values())
    wrong = {}
    for device, of in reports.items():
        if known:
            right = next(o[0] for d, o in reports.items() if same[d] and o[0].tobytes() == best)
        else:  # Only a device that contradicts itself is known to be wrong.
            right = next((o[0] for d, o in reports.items() if d != device), of[0])
        if known or not same[device] or all(same.values()):
            differing = [(report != right).any(axis=-1) for report in of]
            certain = known or not same[device]
            wrong[device, certain] = [report for report in differing if report.any()]
    return {who: differing for who, differing in wrong.items() if differing}


def _make_program(gradient_of: Callable, like: TrainState, mesh: jax.sharding.Mesh) -> Callable:
    """(state, batch) -> uint32 (*mesh, parameters, 3): each device's own gradients' digests, and whether they are
    finite.
    """
    axes = mesh.axis_names
    # What the gradient does not read stays where it is; the rest is gathered.
    unread = {"opt_state": like.opt_state, "ema": like.ema}
    specs = jax.tree.map(lambda _: P(), like).replace(
        **{name: jax.tree.map(lambda x: x.sharding.spec, tree) for name, tree in unread.items()}
    )

    def of_device(state: TrainState, batch: Batch) -> jax.Array:
        # Alone, a device knows of no mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            grads, *_ = gradient_of(state, batch)
        rows = [
            digests.mark(g)
            .at[_FINITE]
            .set(jnp.isfinite(jnp.sum(g, dtype=jnp.float32)).astype(jnp.uint32))
            for g in jax.tree.leaves(grads)
        ]
        return jnp.stack(rows)[(None,) * len(axes)]

    program = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(specs, P(meshes.BATCH)),
        out_specs=P(*axes),
        check_vma=False,
    )
    return jax.jit(program, in_shardings=(shardings_of(like), meshes.batch_sharding(mesh)))
