"""The clients of buckets, gcsfs and s3fs: making them, checking whether a bucket can be reached, and explaining
their errors. Paths, and everything that is done with one, are in `places`.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vit_jax.base import starts
from vit_jax.base.errors import ConfigError, UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PATIENCE_SECONDS = 15.0
# Package and extra that read and write the buckets of a scheme.
_PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Where an error comes from that storage, or the way to it, raised: all but `OSError`.
_LIBRARIES = {"aiohttp", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs", "urllib3"}
# TensorStore's codes for storage that does not answer, or refuses; damage has different codes.
_CLIENTS = {"fsspec", "gcsfs", "s3fs"}
_REFUSED = re.compile(
    r"\b(ABORTED|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE)\b"
)
_WITHOUT_NETWORK = ("ClientConnectorError", "ConnectTimeoutError", "EndpointConnectionError")
_WITHOUT_KEYS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")
_DENIED = re.compile(
    r"\b(401|403|PERMISSION_DENIED|UNAUTHENTICATED|[Ff]orbidden|[Aa]ccess ?[Dd]enied|[Uu]nauthori[sz]ed)\b"
)


class Unreachable(UserError):
    """A bucket does not answer for now: start again."""

    exit_code = 42


@functools.cache
def client(scheme: str) -> "AbstractFileSystem":
    """The client that reads and writes the buckets of a scheme; `epath` uses the same one."""
    import fsspec

    # Listings are not cached, because other processes write the files that this one reads. Unlike gcsfs, s3fs
    # has time-outs: 5 s to connect and 15 s to read.
    settings = {"use_listings_cache": False}
    if scheme == "gs":
        import aiohttp

        settings["requests_timeout"] = aiohttp.ClientTimeout(sock_connect=15, sock_read=60)
        # It logs each error that it raises, with a traceback.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        logging.getLogger("google.auth").setLevel(logging.ERROR)
    protocol, options = ("gcs", {"finalize_on_close": True}) if scheme == "gs" else (scheme, {})
    chosen = fsspec.config.conf.setdefault(protocol, {})
    for name, value in settings.items():
        chosen.setdefault(name, value)
    return fsspec.filesystem(protocol, **options)


def check_name(address: str, field: str) -> None:
    """Raises `ConfigError` unless an address names a bucket, and no folder above another, and the
    package that reads it is installed.
    """
    scheme, bucket, key = parts(address)
    if not _NAME.fullmatch(bucket):
        raise ConfigError(
            f"{field}{address}: {bucket!r} is no name of a bucket; expected {scheme}://BUCKET/FOLDER "
            "with lower-case letters, digits, '-', '_' and '.' in BUCKET"
        )
    if {"..", "."} & set(key.split("/")):
        raise ConfigError(
            f"{field}{address}: names in a bucket have no '.' or '..': write the path out"
        )
    package, extra = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        from vit_jax.base.install import pip_install

        raise ConfigError(
            f"{field}{address}: reading buckets needs {package}: {pip_install(extra)}"
        )


_reached: set[tuple[str, str]] = set()
_asked_in_vain: set[tuple[str, str]] | None = None  # buckets, within `asking_once`


@contextlib.contextmanager
def asking_once() -> Iterator[None]:
    """Within it a bucket that has not answered is not asked again, for which each question would wait again."""
    global _asked_in_vain
    _asked_in_vain = set()
    try:
        yield
    finally:
        _asked_in_vain = None


def check_reachable(address: str, field: str) -> None:
    """Asks for one name in a bucket, once per bucket: the native code that reads it later may wait forever for a
    network or credentials.

    Raises:
      ConfigError: there is no such bucket, or no permission or credentials for it; or there is no answer within
        `PATIENCE_SECONDS`, and this is the first start of a run.
      Unreachable: there is no answer, and an earlier start may have had one.
    """
    scheme, bucket, key = parts(address)
    if (scheme, bucket) in _reached:
        return
    if _asked_in_vain is not None:
        if (scheme, bucket) in _asked_in_vain:
            raise ConfigError(
                f"{field}{address}: {scheme}://{bucket} cannot be read from here, see above"
            )
        _asked_in_vain.add((scheme, bucket))  # unless it answers, and is in `_reached` then
    importlib.import_module(_PACKAGES[scheme][0])  # which is no part of the bucket's answer
    outcome: list[Exception | None] = []

    def ask():
        try:
            if scheme == "gs":
                client(scheme).call("GET", "b/{}/o", bucket, prefix=key, maxResults=1)
            else:
                client(scheme).call_s3("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
            outcome.append(None)
        except Exception as error:  # It is raised below, in the thread that asked.
            outcome.append(error)

    # In a separate thread, because the search for credentials has time-outs that add up to minutes.
    thread = threading.Thread(target=ask, name="vit_jax-reach", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    place = f"{field}{scheme}://{bucket}"
    if not outcome:
        raise _no_network(
            f"{place}: no answer from {_server(scheme)} within {PATIENCE_SECONDS:g} s"
        )
    if (error := outcome[0]) is not None:
        if not is_failure(error):
            raise error
        raise _explained(error, place, scheme, bucket) from None
    _reached.add((scheme, bucket))


def replace(address: str, content: bytes, generation: str) -> str:
    """Writes an object that has a generation (on S3: an ETag), '' for none; returns the new one.

    Raises:
      FileExistsError, FileNotFoundError: it has another, or is gone.
    """
    scheme, bucket, key = parts(address)
    if scheme == "gs":
        upload = client(scheme).base.replace("/storage/", "/upload/storage/")
        written = client(scheme).call(
            "POST", f"{upload}b/{{}}/o", bucket, data=content, json_out=True,
            uploadType="media", name=key, ifGenerationMatch=generation or "0",
        )  # fmt: skip
        return str(written["generation"])
    condition = {"IfMatch": f'"{generation}"'} if generation else {"IfNoneMatch": "*"}
    written = client(scheme).call_s3(
        "put_object", Bucket=bucket, Key=key, Body=content, **condition
    )
    return written["ETag"].strip('"')


def remove_unchanged(address: str, generation: str) -> None:
    """Removes an object that has a generation; on S3 it is left empty. Raises as `replace` does."""
    scheme, bucket, key = parts(address)
    if scheme == "gs":
        client(scheme).call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=generation)
    else:
        replace(address, b"", generation)


def objects(address: str) -> Iterator[tuple[str, str]]:
    """Lists the objects with names that begin with an address, in one listing: each name, with a text that identifies
    the content and stays the same in copies: bytes and checksum (S3: ETag).
    """
    scheme, bucket, prefix = parts(address)
    if scheme == "gs":
        fields = "nextPageToken,items(name,size,crc32c,generation)"
        token = {}
        while token is not None:
            page = client(scheme).call(
                "GET", "b/{}/o", bucket, prefix=prefix, fields=fields, json_out=True, **token
            )
            for item in page.get("items", ()):
                checksum = item.get("crc32c") or item["generation"]
                yield item["name"], f"{item['size']}-{checksum}"
            token = {"pageToken": page["nextPageToken"]} if page.get("nextPageToken") else None
        return
    token = {}
    while token is not None:
        page = client(scheme).call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
        for item in page.get("Contents", ()):
            yield item["Key"], f"{item['Size']}-{item['ETag']}"
        more = page.get("NextContinuationToken")
        token = {"ContinuationToken": more} if more else None


def parts(address: str) -> tuple[str, str, str]:
    """The scheme of an address in a bucket, the bucket's name and the key of the object."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return scheme, bucket, key


