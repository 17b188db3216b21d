"""Metrics on Weights & Biases, through its own package, which is not needed otherwise. Where it cannot
be reached, or is not there, the run continues without it.
"""

import pathlib
import uuid
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.install import pip_install
from vit_jax.training.upkeep.writers import Histogram, MetricWriter

ID = "wandb_id.txt"


class WandbWriter(MetricWriter):
    """A run there, which continues when ours does. WANDB_MODE=offline keeps it in the workdir."""

    def __init__(self, project: str, workdir: epath.Path, folder: pathlib.Path, config: dict):
        """Begins the run, or continues with it.

        Args:
          workdir: keeps the run's id; its name is the run's.
          folder: a local one, for the package's files.
          config: shown beside the metrics.
        """
        self._run = None
        try:
            import wandb
        except ImportError:
            logging.error(
                "config.log.wandb = %s: the package wandb is not installed (%s); the run continues without it",
                project, pip_install("wandb"),
            )  # fmt: skip
            return
        self._wandb = wandb

        def begin() -> None:
            kept = workdir / ID
            if not kept.exists():
                places.write_whole(kept, uuid.uuid4().hex[:8] + "\n")
            self._run = wandb.init(
                project=project, name=workdir.name, id=kept.read_text().strip(), resume="allow",
                dir=str(folder), config=config,
            )  # fmt: skip

        self._attempt(begin)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._log(step, lambda: dict(scalars))

    def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        image = lambda image_array: self._wandb.Image(image_array.squeeze())  # noqa: E731
        self._log(
            step,
            lambda: {name: [image(image_array) for image_array in x] for name, x in images.items()},
        )

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        drawn = self._wandb.Histogram
        self._log(
            step,
            lambda: {n: drawn(np_histogram=(h.counts, h.edges)) for n, h in histograms.items()},
        )

    def flush(self) -> None:
        """The package sends by itself."""

    def close(self) -> None:
        if self._run:
            self._attempt(self._run.finish)

    def _log(self, step: int, values: Callable[[], dict]) -> None:
        if self._run:
            self._attempt(lambda: self._run.log(values(), step=step))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Says what went wrong, and leaves the package alone from then on."""
        try:
            action()
        except (self._wandb.Error, OSError) as error:
            logging.error("Weights & Biases: %s; the run continues without it", error)
            self._run = None
