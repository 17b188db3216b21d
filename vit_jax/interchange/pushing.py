"""Models to the Hugging Face hub, through `huggingface_hub`: its tokens, its variables HF_ENDPOINT and HF_HOME.

What is uploaded is what is listed here, and no more: the weights that the model is evaluated with, in timm's or
transformers' layout, how images are prepared, the names of the classes, and a model card.
"""

import json
import os
import pathlib
import re
import tempfile
from typing import Any

from absl import logging

from vit_jax.base.errors import CheckpointError, ConfigError, UserError
from vit_jax.base.install import pip_install
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.interchange import formats, model_card, saved_objectives
from vit_jax.interchange.checkpoint_file import CONFIG

FORMATS = ("timm", "huggingface")
CARD = "README.md"
_OF_THE_HUB = ".gitattributes"  # which it makes itself
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_LOGIN = "log in with 'hf auth login', or set HF_TOKEN"


def push(
    run: TrainedModel,
    checkpoint: formats.LoadedCheckpoint,
    repository: str,
    *,
    format: str = "",
    private: bool = False,
    license: str = "",
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Uploads a model; a repository that is not there is created.

    Args:
      run: that the model is of.
      checkpoint: the same model as formats write it.
      repository: OWNER/NAME.
      format: timm or huggingface (transformers); '': the first that can express the model.
      private: whether the repository is to be private, if it is created.
      license: an identifier for the card, such as apache-2.0.
      overwrite: whether the repository may hold another model, and a model card of somebody's own, which otherwise
        stays.
      dry_run: uploads nothing and needs no network.

    Returns:
      `repository`, `format`, `files` that are uploaded with their sizes, `card` (its text), `url` ('' in a dry run),
      and `kept`: files that the repository had before and that are not replaced.

    Raises:
      ConfigError: the name is no OWNER/NAME, `huggingface_hub` is missing, nobody is logged in, or the repository holds
        another model.
      CheckpointError: neither format can express the model.
      UserError: the hub refuses it or cannot be reached.
    """
    check_push(repository, format, dry_run=dry_run)
    if not checkpoint.preprocessing:
        logging.warning(
            "%s: it is not known how images are normalised; users of %s have to set it", run.directory, repository
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "model"
        format = _write(saved_objectives.without(checkpoint), folder, format)
        card = model_card.make_card(run, checkpoint, repository, format=format, license=license)
        (folder / CARD).write_text(card)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        result = {"repository": repository, "format": format, "files": files, "card": card}
        if dry_run:
            return result | {"url": "", "kept": []}
        result |= _upload(folder, repository, private=private, overwrite=overwrite)
    files = {name: size for name, size in files.items() if name not in result["kept"]}
    return result | {"files": files}


def text(result: dict[str, Any]) -> str:
    """`push`'s result for a person."""
    lines = [f"{size:>14,}  {name}" for name, size in result["files"].items()]
    head = result["url"] or f"{result['repository']}: nothing was uploaded (--dry_run)"
    if result["kept"]:
        lines.append(
            f"{result['repository']} had these files before, which stay: {', '.join(result['kept'])}. "
            "Remove those that belong to an earlier model on its page"
        )
    card = "" if result["url"] else f"\n\n{CARD}:\n\n{result['card']}"
    return "\n".join([head, *lines]) + card


def check_push(repository: str, format: str, *, dry_run: bool) -> None:
    """Raises the `ConfigError` of `push` for what is wrong whatever the model is."""
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"{repository!r} is not OWNER/NAME, such as me/vit-b16-pets")
    if format not in ("", *FORMATS):
        raise ConfigError(f"format={format!r}: must be {' or '.join(FORMATS)}")
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(f"push needs huggingface_hub: {pip_install('hub')}") from None
    if not dry_run and not huggingface_hub.get_token():
        raise ConfigError(f"push needs a token of the hub with the right to write: {_LOGIN}")


def _write(checkpoint: formats.LoadedCheckpoint, folder: pathlib.Path, wanted: str) -> str:
    """Writes the model in the format that is wanted, or the first that can express it: which it is."""
    refusals = []
    for format in (wanted,) if wanted else FORMATS:
        try:
            formats.write_checkpoint(checkpoint, folder, format)
            return format
        except CheckpointError as error:
            refusals.append(f"{format}: {error}")
    raise CheckpointError(
        "the model is not uploaded, since no such layout has it. " + " ".join(refusals)
    )


def _upload(
    folder: pathlib.Path, repository: str, *, private: bool, overwrite: bool
) -> dict[str, Any]:
    """Uploads a folder as one commit; returns the `url` of the repository, and the files that are `kept`."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        before = _files(api, repository)
        if not overwrite:
            _check_same_model(api, folder, repository, before)
            _keep_edited_card(api, folder, repository, before)
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload model with vit_jax"
        )
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  the package raises its own, its HTTP library's, OSError and ValueError
        raise _explained(error, repository) from error
    replaced = {path.name for path in folder.iterdir()} | {_OF_THE_HUB}
    return {"url": str(url), "kept": sorted(set(before) - replaced)}


def _files(api, repository: str) -> list[str]:
    """What the repository holds; [] if it does not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.list_repo_files(repository)
    except RepositoryNotFoundError:
        return []


def _keep_edited_card(api, folder: pathlib.Path, repository: str, names: list[str]) -> None:
    """Removes the card from the folder if the repository, which holds the files `names`, has one that is not ours."""
    if CARD in names and not model_card.is_ours(_text_of(api, repository, CARD)):
        logging.warning(
            "%s has a %s that was written or edited by hand: it stays. To replace it by the new model card, which "
            "--dry_run prints, pass --overwrite (overwrite=True)",
            repository, CARD,
        )  # fmt: skip
        (folder / CARD).unlink()


def _text_of(api, repository: str, name: str) -> str:
    return pathlib.Path(api.hf_hub_download(repository, name)).read_bytes().decode()


def _check_same_model(api, folder: pathlib.Path, repository: str, names: list[str]) -> None:
    """Raises `ConfigError` if the repository, which holds the files `names`, has another model than the folder."""
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pth", ".npz"))]
    if not weights:
        return
    theirs = {}
    if CONFIG in names:
        theirs = json.loads(_text_of(api, repository, CONFIG))
    ours = json.loads((folder / CONFIG).read_text())
    differ = [name for name in _identity(ours) if _identity(ours)[name] != _identity(theirs)[name]]
    if differ:
        differences = ", ".join(
            f"{name} {_identity(theirs)[name]!r} there, {_identity(ours)[name]!r} here"
            for name in differ
        )
        raise ConfigError(
            f"{repository} holds another model ({differences}): choose another name, or "
            "pass --overwrite (overwrite=True)"
        )


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """Of a config.json what two versions of one model have in common."""
    names = ("architecture", "model_type", "num_classes", "hidden_size", "num_hidden_layers")
    return {name: config.get(name) for name in names} | {
        "model_args": config.get("model_args") or None,
        "classes": len(config.get("id2label") or ()),
    }


def _explained(error: Exception, repository: str) -> UserError:
    """What an error of the hub means, as a sentence; no header of a request is in it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if status in (401, 403):
        return ConfigError(
            f"the hub does not allow writing to {repository}: {_LOGIN}, with a token that may write to "
            f"{os.path.dirname(repository)}"
        )
    return UserError(f"{repository} is not uploaded: {first}. The same command can be run again")
