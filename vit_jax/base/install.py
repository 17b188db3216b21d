"""How vit_jax and its extras are installed: the only module that has the project's address, and the sentence that
messages use.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import shlex
import urllib.parse
import urllib.request

# Where the project is published; '' until it is. setup.py reads this line, and a test holds the guides to it.
REPOSITORY = ""

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def pip_install(extra: str) -> str:
    """The command that adds an extra of setup.py to the vit_jax that is installed, for any shell:
    "pip install 'vit_jax[hub] @ git+https://…'". It names the folder, file or repository that it was installed from.
    """
    return _command(extra, _origin(), clone_folder(), REPOSITORY)


def clone_folder() -> pathlib.Path | None:
    """The clone that the package is in; `None` if it is installed."""
    is_installed = (_PACKAGE / "launch").is_dir()
    is_clone = (_PACKAGE.parent / "setup.py").is_file()
    return _PACKAGE.parent if is_clone and not is_installed else None


@functools.cache
def _origin() -> str:
    """`direct_url.json` of the installed package (PEP 610); '' if there is none."""
    try:
        return importlib.metadata.distribution("vit_jax").read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _command(extra: str, origin: str, clone: pathlib.Path | None, repository: str) -> str:
    """`pip_install` of a package.

    Args:
      origin: the text of its `direct_url.json`; '' without.
      clone: its `clone_folder`.
      repository: its address; '' without.
    """
    source = json.loads(origin) if origin else {}
    url = source.get("url", "")
    path = _local_path(url)
    if path and os.path.isdir(path):
        is_editable = source.get("dir_info", {}).get("editable")
        return _of_folder(path, extra, "--editable " if is_editable else "")
    version_control = source.get("vcs_info")
    if version_control:
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    elif path and not os.path.exists(path):  # The file that it was installed from is gone.
        url = ""
    if not url and clone:
        return _of_folder(str(clone), extra, "")
    if not url and repository:
        url = f"git+{repository}"
    requirement = f"vit_jax[{extra}] @ {url}" if url else f"vit_jax[{extra}]"
    return f"pip install {shlex.quote(requirement)}"


def _of_folder(path: str, extra: str, flags: str) -> str:
    """The command that installs a folder with an extra."""
    return f"pip install {flags}{shlex.quote(f'{path}[{extra}]')}"


def _local_path(url: str) -> str:
    """The path of a `file://` address; '' of any other."""
    address = urllib.parse.urlsplit(url)
    return urllib.request.url2pathname(address.path) if address.scheme == "file" else ""
