"""Checkpoints by name, against a server on this machine that speaks the hub's protocol."""

import hashlib
import threading
import urllib.request

import absl.logging
import jax
import numpy as np
import pytest
from huggingface_hub import constants

import vit_jax
from tests.interchange.hub_double import COMMIT
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import checkpoint_file, formats, loading, remote, web
from vit_jax.models import registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small ViT as timm lays it out on the hub, with names of classes and its own preprocessing."""
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=1, num_classes=3, activation="gelu"
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    prepared = formats.Preprocessing(
        8, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "torchvision", 9, "bicubic"
    )
    path = tmp_path_factory.mktemp("timm") / "vit"
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, ("cat", "dog", "emu"), prepared), path, "timm"
    )
    return path


@pytest.fixture
def files(folder):
    """The files of `folder`, by name."""
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def again():
    """As another command would ask: nothing is remembered but what is on the disk."""
    remote.fetch.cache_clear()
    checkpoint_file.forget()


def test_a_repository_is_read_with_its_classes_and_preprocessing(hub, files, folder, tmp_path):
    hub.repositories["timm/vit_mu"] = files | {
        "README.md": b"# hello",
        "pytorch_model.bin": b"junk",
    }
    there, here = formats.read_checkpoint("hf://timm/vit_mu"), formats.read_checkpoint(folder)
    assert there.model_config == here.model_config and there.classes == ("cat", "dog", "emu")
    assert there.preprocessing == here.preprocessing
    assert there.preprocessing.interpolation == "bicubic"
    for a, b in zip(jax.tree.leaves(there.params), jax.tree.leaves(here.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    fetched = {path for command, path in hub.asked if "/resolve/" in path}
    assert not any(name in path for path in fetched for name in ("README", "pytorch_model"))
    # Asked again in the same process, the hub is not; the same weights by revision and by file.
    before = len(hub.asked)
    model = vit_jax.load("hf://timm/vit_mu", image_size=16, num_classes=2)
    assert (model.config.image_size, model.config.num_classes) == (16, 2)
    assert len(hub.asked) == before
    loading.convert("hf://timm/vit_mu", tmp_path / "out", "huggingface")
    with pytest.raises(ConfigError, match="hf://me/mine cannot be written to"):
        loading.convert("hf://timm/vit_mu", "hf://me/mine", "timm")
    assert formats.read_checkpoint(tmp_path / "out").classes == ("cat", "dog", "emu")
    for name in (f"hf://timm/vit_mu@{COMMIT}", "hf://timm/vit_mu@main/model.safetensors"):
        assert formats.read_checkpoint(name).classes == ("cat", "dog", "emu")


def test_without_a_network_the_cache_is_read(hub, files, monkeypatch, caplog):
    absl.logging.get_absl_logger().propagate = True
    hub.repositories["timm/vit_mu"] = files
    formats.read_checkpoint("hf://timm/vit_mu")
    again()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert formats.read_checkpoint("hf://timm/vit_mu").classes == ("cat", "dog", "emu")
    assert formats.read_checkpoint("hf://timm/vit_mu/model.safetensors").classes == (
        "cat",
        "dog",
        "emu",
    )
    assert len(hub.asked) == asked
    with pytest.raises(CheckpointError, match="cannot be reached, and the cache has no copy of it"):
        formats.read_checkpoint("hf://timm/other")
    again()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    caplog.clear()
    assert formats.read_checkpoint("hf://timm/vit_mu").classes == ("cat", "dog", "emu")
    assert "hf://timm/vit_mu: the hub cannot be reached" in caplog.text
    with pytest.raises(CheckpointError, match="hf://timm/other: the hub cannot be reached"):
        formats.read_checkpoint("hf://timm/other")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf://timm/other", "no repository timm/other, or it is private: check the name, or log in"),
        ("hf://timm/deit_tiny_patch16_244.fb_in1k", r"did you mean timm/deit_tiny_patch16_224.fb_in1k,"),
        ("hf://timm/vit_mu@v2", "timm/vit_mu has no revision 'v2'"),
        ("hf://timm/vit_mu/b.pth", "timm/vit_mu has no file 'b.pth' at main"),
        ("hf://timm/empty", "timm/empty has no weights that can be read here; it has README.md"),
        ("hf://timm/two", "has several files of weights, a.pth, b.pth: choose one: hf://timm/two/a.pth"),
        ("hf://timm/gated", "timm/gated is not open to everybody: ask for access on its page"),
        ("hf://timm/private", "no repository timm/private, or it is private"),
        ("hf://timm/hidden", "timm/hidden is not open to everybody"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched_is_said(hub, files, name, words):
    hub.repositories |= {
        "timm/vit_mu": files, "timm/empty": {"README.md": b""}, "timm/gated": files,
        "timm/private": files, "timm/hidden": files, "timm/two": {"b.pth": b"", "a.pth": b""},
    }  # fmt: skip
    hub.private = {
        "timm/gated": (403, "GatedRepo"), "timm/private": (401, "RepoNotFound"), "timm/hidden": (403, ""),
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(name)


@pytest.mark.parametrize("name", ["hf://vit_mu", "hf://a/b/../c@x y", "hf://", "hf://a/--b..c"])
def test_a_name_that_is_none_is_an_error_of_the_command_line(hub, name):
    with pytest.raises((ConfigError, CheckpointError)):
        formats.read_checkpoint(name)
    assert not [path for command, path in hub.asked if command == "GET" and "resolve" in path]


def test_a_private_repository_is_read_with_a_token(hub, files, monkeypatch):
    hub.repositories["me/mine"], hub.private["me/mine"] = files, (401, "RepoNotFound")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert formats.read_checkpoint("hf://me/mine").classes == ("cat", "dog", "emu")


@pytest.mark.slow  # the package tries again for some seconds
def test_a_download_that_breaks_is_an_error_and_goes_on_later(hub, files):
    hub.repositories["timm/vit_mu"], hub.cut = files, 1000
    with pytest.raises(CheckpointError, match="hf://timm/vit_mu: "):
        formats.read_checkpoint("hf://timm/vit_mu")
    hub.cut = None
    again()
    assert formats.read_checkpoint("hf://timm/vit_mu").classes == ("cat", "dog", "emu")


def test_processes_of_a_machine_download_a_file_once(hub, files):
    """Threads here; what they share is a lock on the disk."""
    data = hub.web["/files/vit.safetensors"] = files["model.safetensors"]
    address, found = f"{hub.address}/files/vit.safetensors", []
    sum = hashlib.sha256(data).hexdigest()
    threads = [
        threading.Thread(target=lambda: found.append(web.fetch(address, sum))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and found[0].read_bytes() == data
    assert len(hub.asked) == 1


def test_a_file_from_the_web_is_downloaded_once_and_compared_with_its_checksum(hub, files, caplog):
    absl.logging.get_absl_logger().propagate = True
    hub.web["/files/vit.safetensors"] = data = files["model.safetensors"]
    address, sum = f"{hub.address}/files/vit.safetensors", hashlib.sha256(data).hexdigest()
    with pytest.raises(ConfigError, match="#sha256= is for https:// addresses"):
        formats.read_checkpoint(f"gs://a/b#sha256={sum}")
    assert formats.read_checkpoint(address).classes == ("cat", "dog", "emu")
    again()
    formats.read_checkpoint(address)  # asked whether it has changed
    assert [c for c, _ in hub.asked] == ["GET", "GET"]
    named = f"{address}#sha256={sum}"
    formats.read_checkpoint(named)
    again()
    formats.read_checkpoint(named)  # its checksum says that it has not
    assert len(hub.asked) == 3
    again()
    with pytest.raises(CheckpointError, match=f"has the SHA-256 {sum}, not {'0' * 64}"):
        formats.read_checkpoint(f"{address}#sha256={'0' * 64}")
    hub.cut = 1000
    hub.web["/files/b.safetensors"] = data
    with pytest.raises(CheckpointError, match=r"cut short, 1,000 of [\d,]+ bytes"):
        formats.read_checkpoint(f"{hub.address}/files/b.safetensors")
    with pytest.raises(CheckpointError, match="cannot be downloaded: 404"):
        formats.read_checkpoint(f"{hub.address}/files/none.safetensors")
    hub.stop()
    again()
    formats.read_checkpoint(address)
    assert "cannot be reached" in caplog.text
    with pytest.raises(ConfigError, match="anybody on the way can change what comes by http"):
        formats.read_checkpoint("http://example.com/a.pth")


def test_a_redirect_is_followed_only_to_where_nobody_can_change_what_comes(hub, files):
    hub.web["/files/vit.safetensors"] = files["model.safetensors"]
    hub.redirects = {
        "/same": f"{hub.address}/files/vit.safetensors",
        "/other": "http://192.0.2.1/vit",
    }
    assert web.fetch(f"{hub.address}/same").read_bytes() == files["model.safetensors"]
    with pytest.raises(
        CheckpointError, match="/other redirects to http://192.0.2.1/vit, and anybody"
    ):
        web.fetch(f"{hub.address}/other")
    redirect = web._SafeRedirects().redirect_request
    asked = urllib.request.Request("https://example.org/vit")
    assert redirect(asked, None, 302, "Found", {}, "https://cdn.example.org/vit") is not None
    for place in ("http://example.org/vit", "http://127.0.0.1/vit", "ftp://example.org/vit"):
        with pytest.raises(CheckpointError, match="use another address, by https://"):
            redirect(asked, None, 302, "Found", {}, place)


def test_marks_that_were_cut_short_are_as_none(hub, files):
    hub.web["/files/vit.safetensors"] = files["model.safetensors"]
    address = f"{hub.address}/files/vit.safetensors"
    path = web.fetch(address)
    marks = path.parent / "marks.json"
    whole = marks.read_text()
    marks.write_text(whole[:9])  # by an earlier version, and a full disk
    assert web.fetch(address) == path and marks.read_text() == whole
    assert [method for method, _ in hub.asked] == ["GET", "GET"]
