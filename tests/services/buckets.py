"""Buckets to test with: fixtures that start a server of Cloud Storage's or S3's interface.

Each server is a process on loopback that lives as long as the test session, with a proxy in front of
it, through which every request goes. `tests/conftest.py` makes the fixtures known to all tests:

- `bucket`, `s3_bucket`: the URL (`str`) of a new, empty bucket, `gs://…` or `s3://…`.
- `bucket_environment`, `s3_environment`: the environment variables (`dict`) that a child process needs
  to find the server; in the test's own process they are set.
- `faults`, `s3_faults`: a `Faults`, which adds latency, injects errors and counts requests. What a
  test sets is reset when it ends.
- `cloud_storage`, `s3`: the `Storage` behind these, of the whole session, for fixtures of a wider
  scope than one test: `cloud_storage.new_bucket()`.

A child process: `subprocess.Popen(…, env=os.environ | bucket_environment)`.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.services.ports import free_port
from tests.waiting import PATIENCE, until

_HERE = pathlib.Path(__file__).parent
_READS = ("GET", "HEAD")
_METHODS = (*_READS, "POST", "PUT", "PATCH", "DELETE")


class Faults:
    """What the proxy in front of a server does to requests."""

    def __init__(self, address: str):
        self._address = address
        self._latency, self._faults = 0.0, []

    def latency(self, milliseconds: float) -> None:
        """Adds this to each request from now on."""
        self._latency = milliseconds
        self._send()

    def inject(
        self,
        kind: str,
        *,
        status: int = 503,
        seconds: float = 5,
        after: int = 0,
        every: int = 1,
        times: int | None = None,
        methods: tuple[str, ...] = _METHODS,
        path: str = "",
    ) -> None:
        """Adds a fault; the first one that a request meets happens to it.

        Args:
          kind: 'status' (answered with `status`, not forwarded), 'reset' (connection reset, not
            forwarded), 'lost' (forwarded, then the connection is reset), 'stall' (forwarded after
            `seconds`, or once faults change), 'delay' (after a random time up to `seconds`), 'late'
            (forwarded at once, answered after such a time), 'truncate' (the connection ends after half of the body).
          after: so many requests that match are spared first.
          every: then each so-many-th of them.
          times: how often in all; by default until `clear`.
          methods: of the requests that match.
          path: a regular expression found in the path and query of the requests that match, or in the
            name of the object that they write.
        """
        self._faults.append(
            {"kind": kind, "status": status, "seconds": seconds, "after": after, "every": every}
            | {"times": times, "methods": methods, "path": path}
        )
        self._send()

    def clear(self) -> None:
        """Takes latency and faults away again."""
        self._latency, self._faults = 0.0, []
        self._send()

    def requests(self) -> list[tuple[str, str]]:
        """(method, path and query) of each request since `forget_requests`, oldest first."""
        with urllib.request.urlopen(f"{self._address}/_proxy/requests") as reply:
            return [tuple(request) for request in json.load(reply)]

    def forget_requests(self) -> None:
        """`requests` starts to count here."""
        _request(f"{self._address}/_proxy/requests", "DELETE")

    def _send(self) -> None:
        content = {"latency_ms": self._latency, "faults": self._faults}
        _request(f"{self._address}/_proxy/faults", "PUT", json.dumps(content).encode())


@dataclasses.dataclass
class Storage:
    """A server of buckets.

    Attributes:
      scheme: of its URLs, 'gs' or 's3'.
      server: the address of the server itself.
      environment: variables that lead every client to its proxy.
      faults: of that proxy.
    """

    scheme: str
    server: str
    environment: dict[str, str]
    faults: Faults
    _names: itertools.count = dataclasses.field(default_factory=lambda: itertools.count(1))

    def new_bucket(self) -> str:
        """The URL of a new, empty bucket."""
        name = f"bucket-{next(self._names)}"
        if self.scheme == "gs":
            content = json.dumps({"name": name}).encode()
            _request(f"{self.server}/storage/v1/b?project=tests", "POST", content)
        else:
            _request(f"{self.server}/{name}", "PUT")
        return f"{self.scheme}://{name}"


@pytest.fixture(scope="session")
def cloud_storage(tmp_path_factory):
    """A server of Cloud Storage's interface, to which gcsfs, TensorStore and ArrayRecord are pointed."""
    command = [sys.executable, str(_HERE / "cloud_storage.py")]
    with _started(command) as server, _proxy(server.address) as proxy:
        environment = {
            "STORAGE_EMULATOR_HOST": proxy.address,  # gcsfs
            "FSSPEC_GCS": '{"token": "anon"}',
            # gcsfs would first ask Google by gRPC what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "TENSORSTORE_GCS_HTTP_URL": proxy.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",  # TensorStore
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": proxy.address,  # ArrayRecord
            "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),  # for what is kept of buckets
        }
        with _environment(environment):
            yield Storage("gs", server.address, environment, Faults(proxy.address))


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A server of S3's interface, to which s3fs and TensorStore are pointed."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with _started(command, f"http://127.0.0.1:{port}") as server, _proxy(server.address) as proxy:
        environment = {
            "AWS_ENDPOINT_URL": proxy.address,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),  # for what is kept of buckets
        }
        with _environment(environment):
            yield Storage("s3", server.address, environment, Faults(proxy.address))


