"""What the name of a checkpoint means: a path as it is, `hf://` and `https://` the file or folder that
was downloaded for it. What follows a `#` says more:

    hf://OWNER/NAME[@REVISION][/FILE]
    NAME                           of timm, such as vit_base_patch16_224.augreg_in21k: hf://timm/NAME
    https://HOST/FILE#sha256=SUM
    FILE#state_dict=KEY            which weights, of a file with several; after the others also: &state_dict=KEY
    FILE#prefix=NAME               the tensors whose names begin with NAME., without it
    FILE#ignore=PATTERN            without the tensors whose names match a regular expression
"""

import dataclasses
import difflib
import functools
import os
import re
import urllib.parse

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.interchange.state_dicts import Selection
from vit_jax.models import published

_PARAMETERS = re.compile(r"#((?:sha256|state_dict|prefix|ignore)=[^#]*)$")
_SELECTING = ("state_dict", "prefix", "ignore")


@dataclasses.dataclass(frozen=True)
class Name:
    """The name of a checkpoint, taken apart.

    Attributes:
      place: path or address.
      sha256: of the file, in hexadecimal; '' if nobody says.
      selection: which of its tensors are read.
    """

    place: str
    sha256: str = ""
    selection: Selection = Selection()


def parse_name(name: epath.PathLike) -> Name:
    """Takes a name apart.

    Raises:
      ConfigError: what follows the `#` is not understood.
    """
    text = os.fspath(name)
    match = _PARAMETERS.search(text)
    if not match:
        return Name(_local(text))
    parameters = dict(part.partition("=")[::2] for part in match[1].split("&"))
    if unknown := parameters.keys() - {"sha256", *_SELECTING}:
        raise ConfigError(
            f"{text}: #{sorted(unknown)[0]}= is not known, only #sha256=, #state_dict=, #prefix= and #ignore="
        )
    place = text[: match.start()]
    sha256 = parameters.pop("sha256", "").lower()
    if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError(f"{text}: #sha256= takes the 64 hexadecimal digits that sha256sum prints")
    if sha256 and not place.startswith(("https://", "http://")):
        raise ConfigError(f"{text}: #sha256= is for https:// addresses")
    return Name(_local(place), sha256, Selection(**parameters))


def with_ignored(name: str, pattern: str) -> str:
    """The name of a checkpoint without the tensors whose names match a pattern."""
    joint = "&" if _PARAMETERS.search(name) else "#"
    return f"{name}{joint}ignore={pattern}"


def timm_address(name: str) -> str:
    """hf://timm/NAME.TAG for a published name of timm, with its tag or without; '' for any other."""
    architecture, _, tag = name.partition(".")
    known = published.architectures().get(architecture)
    if known is None or not known.tags or (tag and tag not in known.tags):
        return ""
    return f"hf://timm/{architecture}.{tag or next(iter(known.tags))}".rstrip(".")


def nearest_published(name: str) -> str:
    """'; did you mean …?' for what is nearly a published name of timm, else ''."""
    architecture = name.partition(".")[0]
    known = published.architectures()
    if "/" in name or not difflib.get_close_matches(architecture, known, n=1, cutoff=0.9):
        return ""
    return published.nearest_published(name)


def _local(place: str) -> str:
    """The path that a file:// address names; the address of a name of timm, unless it is a local file's; others
    as they are.
    """
    if not place.startswith("file://"):
        return place if os.path.exists(place) else timm_address(place) or place
    parts = urllib.parse.urlsplit(place)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{place} names another machine: file:///PATH is a file of this one")
    return urllib.parse.unquote(parts.path)


def is_remote(name: epath.PathLike) -> bool:
    """Whether a name is one that is downloaded."""
    return os.fspath(name).startswith(("hf://", "https://", "http://"))


def check_name(name: epath.PathLike) -> None:
    """Raises `ConfigError` if a name is of no service that could hold a checkpoint; downloads nothing."""
    name = parse_name(name)
    if not is_remote(name.place):
        places.locate(name.place)


def locate(name: Name) -> epath.Path:
    """Where the file or folder is, downloaded if need be.

    Raises:
      ConfigError: the name makes no sense, or a package is missing.
      CheckpointError: it cannot be downloaded.
    """
    return fetch(name.place, name.sha256) if is_remote(name.place) else places.locate(name.place)


@functools.cache  # a command asks several times: one visit to the network
def fetch(place: str, sha256: str = "") -> epath.Path:
    """Downloads what an address names, unless it is in the cache."""
    if place.startswith("hf://"):
        from vit_jax.interchange import hub

        return hub.fetch(place)
    from vit_jax.interchange import web

    return web.fetch(place, sha256)
