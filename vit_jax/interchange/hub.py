"""Checkpoints by name from the Hugging Face hub, through `huggingface_hub`: its cache, its tokens, its
variables HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE. Processes of one machine share what is downloaded.

Of a repository only what a checkpoint needs is fetched: config.json, how images are prepared, and the
weights, safetensors rather than pickles. Without a network the copy in the cache is used.
"""

import difflib
import fnmatch
import os
import re
from collections.abc import Collection
from typing import NoReturn

from absl import logging
from etils import epath

from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.install import pip_install
from vit_jax.interchange import pytorch
from vit_jax.interchange.checkpoint_file import CONFIG, PROCESSOR
from vit_jax.models import published

# A revision may be a branch, a tag, a commit, or what the hub keeps for requests and conversions.
_NAME = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<file>.+))?"
)
_COMPANIONS = (CONFIG, PROCESSOR)
# A single file of weights under another name, the first kind of which there is one.
_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
_SHOWN = 12


def fetch(name: str) -> epath.Path:
    """The folder, or the file, of a checkpoint on the hub.

    Args:
      name: hf://OWNER/NAME[@REVISION][/FILE].

    Raises:
      ConfigError: it is no such name, or `huggingface_hub` is missing.
      CheckpointError: there is no such repository, revision or file, it may not be read, it has no
        weights, or it cannot be downloaded.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise ConfigError(f"{name!r} is not hf://OWNER/NAME[@REVISION][/FILE]")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{name}: reading from the hub needs huggingface_hub: {pip_install('hub')}"
        ) from None
    repo, revision, file = match["repo"], match["revision"] or "main", match["file"]
    try:
        path = _file(repo, revision, file) if file else _repository(name, repo, revision)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  the package raises its own, its HTTP library's, OSError and ValueError
        _explain(name, repo, revision, file, error)
    logging.info("%s is %s", name, path)
    return path


def _file(repo: str, revision: str, file: str) -> epath.Path:
    """One file, and what says more about it in its folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    path = epath.Path(hf_hub_download(repo, file, revision=revision))
    for companion in _COMPANIONS:
        try:
            hf_hub_download(repo, os.path.join(os.path.dirname(file), companion), revision=revision)
        except EntryNotFoundError:
            continue
    return path


def _repository(name: str, repo: str, revision: str) -> epath.Path:
    """The folder with the checkpoint of a repository, or the one file that is it."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().repo_info(repo, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
    except Exception as error:  # noqa: BLE001  see `fetch`
        if not _is_unreachable(error):
            raise
        # No pattern of any file: whatever is there of it.
        folder = epath.Path(
            snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns="-")
        )
        logging.warning(
            "%s: the hub cannot be reached (%s): the copy in the cache is used", name, _first(error)
        )
        weights = weights_of(name, [entry.name for entry in folder.iterdir()])
    else:
        weights = weights_of(name, names)
        wanted = [
            name_in_repo
            for name_in_repo in names
            if name_in_repo in (*_COMPANIONS, weights) or _is_shard(name_in_repo, weights)
        ]
        folder = epath.Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    return folder if (folder / CONFIG).exists() and weights in pytorch.NAMES else folder / weights


def weights_of(name: str, files: Collection[str]) -> str:
    """The file of a repository that holds the weights, or the index of those that do.

    Args:
      name: of the repository, for messages.
      files: all that it has.

    Raises:
      CheckpointError: there is none, or it is not clear which.
    """
    for usual in pytorch.NAMES:
        if usual in files:
            return usual
    for suffix in _SUFFIXES:
        candidates = sorted(file for file in files if file.endswith(suffix))
        if len(candidates) > 1:
            raise CheckpointError(
                f"{name} has several files of weights, {', '.join(candidates[:_SHOWN])}: choose one: "
                f"{name}/{candidates[0]}"
            )
        if candidates:
            return candidates[0]
    shown = ", ".join(sorted(files)[:_SHOWN]) or "nothing"
    raise CheckpointError(f"{name} has no weights that can be read here; it has {shown}")


def _is_shard(file: str, weights: str) -> bool:
    stem, dot, kind = weights.removesuffix(".index.json").rpartition(".")
    return weights.endswith(".index.json") and fnmatch.fnmatchcase(
        file, f"{stem}-*-of-*{dot}{kind}"
    )


def _is_unreachable(error: Exception) -> bool:
    """Whether there is no way to the hub, rather than an answer from it."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    # The package has had several HTTP libraries, whose errors are called alike.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    network = {
        "ConnectError",
        "ConnectTimeout",
        "TimeoutException",
        "ConnectionError",
        "NetworkError",
    }
    return isinstance(error, OfflineModeIsEnabled) or bool(kinds & network)


def _explain(name: str, repo: str, revision: str, file: str | None, error: Exception) -> NoReturn:
    """Raises what `error` means, as a sentence."""
    from huggingface_hub import errors

    token = "log in with 'hf auth login', or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        raise ConfigError(
            f"{name!r} is not hf://OWNER/NAME[@REVISION][/FILE]: {_first(error)}"
        ) from error
    if isinstance(error, errors.GatedRepoError) or status == 403:
        why = f"{repo} is not open to everybody: ask for access on its page, and {token}"
    elif isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        why = f"there is no repository {repo}, or it is private: check the name, or {token}{_published(repo)}"
    elif isinstance(error, errors.RevisionNotFoundError):
        why = f"{repo} has no revision {revision!r}"
    elif isinstance(error, errors.LocalEntryNotFoundError) or _is_unreachable(error):
        why = (
            f"the hub cannot be reached, and the cache has no {file or 'copy of it'} ({_first(error)}); on a machine "
            f"with a network run 'hf download {repo} --local-dir=FOLDER', copy FOLDER here, and pass its path"
        )
    elif isinstance(error, errors.EntryNotFoundError):
        why = f"{repo} has no file {file!r} at {revision}"
    else:
        why = (
            f"it cannot be downloaded: {_first(error)}. The same command continues where it stopped"
        )
    raise CheckpointError(f"{name}: {why}") from error


def _published(repo: str) -> str:
    """'; did you mean …?' with the published models whose names are most like that of a repository."""
    known = [f"timm/{name}" for name in published.names()]
    close = difflib.get_close_matches(repo, known, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
