"""How vit_jax and its extras are installed: the only place with the project's address, and the sentence that messages
use.
"""

import functools
import importlib.metadata
import json
import os
import shlex
import urllib.parse
import urllib.request

# HOST and OWNER until the project is published. setup.py reads this line, and a test holds the guides to it.
REPOSITORY = "https://HOST/OWNER/vit_jax"


def pip_install(extra: str) -> str:
    """The command that adds an extra of setup.py to the vit_jax that is installed, for any shell:
    "pip install 'vit_jax[hub] @ git+https://…'". It names the folder, file or repository that it was installed from.
    """
    return _command(extra, _origin())


@functools.cache
def _origin() -> str:
    """`direct_url.json` of the installed package (PEP 610); '' if there is none."""
    try:
        return importlib.metadata.distribution("vit_jax").read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _command(extra: str, origin: str) -> str:
    """`pip_install` of a package whose `direct_url.json` has this text."""
    source = json.loads(origin) if origin else {}
    url, version_control = source.get("url", ""), source.get("vcs_info")
    local = urllib.parse.urlsplit(url)
    path = urllib.request.url2pathname(local.path) if local.scheme == "file" else ""
    if path and os.path.isdir(path):
        editable = "--editable " if source.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{path}[{extra}]')}"
    if version_control:
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    elif not url or path and not os.path.exists(path):  # built where it no longer is
        url = f"git+{REPOSITORY}"
    return f"pip install {shlex.quote(f'vit_jax[{extra}] @ {url}')}"
