"""What `vit_jax serve` does: a model of any checkpoint behind a port, until it is stopped."""

import asyncio
import resource
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.export.engines import AUTO, XLA
from vit_jax.interchange.formats import describe_model
from vit_jax.prediction.overrides import load_for_images
from vit_jax.serving.following import Follower
from vit_jax.serving.limits import Limits
from vit_jax.serving.map_network import MapNetwork
from vit_jax.serving.network import Network


def serve(
    path: epath.PathLike,
    *,
    host: str,
    port: int,
    batch_size: int,
    limits: Limits,
    announce: Callable[[dict[str, Any]], None],
    names: Collection[str] = (),
    follow: bool = False,
    drain: float = 0.0,
    engine: str = "xla",
    precision: str = "float32",
    settings: Sequence[tuple[str, str]] = (),
    model_options: Mapping[str, Any] | None = None,
) -> None:
    """Serves a model until SIGTERM or SIGINT; then answers the requests that are there.

    Args:
      path: of a run, or of a checkpoint of any format.
      host, port: where to listen; port 0: any that is free.
      batch_size: images, or their windows, computed together, at most.
      names: host names of requests, see `Server`.
      follow: whether newer checkpoints of a run take the place of the one that is served, see `following.py`.
      drain: seconds; for so long requests are still taken after the signal, see `Server.stop`.
      engine, precision: what computes classes, see `engines.make_classifier`.
      announce: called with `url` and `model` once requests are taken.
      settings: of the run's config, see `overrides.of_images`.
      model_options: see `loading.load_run`.

    Raises:
      ConfigError: it is not known how images are normalised, the engine cannot have the model, or nothing can listen
        there.
    """
    try:
        from vit_jax.serving.server import Server
    except ImportError as error:
        raise ConfigError(f"serve needs {error.name}: {pip_install('serve')}") from error
    run = load_for_images(path, settings, "serve", model_options)
    if run.objective_modules is None:
        network = Network(run, batch_size, engine, precision)
    elif engine not in (AUTO, XLA):
        raise ConfigError(f"{path}: --engine={engine} computes classes, and the model segments")
    else:
        network = MapNetwork(run, batch_size)
    about = {
        "model": describe_model(
            run.model_config,
            run.config.model.name,
            of_pixels=len(run.classes) if run.objective_modules else 0,
        ),
        "checkpoint": epath.Path(path).name,  # whoever asks need not know this machine's folders
    }
    server = Server(network, limits, about, names)
    follower = None
    if follow:
        follower = Follower(
            path,
            run,
            network,
            lambda folder: load_for_images(folder, settings, "serve", model_options),
        )
    del run  # its weights are on the device
    _allow_connections()

    async def until_stopped() -> None:
        url = await server.start(host, port)
        stop = _first_signal()
        announce({"url": url, "model": about["model"]})
        following = asyncio.create_task(follower.run()) if follower else None
        await stop.wait()
        if following:
            following.cancel()
        logging.info("stopping: requests that are there are answered")
        await server.stop(drain)

    asyncio.run(until_stopped())


def _first_signal() -> asyncio.Event:
    """What the first SIGINT or SIGTERM sets; the second ends the process at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def arrived() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, arrived)
    return stop


def _allow_connections() -> None:
    """As many open files as this process may have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
