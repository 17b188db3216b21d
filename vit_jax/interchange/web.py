"""Checkpoints from web addresses, downloaded once into vit_jax/downloads of the user's cache
(XDG_CACHE_HOME, or ~/.cache).

A file whose checksum is given is never requested again. Of any other the server says whether it has
changed; without a network the copy is used.
"""

import fcntl
import hashlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request

from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError, ConfigError

_CHUNK = 1 << 20
_TIMEOUT = 30.0  # seconds without a byte
_SAME = 304


def fetch(address: str, sha256: str = "") -> epath.Path:
    """The file at an address, in the cache.

    Args:
      address: https://… (http:// only for this machine).
      sha256: what the file must have, in hexadecimal.

    Raises:
      ConfigError: the address is not safe or names no file.
      CheckpointError: it cannot be downloaded whole, or has another checksum.
    """
    name = os.path.basename(urllib.parse.unquote(urllib.parse.urlsplit(address).path))
    if not _is_safe(address, local=True):
        raise ConfigError(
            f"{address}: anybody on the way can change what comes by http: use https://"
        )
    if not name:
        raise ConfigError(f"{address} names no file")
    key = hashlib.sha256(f"{address}#{sha256}".encode()).hexdigest()[:24]
    cache = places.expanded(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "the folder of downloads, "
    )
    folder = cache / "vit_jax" / "downloads" / key
    folder.mkdir(parents=True, exist_ok=True)
    # Processes of one machine wait for the first of them.
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _fetch(address, sha256, folder / name)


def _fetch(address: str, sha256: str, path: epath.Path) -> epath.Path:
    marks = path.parent / "marks.json"
    known = (places.read_json(marks) or {}) if path.exists() else {}
    if known and sha256:
        return path
    request = urllib.request.Request(
        address, headers={"User-Agent": "vit_jax"} | _conditions(known)
    )
    try:
        opener = urllib.request.build_opener(_SafeRedirects)
        with opener.open(request, timeout=_TIMEOUT) as answer:
            partial = path.with_name(f"{path.name}.partial")
            digest = _copy(answer, partial, address)
            if sha256 and digest != sha256:
                partial.unlink()
                raise CheckpointError(
                    f"{address} has the SHA-256 {digest}, not {sha256}: it is not the file that was meant, or damaged"
                )
            partial.replace(path)
            about = {name: answer.headers.get(name) for name in ("ETag", "Last-Modified")}
            places.write_whole(marks, json.dumps(about))
            logging.info("%s is %s (SHA-256 %s)", address, path, digest)
    except urllib.error.HTTPError as error:
        if error.code == _SAME and known:
            return path
        raise CheckpointError(
            f"{address} cannot be downloaded: {error.code} {error.reason}"
        ) from error
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        if not known:
            raise CheckpointError(f"{address} cannot be downloaded: {reason}") from error
        logging.warning("%s cannot be reached (%s): the copy in the cache is used", address, reason)
    return path


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to where nobody on the way can change what comes."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not _is_safe(newurl, local=req.full_url.startswith("http://")):
            raise CheckpointError(
                f"{req.full_url} redirects to {newurl}, and anybody on the way can change what comes from there: use "
                "another address, by https://"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_safe(address: str, *, local: bool) -> bool:
    """Whether an address is https://, or, if `local`, http:// of this machine."""
    parts = urllib.parse.urlsplit(address)
    of_this_machine = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1")
    return parts.scheme == "https" or (local and of_this_machine)


def _conditions(known: dict[str, str | None]) -> dict[str, str]:
    """The headers of a request for a file only if it has changed."""
    headers = {"If-None-Match": known.get("ETag"), "If-Modified-Since": known.get("Last-Modified")}
    return {name: value for name, value in headers.items() if value}


def _copy(answer, partial: epath.Path, address: str) -> str:
    """Writes an answer to a file, and gives its SHA-256."""
    size, done, digest = answer.headers.get("Content-Length"), 0, hashlib.sha256()
    with partial.open("wb") as file:
        while block := answer.read(_CHUNK):
            file.write(block)
            digest.update(block)
            done += len(block)
    if size is not None and done != int(size):
        partial.unlink()
        raise CheckpointError(
            f"{address}: the download was cut short, {done:,} of {int(size):,} bytes: try again"
        )
    return digest.hexdigest()