@pytest.fixture
def bucket(cloud_storage) -> str:
    """The URL of an empty bucket of Cloud Storage."""
    return cloud_storage.new_bucket()


@pytest.fixture
def bucket_environment(cloud_storage) -> dict[str, str]:
    """The variables by which a child process finds `bucket`."""
    return cloud_storage.environment


@pytest.fixture
def faults(cloud_storage):
    """Faults of the server of `bucket`."""
    cloud_storage.faults.forget_requests()
    yield cloud_storage.faults
    cloud_storage.faults.clear()


@pytest.fixture
def s3_bucket(s3) -> str:
    """The URL of an empty bucket of S3."""
    return s3.new_bucket()


@pytest.fixture
def s3_environment(s3) -> dict[str, str]:
    """The variables by which a child process finds `s3_bucket`."""
    return s3.environment


@pytest.fixture
def s3_faults(s3):
    """Faults of the server of `s3_bucket`."""
    s3.faults.forget_requests()
    yield s3.faults
    s3.faults.clear()


class _started:
    """A server in a process: its `address`, once it answers."""

    def __init__(self, command: list[str], address: str = ""):
        self._command, self.address = command, address

    def __enter__(self):
        prints = not self.address
        out = subprocess.PIPE if prints else subprocess.DEVNULL
        tied = [sys.executable, str(_HERE / "tied.py"), str(os.getpid())]
        self._process = subprocess.Popen(
            [*tied, *self._command], stdout=out, stderr=subprocess.DEVNULL, text=True
        )
        if prints:
            self.address = self._process.stdout.readline().strip()
        until(self._answers, self._process)
        return self

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.address}/").close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


def _proxy(upstream: str) -> _started:
    return _started([sys.executable, str(_HERE / "proxy.py"), upstream])


class _environment:
    """Sets variables in this process, for libraries that have been imported already too."""

    def __init__(self, values: dict[str, str]):
        self._values, self._patch = values, pytest.MonkeyPatch()

    def __enter__(self):
        import fsspec
        import gcsfs

        for name, value in self._values.items():
            self._patch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)
        fsspec.register_implementation("gcs", gcsfs.core.GCSFileSystem, clobber=True)

    def __exit__(self, *_):
        self._patch.undo()


def _request(url: str, method: str, content: bytes | None = None) -> None:
    headers = {"Content-Type": "application/json"} if content else {}
    urllib.request.urlopen(
        urllib.request.Request(url, content, headers, method=method), timeout=PATIENCE
    ).close()