def is_failure(error: BaseException) -> bool:
    """Whether an error is one of storage or of the network, not one of a program."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or library in _LIBRARIES


def is_absence(error: BaseException) -> bool:
    """Whether an error says that storage did not answer, or refused, and nothing about its content."""
    if isinstance(error, FileNotFoundError):
        return False
    return is_failure(error) or bool(_REFUSED.search(str(error)))


def is_denied(error: BaseException) -> bool:
    """Whether an error of storage is that there is no permission."""
    return isinstance(error, PermissionError) or bool(_DENIED.search(str(error)))


def reason(error: BaseException) -> str:
    """The message of an error of storage, in a line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[0]


def as_user_error(error: BaseException) -> UserError | None:
    """The user's error for one that a client of buckets raised; `None` for any other."""
    if not is_absence(error):
        return None
    raised = error.__cause__ or error
    libraries = set()
    trace = raised.__traceback__
    while trace:
        module = trace.tb_frame.f_globals.get("__name__", "")
        libraries.add(module.partition(".")[0])
        trace = trace.tb_next
    if not libraries & _CLIENTS:
        return None
    return failure("s3://…" if "s3fs" in libraries else "gs://…", error)


def kind_of(reply: str) -> type[UserError]:
    """`ConfigError` if storage answered that there is no permission, else `Unreachable`."""
    return ConfigError if _DENIED.search(reply) else Unreachable


def failure(path: str, error: BaseException | str) -> UserError:
    """The user's error for one of storage, or its message, after its client has tried it again."""
    reply = error if isinstance(error, str) else reason(error)
    if isinstance(error, PermissionError) or kind_of(reply) is ConfigError:
        role = _role(path.rpartition("=")[2])
        return ConfigError(f"{path}: no permission ({reply}): have {role} granted to this account")
    return Unreachable(f"{path} cannot be reached ({reply}): check the network, and start again")


def _role(address: str) -> str:
    if address.startswith("gs:"):
        return "roles/storage.objectUser"
    return "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"


def _no_network(problem: str) -> UserError:
    """The user's error where nothing answers. A first start that ended with 42 would be made a hundred times."""
    if starts.is_restart():
        return Unreachable(f"{problem}: check the network, and start again")
    return ConfigError(
        f"{problem}: this machine has no network to it; check its network and proxy settings, on Google Cloud that "
        "its subnet has Private Google Access or Cloud NAT"
    )


def _explained(error: Exception, place: str, scheme: str, bucket: str) -> UserError:
    """The user's error for a request to a bucket that failed, with advice."""
    google = scheme == "gs"
    if isinstance(error, FileNotFoundError):
        make = "gcloud storage buckets create" if google else "aws s3 mb"
        return ConfigError(
            f"{place}: there is no such bucket; correct its name, or make it: {make} {scheme}://{bucket}"
        )
    # Cloud Storage answers 401 to whoever does not say who it is; s3fs does not ask without keys.
    if type(error).__name__ in _WITHOUT_KEYS or (google and getattr(error, "code", 0) == 401):
        login = (
            "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a "
            "key file"
            if google
            else "run 'aws configure', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        return ConfigError(f"{place}: no credentials on this machine: {login}")
    if type(error).__name__ in _WITHOUT_NETWORK:
        return _no_network(f"{place}: {reason(error)}")
    return failure(place, error)


def _server(scheme: str) -> str:
    variable = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}[scheme]
    usual = {"gs": "Cloud Storage", "s3": "S3"}[scheme]
    address = os.environ.get(variable)
    return f"{address} ({variable})" if address else usual
