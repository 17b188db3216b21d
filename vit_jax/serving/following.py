"""`serve --follow`: a newer checkpoint of a run takes the place of the one that is served; no request is lost."""

import asyncio
from collections.abc import Callable

from absl import logging
from etils import epath

from vit_jax.base import buckets
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import reading
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.serving.map_network import MapNetwork
from vit_jax.serving.network import Network

SECONDS = 10.0  # between two looks at a run


class Follower:
    """Looks for newer checkpoints of a run, and gives them to the network that is served.

    Where that fails, it is logged once, and the model that is served stays. A checkpoint that cannot be read, such as
    one that the run removes meanwhile, is tried again; one of another model, or with other classes, is not.
    """

    def __init__(
        self,
        path: epath.PathLike,
        served: TrainedModel,
        network: Network | MapNetwork,
        load: Callable[[epath.Path], TrainedModel],
    ):
        """Starts with what is served.

        Args:
          path: a run's workdir, for the newest checkpoint, or WORKDIR/best for the best.
          served: the checkpoint that `network` has now.
          load: reads a checkpoint.

        Raises:
          ConfigError: it is the checkpoint of no run, or one alone.
        """
        self._path, self._network, self._load = epath.Path(path), network, load
        self._served = epath.Path(served.directory)
        self._refused: set[epath.Path] = set()
        self._reported: set[epath.Path] = set()
        if self._served.parent.name != reading.FOLDER or self._path.name == self._served.name:
            raise ConfigError(
                f"--checkpoint={path} does not change: with --follow set --checkpoint=WORKDIR, a run's workdir, or "
                "WORKDIR/best"
            )

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Serves the run's newest, or best, checkpoint, unless it is served already or is refused."""
        folder = None
        try:
            folder = reading.find_checkpoint(self._path)
            if folder == self._served or folder in self._refused:
                return
            run = self._load(folder)
            self._network.replace(run)
        except ConfigError as error:
            self._refused.add(folder)
            self._report(folder, f"is not served: {error}")
        except Exception as error:  # noqa: BLE001  whatever it is, requests are answered
            known = isinstance(error, CheckpointError) or buckets.is_failure(error)
            why = error if known else repr(error)
            self._report(folder or self._path, f"cannot be served, and is tried again: {why}")
        else:
            self._served = folder
            logging.info("step %d is served now, from %s", run.step, folder)

    def _report(self, path: epath.Path, why: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            logging.warning("%s %s; step %d is served", path, why, self._network.step)
