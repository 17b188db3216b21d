"""TFDS data sets downloaded and prepared, which TFDS does with TensorFlow. What can be checked
before it starts is checked first: TFDS would retry for minutes, or fail with an assertion.
"""

import importlib.util
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.install import pip_install
from vit_jax.base.schema import nearest
from vit_jax.data.options import Data
from vit_jax.data.sources.known_sets import NAMED
from vit_jax.data.sources.tfds import data_dir, is_tfds_name, tfds_names

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


# Data sets of which TFDS silently prepares whatever part is there, and the files that they need.
_BY_HAND = {
    "imagenet2012": ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"),
    "imagenet2012_real": ("ILSVRC2012_img_val.tar",),
}
_SECONDS = 5  # that a host may take to answer
_HOSTS = 3  # of which one must answer


def download(config_data: Data) -> None:
    """Lets TFDS download and prepare the data set that `config_data` names, as ArrayRecord.

    Raises:
      ConfigError: there is no such data set, or TensorFlow is not installed.
      UserError: files must be downloaded by hand first, no host can be reached, or TFDS fails.
    """
    name, folder = config_data.name, data_dir(config_data.path)
    if name in NAMED and NAMED[name].by_hand:
        raise ConfigError(NAMED[name].by_hand)
    if ":" not in name and name not in NAMED and not is_tfds_name(name):
        hint = places.nearest_existing(name) or nearest(name, tfds_names())
        raise ConfigError(
            f"{name!r} is no file, not prepared in {folder}, and TFDS has no such data set"
            + (hint if "did you mean" in hint else "")
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigError(
            f"{name!r} is not prepared in {folder}, and TFDS needs TensorFlow to do it: "
            f"{pip_install('prepare')}. Training does not need it"
        )
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.util import DownloadError

    builder_name = NAMED[name].tfds if name in NAMED else name
    try:
        builder = tfds.builder(builder_name, data_dir=str(folder), file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise ConfigError(f"TFDS has no data set {builder_name!r}: {_one_line(error)}") from None
    check_downloads(builder, folder / "downloads")
    try:
        builder.download_and_prepare()
    except (AssertionError, OSError, DownloadError) as error:
        raise UserError(
            f"TFDS cannot prepare {name!r} in {folder}: {_one_line(error)}. The same command tries again"
        ) from error


def check_downloads(builder: "tfds.core.DatasetBuilder", downloads: epath.Path) -> None:
    """Checks that what TFDS needs is there, or can be downloaded.

    Args:
      builder: of the data set.
      downloads: the folder in which TFDS keeps what it downloads; `manual` in it, what users do.

    Raises:
      UserError: a file is missing that must be downloaded by hand, or no host of the others can be
        reached.
    """
    by_hand, instructions = downloads / "manual", builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    files = {file.name for file in by_hand.iterdir()} if by_hand.is_dir() else set()
    missing = [name for name in _BY_HAND.get(builder.name, ()) if name not in files]
    if missing:
        raise UserError(
            f"{builder.name!r} must be downloaded by hand: register at https://image-net.org/download-images, "
            f"put {' and '.join(missing)} into {by_hand}, and start this command again"
        )
    if instructions and not files:
        raise UserError(
            f"{builder.name!r} must be downloaded by hand into {by_hand} (manual_dir), which is empty. "
            f"TFDS says how: {_one_line(instructions)}"
        )
    from tensorflow_datasets.core.download import resource

    urls = [
        url
        for url, info in (builder.url_infos or {}).items()
        if info.filename not in files
        and not (downloads / resource.get_dl_fname(url, info.checksum)).exists()
    ]
    hosts = list(dict.fromkeys(map(_host, urls)))[:_HOSTS]
    if not hosts:
        return
    failures = _failures(hosts)
    if all(failures):
        raise UserError(
            f"{builder.name!r} cannot be downloaded: {hosts[0][0]} cannot be reached ({failures[0]}). Prepare it "
            f"on a machine with a network, and copy {downloads.parent / builder.name} from there"
        )


def _host(url: str) -> tuple[str, int]:
    """Host and port that a download from `url` connects to: its own, or those of the proxy that is
    set for it.
    """
    scheme = urllib.parse.urlsplit(url).scheme
    host = urllib.parse.urlsplit(url).hostname or ""
    proxies = urllib.request.getproxies()
    if scheme in proxies and not urllib.request.proxy_bypass(host):
        url = proxies[scheme] if "://" in proxies[scheme] else f"http://{proxies[scheme]}"
    parts = urllib.parse.urlsplit(url)
    return parts.hostname or host, parts.port or {"http": 80, "ftp": 21}.get(parts.scheme, 443)


def _failures(hosts: list[tuple[str, int]]) -> list[str]:
    """Why each host cannot be reached; '' if it can. All are tried at once, in threads that are left
    behind: looking up a name may take longer than anyone wants to wait.
    """
    failures = ["no answer"] * len(hosts)

    def connect(i: int) -> None:
        try:
            socket.create_connection(hosts[i], timeout=_SECONDS).close()
            failures[i] = ""
        except OSError as error:
            failures[i] = error.strerror or str(error)

    threads = [threading.Thread(target=connect, args=(i,), daemon=True) for i in range(len(hosts))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return failures


def _one_line(text) -> str:
    return re.sub(r"\s+", " ", str(text)).strip().rstrip(".")
